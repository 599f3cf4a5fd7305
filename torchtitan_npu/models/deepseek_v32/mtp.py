"""Multi-token prediction: layers after the last, each of which predicts one token further than the one before."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX, LossFunction
from torchtitan.models.utils import trunc_normal_

from torchtitan_npu.components.auxiliary_loss import AuxiliaryLoss
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.block import Block
from torchtitan_npu.models.deepseek_v32.documents import Documents


class MTPBlock(Block):
    """A block of the model that also sees the token it did not have to predict: the one after the depth before's."""

    def __init__(self, layer_id: int, args: DeepSeekV32ModelArgs) -> None:
        super().__init__(layer_id, args)
        self.enorm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.hnorm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.eh_proj = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.final_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(  # type: ignore[override]  # it is called by another model
        self,
        h: Tensor,
        embeddings: Tensor,
        freqs_cis: Tensor,
        attention_masks: Documents | None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The state of this depth, and that state normed for the model's output; all (bsz, seqlen, dim).

        ``h`` is the state of the depth before, and not normed; at first the last main layer's. ``embeddings`` are those
        of the tokens that it predicted.
        """
        x = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(h)], dim=-1))
        h = super().forward(x, freqs_cis, attention_masks, positions)
        return h, self.final_norm(h)

    def init_weights(self, buffer_device: torch.device) -> None:
        super().init_weights(buffer_device)
        for norm in (self.enorm, self.hnorm, self.final_norm):
            norm.reset_parameters()
        trunc_normal_(self.eh_proj.weight, mean=0.0, std=0.02)


def predict_further(
    blocks: list[Any],
    h: Tensor,
    embeddings: Tensor,
    freqs_cis: Tensor,
    attention_masks: Documents | None,
    positions: Tensor | None,
) -> list[Tensor]:
    """The states of all depths, normed for the output, of the main layers' ``h`` and the tokens' ``embeddings``.

    The sequence stays as long as it is, so that documents, positions and kernels need not know: the last k tokens of
    depth k, whose next token the batch does not have, get zeros for it. No other token sees them, and nothing is
    predicted from them. The indexer's loss is of every query, theirs too.
    """
    states = []
    for block in blocks:
        embeddings = F.pad(embeddings[:, 1:], (0, 0, 0, 1))
        h, state = block(h, embeddings, freqs_cis, attention_masks, positions)
        states.append(state)
    return states


class MultiTokenLogits(NamedTuple):
    """What the model computes in training."""

    logits: Tensor
    """Of the next token, (bsz, seqlen, vocab_size)."""
    further: tuple[Tensor, ...]
    """The same of the token after that, and so on."""
    account: AuxiliaryLoss
    """Where the loss of these is counted."""

    def with_loss(self, loss_fn: LossFunction, labels: Tensor) -> Tensor:
        """``logits``; their backward pass starts that of the mean of the ``further`` ones' losses, too.

        Depth k predicts at place i what the model predicts at place i + k; ``labels`` (bsz, seqlen).
        """
        losses = []
        for depth, logits in enumerate(self.further, start=1):
            targets = F.pad(labels[:, depth:], (0, depth), value=IGNORE_INDEX)
            losses.append(loss_fn(logits, targets))
        return self.account.attach(self.logits, torch.stack(losses).mean())
