"""``npu_mrope``: attention by positions on several axes (MRoPE) rotates its queries and keys by the fused operators.

In training, the cosines and sines of the axes are arranged once per forward, and ``npu_rotary_mul`` rotates by them in
each layer. Without gradients (validation, evaluation), ``npu_mrope`` looks them up, arranges them and rotates queries
and keys in one call per layer. torch_npu has no gradient for it. With ``npu.mrope_in_training`` it also runs in
training, inside an autograd function (:mod:`torchtitan_npu.ops.mrope`).

"interleave" has two meanings. ``rotary_mode`` names the two elements of a head that rotate together: here "half".
``cache_mode`` is the order of the axes among the angles, :attr:`MRoPERotation.interleaved`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan_npu.converters.base import Converter, convert_module, modules_of_type, register
from torchtitan_npu.converters.rope import rotated
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.rotary import MRoPERotation, MRoPETables, RotaryTables, from_concatenated
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.mrope import mrope


def cache_mode(module: MRoPERotation | MRoPETables) -> str:
    return "interleave" if module.interleaved else "default"


class NpuMRoPETables(MRoPETables):
    """Gives each layer arranged tables, or for ``npu_mrope`` the angles of all positions and the tokens' positions."""

    operators = ()
    in_training: bool
    """Use ``npu_mrope`` in training too."""

    def forward(
        self, rope_cache: Tensor, positions: Tensor, shape: Sequence[int], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | RotaryTables | None]:
        """Return the layers' ``rope_cache`` and ``positions`` for tokens of ``shape`` (bsz, seqlen).

        For ``npu_rotary_mul``: no rows, and tables (2, bsz, seqlen, 1, rotary_dim) as positions. For ``npu_mrope``:
        ``cos_sin_cache`` (all positions, rotary_dim) and positions (axes, bsz * seqlen).
        """
        positions = self.checked(positions, shape)
        if torch.is_grad_enabled() and not self.in_training:
            tables = from_concatenated(self.table(rope_cache, positions)).contiguous()
            # tensor parallel declares rope_cache as a tensor, so the layers get an empty one
            return rope_cache[:0], RotaryTables(tables)
        # rope_cache has the angles twice, once for each half of a head
        cos_sin_cache = rope_cache.unflatten(-1, (2, 2, -1))[:, :, 0].flatten(1)
        device = rope_cache.device.type
        if torch.is_autocast_enabled(device):  # then attention runs in autocast's dtype
            dtype = torch.get_autocast_dtype(device)
        return cos_sin_cache.to(dtype), positions.flatten(1).contiguous()


class NpuMRoPERotation(MRoPERotation):
    """Rotates by ``npu_rotary_mul`` if ``positions`` are tables, else by ``npu_mrope``, with ``table`` as its cache."""

    def forward(
        self, xq: Tensor, xk: Tensor, table: Tensor, positions: Tensor | RotaryTables | None = None
    ) -> tuple[Tensor, Tensor]:
        if isinstance(positions, RotaryTables):
            return self._by_tables(xq, positions), self._by_tables(xk, positions)
        assert positions is not None
        # (tokens, heads * head_dim) in the cache's dtype: under autocast a norm may have returned float32
        q, k = (x.reshape(positions.shape[1], -1).to(table.dtype) for x in (xq, xk))
        modes = {"rotary_mode": "half", "cache_mode": cache_mode(self)}
        q, k = mrope(positions, q, k, table, self.head_dim, mrope_section=self.section, **modes)
        return q.view_as(xq).to(xq.dtype), k.view_as(xk).to(xk.dtype)

    def _by_tables(self, x: Tensor, tables: RotaryTables) -> Tensor:
        cos, sin = tables.cos_sin("half")  # (bsz, seqlen, 1, rotary_dim)
        if self.rotary_dim == self.head_dim:
            return rotated(x, cos, sin, "half")
        first = rotated(x[..., : self.rotary_dim], cos, sin, "half")
        return torch.cat((first, x[..., self.rotary_dim :]), dim=-1)


@register
class MRoPEConverter(Converter):
    """Replaces :class:`MRoPETables` and the :class:`MRoPERotation` of each layer."""

    name = "npu_mrope"
    looks_for = "MRoPE"
    operators = ("npu_rotary_mul", "npu_mrope")

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return modules_of_type(model, MRoPETables) + modules_of_type(model, MRoPERotation)

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        targets = self.targets(model)
        if not targets:
            raise UsageError(
                f"model.converters: {self.name} found no MRoPE in {type(model).__name__}, whose tokens have one "
                "position each: list npu_rope instead"
            )
        layouts = {(module.section, module.interleaved) for _, module in targets}  # type: ignore[union-attr]
        if len(layouts) > 1 or len({type(module) for _, module in targets}) < 2:
            raise UsageError(
                f"model.converters: {self.name} needs MRoPETables in the model and MRoPERotation in each layer, with "
                f"the same mrope_section and layout: {type(model).__name__} has {', '.join(str(m) for _, m in targets)}"
            )
        for fqn, module in modules_of_type(model, MRoPERotation):
            # the error of the first call of npu_mrope, which may come long after the start
            if problem := next(OPS["npu_mrope"].argument_errors(**self._arguments(module)), None):
                raise UsageError(f"model.converters: {self.name}: {fqn}: {problem}")
        return targets

    def _arguments(self, module: Any) -> dict[str, object]:
        """Return the arguments of a call in one layer on one rank, on the meta device."""
        training = self.job_config.training
        tokens = training.local_batch_size * training.seq_len
        dtype = self.compute_dtype()
        query, key = (
            torch.empty(tokens, heads // self.parallel_dims.tp * module.head_dim, dtype=dtype, device="meta")
            for heads in (module.n_heads, module.n_kv_heads)
        )
        return {
            "positions": torch.empty(len(module.section), tokens, dtype=torch.int64, device="meta"),
            "query": query,
            "key": key,
            "cos_sin_cache": query.new_empty(training.seq_len, module.rotary_dim),
            "head_size": module.head_dim,
            "mrope_section": list(module.section),
            "rotary_mode": "half",
            "cache_mode": cache_mode(module),
        }

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        if not isinstance(module, MRoPERotation):
            return []
        arguments = self._arguments(module)
        # batch rows are rotated as one long sequence, see rope.rotated
        tokens, heads = arguments["query"].shape[0], module.n_heads // self.parallel_dims.tp  # type: ignore[attr-defined]
        x = torch.empty(1, tokens, heads, module.rotary_dim, device="meta")
        table = x.new_empty(1, tokens, 1, module.rotary_dim)
        in_training = OPS["npu_rotary_mul"].limit_errors(input=x, r1=table, r2=table, rotary_mode="half")
        return in_training + OPS["npu_mrope"].limit_errors(**arguments)

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        if isinstance(module, MRoPERotation):
            return convert_module(module, NpuMRoPERotation)
        tables = convert_module(module, NpuMRoPETables)
        tables.in_training = self.job_config.npu.mrope_in_training
        return tables
