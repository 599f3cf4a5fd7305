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
    with them, or with a dense network. Each can be compiled as one region: what is between are fused operators, whose
    backward pass counts a loss.
    """

    attention: Any
    experts_in_epilog = False
    """Whether :meth:`epilog` ends after the experts: where they are compiled with it. Else what was attended to is let
    go before they are at work."""

    def __init__(self, layer_id: int, args: DeepSeekV32ModelArgs) -> None:
        super().__init__(layer_id, args)
        self.attention = Attention(args)

    def forward(
        self, x: Tensor, freqs_cis: Tensor, attention_masks: Documents | None, positions: Tensor | None = None
    ) -> Tensor:
        """``x`` and the output (bsz, seqlen, dim)."""
        # what has a name here is held until the experts are through: neither what is projected nor what is attended to
        x = self.epilog(x, self.attention.attend(self.prolog(x, freqs_cis, positions), attention_masks))
        if not self.moe_enabled or self.experts_in_epilog:
            return x
        x, normed = x
        return x + self.moe(normed)

    def prolog(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """As that of the attention, of the block's input."""
        # A norm of small operators uses its input twice. By the view both gradients are added up before that of the
        # residual is, as they are when this is compiled: the same rounding either way
        x = x.view_as(x)
        return self.attention.prolog(self.attention_norm(x), freqs_cis, positions)

    def epilog(self, x: Tensor, output: Tensor) -> Any:
        """From what was attended to, to the block's output; or to its experts' input, and what theirs is added to.

        ``x`` is the block's input, ``output`` that of ``inner_attention``.
        """
        x = x + self.attention.epilog(output)
        normed = self.ffn_norm(x)
        if not self.moe_enabled:
            return x + self.feed_forward(normed)
        return x + self.moe(normed) if self.experts_in_epilog else (x, normed)
