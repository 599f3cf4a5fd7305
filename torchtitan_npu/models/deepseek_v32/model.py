"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model

from torchtitan_npu.dist_utils import Microbatches
from torchtitan_npu.distributed.context_parallel import ContextParallel
from torchtitan_npu.layers.auxiliary_loss import AuxiliaryLoss
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.block import Block
from torchtitan_npu.models.deepseek_v32.context_parallel import DSAContextParallel
from torchtitan_npu.models.deepseek_v32.mtp import MTPBlock, MultiTokenLogits, run_mtp_layers


class DeepSeekV32Model(DeepSeekV3Model):
    """TorchTitan's DeepSeek-V3 with sparse attention in its blocks.

    Layers of multi-token prediction follow the main ones in ``layers``, as in the release. So sharding, activation
    checkpointing and expert balancing apply to them too.
    """

    context_parallel_class: ClassVar[type[ContextParallel]] = DSAContextParallel
    """The context parallel of this model's attention, unless the job names another."""

    def __init__(self, model_args: DeepSeekV32ModelArgs) -> None:
        without_layers = copy.copy(model_args)
        without_layers.n_layers = 0  # built below
        super().__init__(without_layers)
        self.model_args = model_args
        for layer_id in range(model_args.n_layers + model_args.n_mtp_layers):
            block_cls = Block if layer_id < model_args.n_layers else MTPBlock
            self.layers[str(layer_id)] = block_cls(layer_id, model_args)
        if model_args.n_mtp_layers:
            self.mtp_loss = AuxiliaryLoss("mtp_loss", model_args.mtp_loss_weight, of_labels=True)
        # TorchTitan leaves this epsilon unset, and torch then uses 8e-3 in bfloat16
        self.norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        if model_args.warmup:
            self.freeze_all_but_indexers()
            for block in cast(Iterable[Block], self.layers.values()):
                block.ffn_norm.register_forward_pre_hook(_detach_input)

    def forward(
        self,
        tokens: Tensor,
        *shared: Tensor,
        attention_masks: Documents | None = None,
        positions: Tensor | None = None,
    ) -> Any:
        """Return the logits (bsz, seqlen, vocab_size) of ``tokens`` (bsz, seqlen), in training with ``mtp_logits``.

        A pipeline stage receives hidden states instead of ``tokens`` and returns them instead of logits. If a stage
        starts with a layer without an indexer, the stage before also sends what its last layer shares
        (``args.passed_tensors``).
        """
        if self.model_args.takes_attention_masks and attention_masks is None:
            raise ValueError("attention_masks is None, but the model attends within documents")
        n_layers = self.model_args.n_layers
        main, mtp_blocks = ([b for n, b in self.layers.items() if (int(n) >= n_layers) == mtp] for mtp in (False, True))

        h = embeddings = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)  # (bsz, seqlen, dim)
        shared = tuple(map(_received, shared))
        for block in main:
            h = block(h, self.freqs_cis, attention_masks, positions, shared)
            h, shared = (h[0], h[1:]) if isinstance(h, tuple) else (h, ())
        if not (mtp_blocks and self.training):
            h = h if self.norm is None else self.norm(h)
            h = h if self.output is None else self.output(h)
            # a pipeline sends contiguous tensors, and detaches in place what it has sent, which a view does not allow
            return (h, *(x.clone(memory_format=torch.contiguous_format) for x in shared)) if shared else h
        states = run_mtp_layers(mtp_blocks, h, embeddings, self.freqs_cis, attention_masks, positions)
        # in one call: FSDP gathers the output's weights and reduces their gradients once per call
        all_logits = self.output(torch.cat([self.norm(h), *states]))  # ((1 + depths) * bsz, seqlen, vocab_size)
        logits, *mtp_logits = all_logits.chunk(1 + len(states))
        return MultiTokenLogits(logits, tuple(mtp_logits), self.mtp_loss)

    def freeze_all_but_indexers(self) -> None:
        """Freeze the model for the warm-up stage, in which indexers are added to a model trained without them."""
        self.requires_grad_(False)
        blocks: Any = self.layers.values()
        for block in blocks:
            if block.attention.indexer is not None:
                block.attention.indexer.requires_grad_(True)
            if block.moe_enabled:
                block.moe.load_balance_coeff = 0.0  # freeze the expert bias too, which is not a parameter

    def get_attention_masks(
        self, input_batch: Tensor, tokenizer: BaseTokenizer, extra_inputs: dict[str, Tensor] | None = None
    ) -> Documents | Microbatches:
        """Return the documents of ``input_batch`` (bsz, seqlen), which end with the tokenizer's eos token.

        In a pipeline, return the documents of each microbatch.
        """
        assert tokenizer.eos_id is not None
        documents = Documents.from_tokens(input_batch, tokenizer.eos_id)
        microbatches = self.model_args.microbatches
        return documents if microbatches is None else Microbatches(documents.split(microbatches))


def _received(shared: Tensor) -> Tensor:
    """Return a tensor that a pipeline stage receives, with a contiguous gradient, because only such can be sent.

    The result is not a leaf: in a split backward pass, autograd cannot tell an operator whether a leaf needs one.
    """
    if not shared.requires_grad:
        return shared
    shared = shared.view_as(shared)
    shared.register_hook(Tensor.contiguous)
    return shared


def _detach_input(norm: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Detach the input of a frozen network in the warm-up stage.

    Attention's output requires a gradient, because its backward pass computes the indexer's loss. The residual carries
    that gradient. Without the detach, the frozen network would save activations and compute unused gradients.
    """
    return (inputs[0].detach(),)
