"""A block of the model, in the parts that it is compiled in."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchtitan.models.deepseek_v3.model.model import TransformerBlock

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.attention import Attention
from torchtitan_npu.models.deepseek_v32.documents import Documents


class Block(TransformerBlock):
    """TorchTitan's block: its parameters and its sums, with attention over the keys that an indexer selects.

    :meth:`prolog` has all that comes before attention proper, :meth:`epilog` what comes after, up to the experts or
    with a dense network, :meth:`epilog_with_experts` that and the experts. Each can be compiled as one region, the last
    where the experts' sizes are known: what is between are fused operators, whose backward pass counts a loss.
    """

    attention: Any

    def __init__(self, layer_id: int, args: DeepSeekV32ModelArgs) -> None:
        super().__init__(layer_id, args)
        self.attention = Attention(args)

    def forward(
        self, x: Tensor, freqs_cis: Tensor, attention_masks: Documents | None, positions: Tensor | None = None
    ) -> Tensor:
        """``x`` and the output (bsz, seqlen, dim)."""
        # what has a name here is held until the block is through: neither what is projected nor what is attended to
        finish = self.epilog_with_experts if self.moe_enabled else self.epilog
        return finish(x, self.attention.attend(self.prolog(x, freqs_cis, positions), attention_masks))

    def prolog(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """As that of the attention, of the block's input."""
        # A norm of small operators uses its input twice. By the view both gradients are added up before that of the
        # residual is, as they are when this is compiled: the same rounding either way
        x = x.view_as(x)
        return self.attention.prolog(self.attention_norm(x), freqs_cis, positions)

    def epilog(self, x: Tensor, output: Tensor) -> Any:
        """From what was attended to, to the block's output; with experts, to their input, and what theirs is added to.

        ``x`` is the block's input, ``output`` that of ``inner_attention``.
        """
        x = x + self.attention.epilog(output)
        normed = self.ffn_norm(x)
        return (x, normed) if self.moe_enabled else x + self.feed_forward(normed)

    def epilog_with_experts(self, x: Tensor, output: Tensor) -> Tensor:
        """From what was attended to, to the output of a block with experts."""
        x, normed = self.epilog(x, output)
        del output  # which is not needed by the experts
        return x + self.moe(normed)
