"""``npu_rope``: attention rotates its queries and keys by the fused operator.

A model's attention calls a rotation function that the model has registered
(:mod:`torchtitan_npu.layers.rotary.registry`), on neighbouring elements or on halves of a head. A converted module runs
its own code with a function on ``npu_rotary_mul`` in that one's place (``titan_internals.hooks``). This
includes a user's module that calls a registered function.

Positions on several axes (MRoPE) belong to ``npu_mrope``.
"""

from __future__ import annotations

import torch
from torch import nn

from torchtitan_npu.converters.base import Converter, register, retyped, summary
from torchtitan_npu.converters.rotary_modules import (
    pairings_of,
    rotates_unseen,
    rotating,
    shared_pairings,
    takes_angles,
    takes_positions,
)
from torchtitan_npu.converters.rotary_table_hooks import BufferTables, PositionTables, pass_tables_by_keyword
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.rotary.mrope import MRoPERotation
from torchtitan_npu.layers.rotary.tables import HALF
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.ops import OPS


@register
class RoPEConverter(Converter):
    """Replaces the modules whose methods call a registered rotation."""

    name = "npu_rope"
    looks_for = "attention that calls TorchTitan's apply_rotary_emb"
    operators = ("npu_rotary_mul",)

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(fqn, module) for fqn, module in model.named_modules() if module is not model and pairings_of(module)]

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        mrope = [fqn for fqn, module in model.named_modules() if type(module) is MRoPERotation]
        if mrope and "npu_mrope" not in self.job_config.model.converters:
            raise UsageError(
                f"model.converters: {self.name} rotates by one position per token, but {mrope[0]} of "
                f"{type(model).__name__} by several (MRoPE): list npu_mrope, alone or with {self.name} for the vision "
                "tower"
            )
        return super().found_targets(model)

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        attention = retyped(module, rotating(type(module)))  # type: ignore[arg-type]
        attention.register_forward_pre_hook(pass_tables_by_keyword, prepend=True, with_kwargs=True)
        return attention

    def convert(self, model: nn.Module) -> None:
        unseen = [(fqn, module) for fqn, module in model.named_modules() if rotates_unseen(type(module))]  # type: ignore[arg-type]
        if unseen:
            log_on_first_rank(
                f"{self.name}: not converted: {summary(unseen)}; their code uses the name of a rotation, but no method "
                "calls a registered one by a global name"
            )
        targets = [module for _, module in self.targets(model)]
        shared = {owner: pairings for owner in model.modules() if (pairings := shared_pairings(owner, targets))}
        with_positions = list(filter(takes_positions, shared))
        unshared = set(filter(takes_angles, targets)).difference(*(owner.modules() for owner in with_positions))
        super().convert(model)
        for owner, pairings in shared.items():
            if owner in with_positions:
                owner.register_forward_pre_hook(PositionTables(pairings), with_kwargs=True)
            elif HALF in pairings:
                BufferTables(pairings).hook(owner)
        if unshared:
            log_on_first_rank(
                f"{self.name}: modules without shared tables: {len(unshared)}; each looks up its cosines and sines"
            )

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        heads = getattr(module, "n_heads", None)
        dim = getattr(module, "qk_rope_head_dim", None) or getattr(module, "head_dim", None)
        if heads is None or dim is None:
            return []  # a user's attention with other attribute names: its sizes are known at the first forward
        batch = max(sequences for sequences, _ in self.batches())
        x = torch.empty(batch, 3, heads // self.parallel_dims.tp, dim, device="meta")
        table = x.new_empty(1, 3, 1, dim)
        modes = sorted(pairing.rotary_mode for pairing in pairings_of(module))
        operator = OPS["npu_rotary_mul"]
        return [text for mode in modes for text in operator.limit_errors(input=x, r1=table, r2=table, rotary_mode=mode)]
