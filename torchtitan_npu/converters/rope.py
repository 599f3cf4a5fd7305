"""``npu_rope``: attention rotates its queries and keys by the fused operator.

TorchTitan's attention modules call a function of their model, ``apply_rotary_emb``, and there are two kinds of it: on
neighbouring pairs, with complex angles (llama3, llama4, deepseek_v3), and on halves, with a table of cosines and sines
(qwen3, gpt_oss). The indexer of our deepseek_v32 calls a third, on halves with complex angles; the vision tower of our
qwen3_vl a fourth, on halves with a table for the patches at hand. A converted module runs the code it had, with our
function in that one's place (:mod:`torchtitan_npu.rebind`): so does a user's module that calls one of these functions.

Positions on several axes (MRoPE) are ``npu_mrope``'s.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3

from torchtitan_npu.converters.base import Converter, log_on_first_rank, register, retyped
from torchtitan_npu.converters.rotary_tables import (
    FROM_COMPLEX,
    HALF,
    HALF_OF_COMPLEX,
    HALF_OF_TABLE,
    INTERLEAVE,
    ForwardTables,
    Pairing,
    rotate,
    rotated,
)
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.deepseek_v32.indexer import apply_rotary_half
from torchtitan_npu.ops import OPS
from torchtitan_npu.rebind import rebound, refers_to
from torchtitan_npu.rotary.mrope import MRoPERotation
from torchtitan_npu.rotary.patches import apply_rotary_vision


def rotate_pairs(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    """``x`` (batch, sequence, heads, dim), its neighbouring elements rotated by the angles of ``freqs_cis``."""
    return rotate(INTERLEAVE, freqs_cis, positions, x)[0]


def rotate_pairs_of_both(
    xq: Tensor, xk: Tensor, freqs_cis: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Queries and keys, rotated as :func:`rotate_pairs` does."""
    return rotate(INTERLEAVE, freqs_cis, positions, xq, xk)


def rotate_halves(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    """``x`` (batch, sequence, heads, dim), each element rotated with the one half a head away."""
    return rotate(HALF_OF_COMPLEX, freqs_cis, positions, x)[0]


def rotate_halves_of_both(
    xq: Tensor, xk: Tensor, rope_cache: Tensor, positions: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Queries and keys, rotated as :func:`rotate_halves` does, by a table of cosines and sines."""
    return rotate(HALF, rope_cache, positions, xq, xk)


def rotate_patches(xq: Tensor, xk: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Queries and keys (patches, heads, dim), each element with the one half a head away, by a table of the patches."""
    cos, sin = HALF_OF_TABLE.tables(table.unsqueeze(0))  # (1, patches, 1, dim)
    return tuple(rotated(x.unsqueeze(0), cos, sin, HALF_OF_TABLE.rotary_mode).squeeze(0) for x in (xq, xk))


ROTATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    llama3.apply_rotary_emb: rotate_pairs_of_both,
    llama4.apply_rotary_emb: rotate_pairs_of_both,
    deepseek_v3.apply_rotary_emb: rotate_pairs,
    qwen3.apply_rotary_emb: rotate_halves_of_both,
    gpt_oss.apply_rotary_emb: rotate_halves_of_both,
    apply_rotary_half: rotate_halves,
    apply_rotary_vision: rotate_patches,
}
"""The models' functions, and ours with the same arguments."""

PAIRINGS = {
    rotate_pairs: INTERLEAVE,
    rotate_pairs_of_both: INTERLEAVE,
    rotate_halves: HALF_OF_COMPLEX,
    rotate_halves_of_both: HALF,
    rotate_patches: HALF_OF_TABLE,
}


@functools.cache
def rotating_methods(cls: type[nn.Module]) -> dict[str, frozenset[Pairing]]:
    """The methods of ``cls`` (not those of every module) that call one of the models' functions: how they rotate."""
    names = [name for name in dir(cls) if name == "forward" or not hasattr(nn.Module, name)]
    found = {name: refers_to(inspect.getattr_static(cls, name), ROTATIONS) for name in names}
    return {
        name: frozenset(PAIRINGS[ROTATIONS[f]] for f in functions) for name, functions in found.items() if functions
    }


@functools.cache
def rotating(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` with our rotations in its methods."""

    def extra_repr(self: nn.Module) -> str:
        return ", ".join(filter(None, (cls.extra_repr(self), "rotation=npu_rotary_mul")))

    names = rotating_methods(cls)  # type: ignore[arg-type] # mypy takes the modules' __hash__ for that of their class
    methods = {name: rebound(getattr(cls, name), ROTATIONS) for name in names}
    return type(f"Npu{cls.__name__}", (cls,), {**methods, "extra_repr": extra_repr})


def pairings_of(module: nn.Module) -> frozenset[Pairing]:
    """How ``module`` rotates, if its methods call one of the models' functions and it uses its rotations."""
    if not getattr(module, "use_rope", True):  # llama4's layers without positions
        return frozenset()
    return frozenset().union(*rotating_methods(type(module)).values())  # type: ignore[arg-type]


def looks_up(module: nn.Module) -> bool:
    """Whether ``module`` takes its angles from a buffer of the model, by position."""
    return any(pairing.cache for pairing in pairings_of(module))


def rotates(module: nn.Module) -> bool:
    """Whether a method of ``module`` calls one of the models' functions, used or not."""
    return bool(rotating_methods(type(module)))  # type: ignore[arg-type]


def takes_positions(module: nn.Module) -> bool:
    """Whether the forward of ``module`` has an argument of that name."""
    return "positions" in inspect.signature(module.forward).parameters


def shared_pairings(owner: nn.Module, targets: list[nn.Module]) -> tuple[Pairing, ...]:
    """How the ``targets`` inside ``owner`` rotate, if they can share tables that ``owner`` hands them as positions.

    That is so if ``owner`` takes positions and holds the angles, its targets all rotate by one buffer, and none of its
    other modules takes positions too, with which it may do anything. Else there are none.
    """
    inside = {module for module in set(targets).intersection(owner.modules()) if looks_up(module)}
    found = frozenset[Pairing]().union(*map(pairings_of, inside))
    caches = {pairing.cache for pairing in found}
    if len(caches) != 1 or owner in inside or not takes_positions(owner):
        return ()
    (cache,) = caches
    with_positions = filter(takes_positions, owner.modules())
    strangers = [module for module in with_positions if not any(map(rotates, module.modules()))]
    if strangers or not isinstance(getattr(owner, str(cache), None), Tensor):
        return ()
    return tuple(found) if len(found) == 1 else FROM_COMPLEX


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
        targets = [module for _, module in self.targets(model)]
        shared = [(owner, pairings) for owner in model.modules() if (pairings := shared_pairings(owner, targets))]
        left = set(filter(looks_up, targets)).difference(*(owner.modules() for owner, _ in shared))
        super().convert(model)
        for owner, pairings in shared:
            owner.register_forward_pre_hook(ForwardTables(pairings), with_kwargs=True)
        if left:
            log_on_first_rank(
                f"{self.name}: {len(left)} of the modules take cosines and sines from the model in each layer"
            )

    def refusals(self, fqn: str, module: nn.Module) -> list[str]:
        heads = getattr(module, "n_heads", None)
        dim = getattr(module, "qk_rope_head_dim", None) or getattr(module, "head_dim", None)
        if heads is None or dim is None:
            return []  # a user's attention with names of its own: its sizes show in the first forward
        batch = self.job_config.training.local_batch_size
        if self.parallel_dims.pp_enabled:
            batch = self.job_config.parallelism.pipeline_parallel_microbatch_size
        x = torch.empty(batch, 3, heads // self.parallel_dims.tp, dim, device="meta")
        table = x.new_empty(1, 3, 1, dim)
        modes = sorted(pairing.rotary_mode for pairing in pairings_of(module))
        operator = OPS["npu_rotary_mul"]
        return [text for mode in modes for text in operator.refusals(input=x, r1=table, r2=table, rotary_mode=mode)]
