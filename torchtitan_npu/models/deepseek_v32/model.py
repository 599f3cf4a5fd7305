"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model

from torchtitan_npu.components.auxiliary_loss import AuxiliaryLoss
from torchtitan_npu.distributed.microbatches import Microbatches
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.block import Block
from torchtitan_npu.models.deepseek_v32.documents import Documents
from torchtitan_npu.models.deepseek_v32.mtp import MTPBlock, MultiTokenLogits, predict_further


class DeepSeekV32Model(DeepSeekV3Model):
    """TorchTitan's model, its forward and initialisation, with blocks that have another attention.

    Layers of multi-token prediction come after the others among the ``layers``, as in the release: what is done to each
    layer (sharding, activation checkpointing, balancing of experts) is done to them.
    """

    def __init__(self, model_args: DeepSeekV32ModelArgs) -> None:
        args = model_args.as_titan_takes_it()
        without_layers = copy.copy(args)
        without_layers.n_layers = 0  # which are made below
        super().__init__(without_layers)
        self.model_args = model_args
        for layer_id in range(model_args.n_layers + model_args.n_mtp_layers):
            kind = Block if layer_id < model_args.n_layers else MTPBlock
            self.layers[str(layer_id)] = kind(layer_id, args)
        if model_args.n_mtp_layers:
            self.mtp_loss = AuxiliaryLoss("mtp_loss", model_args.mtp_loss_weight, of_labels=True)
        # TorchTitan leaves this epsilon to torch, which takes 8e-3 in bfloat16
        self.norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        if model_args.warmup:
            self.freeze_all_but_indexers()
            for block in cast(Iterable[Block], self.layers.values()):
                block.ffn_norm.register_forward_pre_hook(_cut_off)

    def forward(
        self, tokens: Tensor, attention_masks: Documents | None = None, positions: Tensor | None = None
    ) -> Tensor | MultiTokenLogits:
        """The logits (bsz, seqlen, vocab_size) of ``tokens`` (bsz, seqlen); in training also those further ahead."""
        if self.model_args.n_mtp_layers == 0:
            return super().forward(tokens, attention_masks, positions)
        blocks = list(self.layers.values())
        main, further = blocks[: self.model_args.n_layers], blocks[self.model_args.n_layers :]

        h = embeddings = self.tok_embeddings(tokens)  # (bsz, seqlen, dim)
        for block in main:
            h = block(h, self.freqs_cis, attention_masks, positions)
        if not self.training:
            return self.output(self.norm(h))
        states = predict_further(further, h, embeddings, self.freqs_cis, attention_masks, positions)
        # at once, since FSDP gathers the output's weights and reduces their gradients for each call
        all_logits = self.output(torch.cat([self.norm(h), *states]))  # ((1 + depths) * bsz, seqlen, vocab_size)
        logits, *further_logits = all_logits.chunk(1 + len(states))
        return MultiTokenLogits(logits, tuple(further_logits), self.mtp_loss)

    def freeze_all_but_indexers(self) -> None:
        """For the stage that comes first where a model was trained without indexers."""
        self.requires_grad_(False)
        blocks: Any = self.layers.values()
        for block in blocks:
            block.attention.indexer.requires_grad_(True)
            if block.moe_enabled:
                block.moe.load_balance_coeff = 0.0  # the bias that balances experts is no parameter, but learns too

    def get_attention_masks(
        self, input_batch: Tensor, tokenizer: BaseTokenizer, extra_inputs: dict[str, Tensor] | None = None
    ) -> Documents | Microbatches:
        """The documents of ``input_batch`` (bsz, seqlen), which end with the tokenizer's end-of-sequence token.

        In a pipeline, those of each microbatch.
        """
        if tokenizer.eos_id is None:
            raise UsageError("dsa.document_mask needs a tokenizer with an end-of-sequence token (model.hf_assets_path)")
        documents = Documents.of(input_batch, tokenizer.eos_id)
        microbatches = self.model_args.microbatches
        return documents if microbatches is None else Microbatches(documents.split(microbatches))


def _cut_off(norm: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """A frozen network's input in the warm-up: attention's output, on which the indexer's loss hangs, has a gradient.

    The way to that loss leads past the network, along the residual. Through the network it would keep all that a
    backward pass needs, and compute gradients that nobody uses.
    """
    return (inputs[0].detach(),)
