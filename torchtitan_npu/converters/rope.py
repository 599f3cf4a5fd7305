"""``npu_rope``: attention rotates its queries and keys by the fused operator.

TorchTitan's attention modules call a function of their model, ``apply_rotary_emb``, and there are two kinds of it: on
neighbouring pairs, with complex angles (llama3, llama4, deepseek_v3), and on halves, with a table of cosines and sines
(qwen3, gpt_oss). The indexer of our deepseek_v32 calls a third, on halves with complex angles; the vision tower of our
qwen3_vl a fourth, on halves with a table for the patches at hand. A converted module runs the code it had, with our
function in that one's place (:mod:`torchtitan_npu.upstream.rebind`): also in a user's module that calls one of them.

Positions on several axes (MRoPE) are ``npu_mrope``'s.
"""

from __future__ import annotations

import torch
from torch import nn

from torchtitan_npu.converters.base import Converter, register, retyped, summary
from torchtitan_npu.converters.rotary_modules import (
    looks_up,
    pairings_of,
    rotates_unseen,
    rotating,
    shared_pairings,
    takes_positions,
)
from torchtitan_npu.converters.rotary_tables import HALF, ForwardTables, PackedBuffer
from torchtitan_npu.errors import UsageError
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.models.rotary.mrope import MRoPERotation
from torchtitan_npu.ops import OPS


@register
class RoPEConverter(Converter):
    """Replaces the modules whose methods call one of the functions of :data:`ROTATIONS`."""

    name = "npu_rope"
    looks_for = "attention that calls TorchTitan's apply_rotary_emb"
    operators = ("npu_rotary_mul",)

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(fqn, module) for fqn, module in model.named_modules() if module is not model and pairings_of(module)]

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        with_axes = [fqn for fqn, module in model.named_modules() if type(module) is MRoPERotation]
        if with_axes and "npu_mrope" not in self.job_config.model.converters:
            raise UsageError(
                f"model.converters: {self.name} rotates by one position a token, and {with_axes[0]} of "
                f"{type(model).__name__} by several (MRoPE): list npu_mrope, with {self.name} for the vision tower or "
                "without"
            )
        return super().found_targets(model)

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        return retyped(module, rotating(type(module)))  # type: ignore[arg-type]

    def convert(self, model: nn.Module) -> None:
        unseen = [(fqn, module) for fqn, module in model.named_modules() if rotates_unseen(type(module))]  # type: ignore[arg-type]
        if unseen:
            log_on_first_rank(
                f"{self.name}: left as they are: {summary(unseen)}; their code has the name of a rotation, but none of "
                "their methods calls TorchTitan's by a global name"
            )
        targets = [module for _, module in self.targets(model)]
        shared = {owner: pairings for owner in model.modules() if (pairings := shared_pairings(owner, targets))}
        with_positions = list(filter(takes_positions, shared))
        left = set(filter(looks_up, targets)).difference(*(owner.modules() for owner in with_positions))
        super().convert(model)
        for owner, pairings in shared.items():
            if owner in with_positions:
                owner.register_forward_pre_hook(ForwardTables(pairings), with_kwargs=True)
            elif HALF in pairings:
                PackedBuffer(str(HALF.cache)).hook(owner)
        if left:
            log_on_first_rank(
                f"{self.name}: {len(left)} of the modules take cosines and sines from the model in each layer"
            )

    def refusals(self, fqn: str, module: nn.Module) -> list[str]:
        heads = getattr(module, "n_heads", None)
        dim = getattr(module, "qk_rope_head_dim", None) or getattr(module, "head_dim", None)
        if heads is None or dim is None:
            return []  # a user's attention with names of its own: its sizes show in the first forward
        batch = max(sequences for sequences, _ in self.batches())
        x = torch.empty(batch, 3, heads // self.parallel_dims.tp, dim, device="meta")
        table = x.new_empty(1, 3, 1, dim)
        modes = sorted(pairing.rotary_mode for pairing in pairings_of(module))
        operator = OPS["npu_rotary_mul"]
        return [text for mode in modes for text in operator.refusals(input=x, r1=table, r2=table, rotary_mode=mode)]
