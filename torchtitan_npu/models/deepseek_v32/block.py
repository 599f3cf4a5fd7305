"""A transformer block, in the parts that are compiled separately."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchtitan.models.deepseek_v3.model.model import TransformerBlock

from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.attention import DeepSeekV32Attention


class Block(TransformerBlock):
    """TorchTitan's block with sparse attention, and the same other parameters.

    :meth:`pre_attention` has everything before ``inner_attention``. :meth:`post_attention` has everything after it, up
    to the experts or including them or the dense network. Each can be compiled as one region. ``inner_attention``
    between them is a few fused operators, whose backward pass counts a loss.
    """

    attention: Any
    experts_in_post_attention = False
    """Let :meth:`post_attention` include the experts, so that they are compiled with it. Otherwise the output of
    attention is freed before the experts run."""

    def __init__(self, layer_id: int, args: DeepSeekV32ModelArgs) -> None:
        super().__init__(layer_id, args)
        self.attention = DeepSeekV32Attention(args, layer_id)

    @property
    def saved_operators(self) -> tuple[str, ...]:
        """Return operators that activation checkpointing does not run again: the selection of keys, if it is shared.

        This layer's recomputation then attends to the same keys as they do. Later layers keep the selected keys, so
        saving them here costs no memory; eager attention saves its mask.
        """
        shares = self.attention.indexer is not None and "selected" in self.attention.passed
        return ("npu::npu_lightning_indexer", "aten::scatter") if shares else ()

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: Documents | None,
        positions: Tensor | None = None,
        shared: tuple[Tensor, ...] = (),
    ) -> Any:
        """Return the block's output, with the shape (bsz, seqlen, dim) of ``x``.

        If the next block has no indexer, also return what it shares: the keys to attend to and the indexer's tensors.
        They are arguments and results, so that each microbatch has its own, and a recomputed block gets those of the
        forward pass.
        """
        # no name for the projections: it would keep them alive while the experts run
        output, shared = self.attention.attend(self.pre_attention(x, freqs_cis, positions), attention_masks, shared)
        x = self.post_attention(x, output)
        del output
        if self.moe_enabled and not self.experts_in_post_attention:
            x, normed = x
            x = x + self.moe(normed)
        return (x, *shared) if shared else x

    def pre_attention(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """Return what the attention's ``pre_attention`` returns for the block's input ``x``."""
        # A norm of small operators uses its input twice. The view adds these two gradients before the residual's, as a
        # compiled region does: both round alike
        x = x.view_as(x)
        return self.attention.pre_attention(self.attention_norm(x), freqs_cis, positions)

    def post_attention(self, x: Tensor, output: Tensor) -> Any:
        """Return the block's output, or the residual and the experts' input if the experts run outside.

        ``x`` is the block's input, ``output`` is the output of ``inner_attention``.
        """
        x = x + self.attention.post_attention(output)
        normed = self.ffn_norm(x)
        if not self.moe_enabled:
            return x + self.feed_forward(normed)
        return x + self.moe(normed) if self.experts_in_post_attention else (x, normed)
