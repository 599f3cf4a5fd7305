"""Multi-token prediction: extra layers at the end, each of which predicts one token further ahead."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX, LossFunction
from torchtitan.models.utils import trunc_normal_

from torchtitan_npu.layers.auxiliary_loss import AuxiliaryLoss
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.block import Block


class MTPBlock(Block):
    """A block whose input also contains the embedding of the token that the previous depth predicted."""

    def __init__(self, layer_id: int, args: DeepSeekV32ModelArgs) -> None:
        super().__init__(layer_id, args)
        self.enorm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.hnorm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.final_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(  # type: ignore[override]  # only DeepSeekV32Model calls it
        self,
        h: Tensor,
        embeddings: Tensor,
        freqs_cis: Tensor,
        attention_masks: Documents | None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden state of this depth, and the same normed for the output layer; all (bsz, seqlen, dim).

        ``h`` is the hidden state of the previous depth, before its norm. ``embeddings`` are those of the tokens that
        the previous depth predicted.
        """
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(h)], dim=-1))
        h = super().forward(x, freqs_cis, attention_masks, positions)
        return h, self.final_norm(h)

    def init_weights(self, buffer_device: torch.device) -> None:
        super().init_weights(buffer_device)
        for norm in (self.enorm, self.hnorm, self.final_norm):
            norm.reset_parameters()
        trunc_normal_(self.eh_proj.weight, mean=0.0, std=0.02)


def run_mtp_layers(
    blocks: list[Any],
    h: Tensor,
    embeddings: Tensor,
    freqs_cis: Tensor,
    attention_masks: Documents | None,
    positions: Tensor | None,
) -> list[Tensor]:
    """Return the normed hidden states of all depths, from the main layers' ``h`` and the tokens' ``embeddings``.

    The sequence keeps its length, so that documents, positions and kernels do not change. For the last k tokens of
    depth k the batch has no further token; their embeddings are zeros. No other token sees them, and the loss ignores
    them. The indexer's loss counts every query, these too.
    """
    states = []
    for block in blocks:
        embeddings = F.pad(embeddings[:, 1:], (0, 0, 0, 1))
        h, state = block(h, embeddings, freqs_cis, attention_masks, positions)
        states.append(state)
    return states


class MultiTokenLogits(NamedTuple):
    """The output of the model in training."""

    logits: Tensor
    """Logits of the next token, (bsz, seqlen, vocab_size)."""
    mtp_logits: tuple[Tensor, ...]
    """Logits of the tokens after it, one tensor per depth."""
    aux_loss: AuxiliaryLoss
    """Counts the loss of ``mtp_logits``."""

    def with_loss(self, loss_fn: LossFunction, labels: Tensor) -> Tensor:
        """Return ``logits``, whose backward pass also runs that of the mean loss of ``mtp_logits``.

        Depth k predicts at position i what the model predicts at position i + k. ``labels`` are (bsz, seqlen).
        """
        losses = []
        for depth, logits in enumerate(self.mtp_logits, start=1):
            targets = F.pad(labels[:, depth:], (0, depth), value=IGNORE_INDEX)
            losses.append(loss_fn(logits, targets))
        return self.aux_loss.attach(self.logits, torch.stack(losses).mean())
