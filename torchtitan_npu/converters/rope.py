"""``npu_rope``: attention rotates its queries and keys by the fused operator.

Attention calls a rotation function of its model, on neighbouring elements or on halves of a head. The classes that do
are registered, with that function (:func:`torchtitan_npu.layers.rotary.register_rotation`). A converted module is of a
subclass, whose methods call a function on ``npu_rotary_mul`` instead. Positions on several axes (MRoPE) belong to
``npu_mrope``.

Cosines and sines are made once per forward pass if the model passes positions and angles to its layers unchanged.
:class:`PositionTables` passes :class:`RotaryTables` as ``positions``, also through activation checkpointing and
``torch.compile`` and in the stages of a pipeline. A model without that argument gets :class:`BufferTables`, which pass
them as the buffer of angles. In any other model each layer looks up its rows in that buffer. FSDP in bfloat16 then
casts a buffer of cosines and sines, as it does without this converter; it does not cast complex angles.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3

from torchtitan_npu.converters.base import Converter, convert_module, register, summary
from torchtitan_npu.dist_utils import local
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.rotary import (
    FROM_COMPLEX,
    HALF,
    HALF_OF_COMPLEX,
    HALF_OF_TABLES,
    INTERLEAVE,
    PASSES_ANGLES,
    ROTATIONS,
    MRoPERotation,
    Pairing,
    RotaryTables,
    Rotation,
    register_rotation,
)
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.ops import OPS
from torchtitan_npu.titan_internals.rebind import copy_with_globals
from torchtitan_npu.torch_internals.autograd import modification_count

titan: Any
for titan, model_cls, pairing, tensors in (
    (llama3, llama3.Transformer, INTERLEAVE, 2),
    (llama4, llama4.Transformer, INTERLEAVE, 2),
    (deepseek_v3, deepseek_v3.DeepSeekV3Model, INTERLEAVE, 1),
    (qwen3, qwen3.Qwen3Model, HALF, 2),
    (gpt_oss, gpt_oss.GptOssModel, HALF, 2),
):
    register_rotation(
        titan.Attention,
        titan.apply_rotary_emb,
        pairing,
        tensors,
        runs_in=lambda module: getattr(module, "use_rope", True),  # every n-th layer of llama4 has no rotation
        passed_by=(titan.Attention, titan.TransformerBlock, model_cls),
    )

Angles = Tensor | RotaryTables
"""The argument that a model passes its buffer of angles in."""
Positions = Tensor | RotaryTables | None
"""Positions as TorchTitan passes them, (1 or batch, sequence) or ``None`` for 0, 1, 2, ...; or tables."""


def rotate(pairing: Pairing, angles: Angles, positions: Positions, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Rotate ``tensors`` (batch, sequence, heads, dim) in float32; each result has its tensor's dtype."""
    batch, sequence = tensors[0].shape[:2]
    shared = next((value for value in (positions, angles) if isinstance(value, RotaryTables)), None)
    if shared is not None:
        tables = shared.cos_sin(pairing.rotary_mode)
    elif positions is None:
        tables = pairing.tables(local(angles)[None, :sequence])  # type: ignore[arg-type]
    else:
        tables = pairing.tables(look_up(local(angles), 0, local(positions)))  # type: ignore[arg-type]
    longer = shared is not None and shared.covers_all_positions and tables.shape[2] > sequence
    if tables.shape[1] not in (1, batch) or not (tables.shape[2] == sequence or longer):
        raise ValueError(
            f"positions or angles for {tuple(tables.shape[1:3])} tokens, for a batch of sequences ({batch}, {sequence})"
        )
    cos, sin = tables[:, :, :sequence]  # (1 or batch, sequence, 1, dim)
    return tuple(rotated(x, cos, sin, pairing.rotary_mode) for x in tensors)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotary_mode: str) -> Tensor:
    """Rotate ``x`` (batch, sequence, heads, dim) by tables (1 or batch, sequence, 1, dim) in float32."""
    if cos.shape[0] > 1 and isinstance(x, DTensor) and not any(p.is_shard(0) or p.is_shard(1) for p in x.placements):
        # The gradient of the flattened sequence could be sharded where rows do not end, and not be split into rows.
        result = rotated(x.to_local(), cos, sin, rotary_mode)
        return DTensor.from_local(result, x.device_mesh, x.placements, run_check=False)
    heads, dim = x.shape[2:]
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if cos.shape[0] > 1:  # in mode interleave an NPU takes no cosines per batch row: flatten to one long sequence
        cos, sin = (table.reshape(1, -1, 1, dim) for table in (cos, sin))
        y = y.reshape(1, -1, heads, dim)
    if isinstance(y, DTensor):
        replicated = [Replicate()] * y.device_mesh.ndim
        cos, sin = (DTensor.from_local(table, y.device_mesh, replicated, run_check=False) for table in (cos, sin))
    y = torch.ops.npu.npu_rotary_mul(y, cos, sin, rotary_mode)
    return y.reshape(x.shape).to(x.dtype)


def look_up(table: Tensor, dim: int, positions: Tensor) -> Tensor:
    """Return ``table[positions]`` along ``dim``; unlike indexing, a negative position is an error."""
    return table.index_select(dim, positions.flatten()).unflatten(dim, positions.shape)


def rotate_pairs(x: Tensor, freqs_cis: Angles, positions: Positions = None) -> Tensor:
    """Rotate neighbouring elements of ``x`` (batch, sequence, heads, dim)."""
    return rotate(INTERLEAVE, freqs_cis, positions, x)[0]


def rotate_pairs_of_both(xq: Tensor, xk: Tensor, freqs_cis: Angles, positions: Positions = None) -> tuple[Tensor, ...]:
    """Rotate queries and keys as :func:`rotate_pairs` does."""
    return rotate(INTERLEAVE, freqs_cis, positions, xq, xk)


def rotate_halves(x: Tensor, freqs_cis: Angles, positions: Positions = None) -> Tensor:
    """Rotate elements of ``x`` (batch, sequence, heads, dim) that are half a head apart."""
    return rotate(HALF_OF_COMPLEX, freqs_cis, positions, x)[0]


def rotate_halves_of_both(
    xq: Tensor, xk: Tensor, rope_cache: Angles, positions: Positions = None
) -> tuple[Tensor, ...]:
    """Rotate queries and keys as :func:`rotate_halves` does, by a table of cosines and sines."""
    return rotate(HALF, rope_cache, positions, xq, xk)


def rotate_patches(xq: Tensor, xk: Tensor, tables: RotaryTables) -> tuple[Tensor, ...]:
    """Rotate queries and keys (patches, heads, dim); elements half a head apart form a pair."""
    cos, sin = tables.cos_sin(HALF_OF_TABLES.rotary_mode)  # (1, patches, 1, dim)
    return tuple(rotated(x.unsqueeze(0), cos, sin, HALF_OF_TABLES.rotary_mode).squeeze(0) for x in (xq, xk))


REPLACEMENTS: dict[tuple[Pairing, int], Callable[..., Any]] = {
    (INTERLEAVE, 1): rotate_pairs,
    (INTERLEAVE, 2): rotate_pairs_of_both,
    (HALF_OF_COMPLEX, 1): rotate_halves,
    (HALF, 2): rotate_halves_of_both,
    (HALF_OF_TABLES, 2): rotate_patches,
}
"""By pairing and number of rotated tensors, the function with the same arguments as a registered one."""


def rotations_of(module: nn.Module) -> tuple[Rotation, ...]:
    """Return the rotations of a module whose class, or a parent of it with the same methods, is registered."""
    cls = type(module)
    registered = next((parent for parent in cls.__mro__ if parent in ROTATIONS), cls)
    rotations = ROTATIONS.get(registered, ())
    methods = {name for rotation in rotations for name in rotation.methods}
    inherited = all(inspect.getattr_static(cls, name) is inspect.getattr_static(registered, name) for name in methods)
    return rotations if inherited else ()


def pairings_of(module: nn.Module) -> frozenset[Pairing]:
    """Return how ``module`` rotates; nothing if it does not."""
    return frozenset(rotation.pairing for rotation in rotations_of(module) if rotation.runs_in(module))


@functools.cache
def rotating(cls: type[nn.Module], rotations: tuple[Rotation, ...]) -> type[nn.Module]:
    """Return a subclass of ``cls`` whose methods call ``npu_rope``'s rotations."""

    def extra_repr(self: nn.Module) -> str:
        return ", ".join(filter(None, (cls.extra_repr(self), "rotation=npu_rotary_mul")))

    replacements = {r.function: REPLACEMENTS[r.pairing, r.tensors] for r in rotations}
    methods: dict[str, Any] = {"extra_repr": extra_repr}
    for name in {name for rotation in rotations for name in rotation.methods}:
        original = inspect.getattr_static(cls, name)
        # TorchTitan's attention calls the rotation by a global name
        methods[name] = copy_with_globals(original, replacements)
        if methods[name] is original:
            raise ValueError(f"{cls.__qualname__}.{name} is registered for npu_rope, but does not call its rotation")
    if "forward" in methods:
        methods["forward"] = taking_tables(methods["forward"])
    return type(f"Npu{cls.__name__}", (cls,), methods)


def taking_tables(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward`` with the argument that :func:`pass_tables_by_keyword` makes."""

    @functools.wraps(forward)
    def forward_with_tables(
        self: nn.Module, *args: Any, rotary_tables: tuple[int, RotaryTables] | None = None, **kwargs: Any
    ) -> Any:
        if rotary_tables is not None:
            index, tables = rotary_tables
            args = (*args[:index], tables, *args[index + 1 :])
        return forward(self, *args, **kwargs)

    return forward_with_tables


def pass_tables_by_keyword(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of a converted layer: moves RotaryTables, and their index, to the keyword ``rotary_tables``.

    TorchTitan's tensor-parallel plans declare positions and angles as replicated tensors. Their hook, which runs after
    this one, raises for any other type and leaves keywords alone.
    """
    for index, value in enumerate(args):
        if isinstance(value, RotaryTables):
            return (*args[:index], value.replaced, *args[index + 1 :]), {**kwargs, "rotary_tables": (index, value)}
    return args, kwargs


class AllPositionTables:
    """The tables of all positions, (2 * pairings, positions, 1, dim), made from a model's buffer when it changes."""

    def __init__(self, pairings: tuple[Pairing, ...]) -> None:
        self.pairings = pairings
        self.buffer = str(pairings[0].cache)
        self.modes = tuple(pairing.rotary_mode for pairing in pairings)
        self._cache: Tensor | None = None
        self._version: int | None = None
        self._tables: Tensor | None = None

    def tables(self, model: nn.Module) -> Tensor:
        cache = getattr(model, self.buffer)
        # inference tensors have no modification count, and a model compiled as a whole cannot read it
        version = None if torch.compiler.is_compiling() or cache.is_inference() else modification_count(cache)
        if cache is not self._cache or version != self._version or self._tables is None:
            with torch.inference_mode(False), torch.no_grad():  # training reuses the tables that validation makes
                self._tables = torch.cat([pairing.tables(cache) for pairing in self.pairings])
            self._cache, self._version = cache, version
        return self._tables


class PositionTables(AllPositionTables):
    """Forward pre-hook of a model: replaces its argument ``positions`` by :class:`RotaryTables`."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        call = inspect.signature(model.forward).bind(*args, **kwargs)
        positions = call.arguments.get("positions")
        if not isinstance(positions, RotaryTables):  # the hook of an outer model may have run
            tables = self.tables(model)
            chosen = tables.unsqueeze(1) if positions is None else look_up(tables, 1, positions)
            # not as an argument of its own: TorchTitan's models pass their blocks no other, and an attribute of the
            # layers would have a later microbatch's tables when activation checkpointing recomputes an earlier one
            call.arguments["positions"] = RotaryTables(chosen, self.modes, "positions", positions)
        return call.args, call.kwargs


class BufferTables(AllPositionTables):
    """Forward hooks of a model without ``positions``: it reads :class:`RotaryTables` instead of its buffer."""

    def hook(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self.shadow_buffer)
        model.register_forward_hook(self.restore_buffer, always_call=True)

    def shadow_buffer(self, model: nn.Module, args: Any) -> None:
        cache = getattr(model, self.buffer)
        tables = RotaryTables(self.tables(model).unsqueeze(1), self.modes, self.buffer, cache)
        # an instance attribute hides the buffer of the same name, which stays registered
        vars(model)[self.buffer] = tables

    def restore_buffer(self, model: nn.Module, args: Any, output: Any) -> None:
        vars(model).pop(self.buffer, None)  # absent if an earlier hook failed


def passes_angles(cls: type[nn.Module]) -> bool:
    """Return whether ``cls`` is registered to pass angles and positions on, or a subclass with the same computation."""
    registered = next((parent for parent in cls.__mro__ if parent in PASSES_ANGLES), None)
    if registered is None:
        return False
    more = cls.__mro__[: cls.__mro__.index(registered)]
    overridden = {name for one in more for name in vars(one) if hasattr(registered, name)}
    return all(name in ("init_weights", "extra_repr") or name.startswith("__") for name in overridden)


def parameters_of(module: nn.Module) -> set[str]:
    """Return the names of the arguments of ``module``'s forward."""
    return set(inspect.signature(module.forward).parameters)


def takes_positions(model: nn.Module) -> bool:
    return "positions" in parameters_of(model)


def shared_pairings(owner: nn.Module, targets: set[nn.Module]) -> tuple[Pairing, ...]:
    """Return the pairings of the ``targets`` inside ``owner`` if they can share tables, else nothing.

    They can if ``owner`` has the buffer of angles by which they all rotate, and every module inside that is passed
    angles or positions only passes them on.
    """
    found = frozenset[Pairing]().union(*(pairings_of(module) for module in owner.modules() if module in targets))
    caches = {str(pairing.cache) for pairing in found}
    has_buffer = any(isinstance(getattr(owner, cache, None), Tensor) for cache in caches)
    if len(caches) != 1 or not passes_angles(type(owner)) or not has_buffer:
        return ()
    for module in owner.modules():
        takes_angles = parameters_of(module) & {"positions", *caches}
        # an instance with a forward of its own may do anything
        if "forward" in vars(module) or (takes_angles and not passes_angles(type(module))):
            return ()
    return tuple(found) if len(found) == 1 else FROM_COMPLEX


def unregistered(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the innermost modules that are passed angles, and neither rotate by a registered function nor by MRoPE."""
    known = {m for m in model.modules() if rotations_of(m) or isinstance(m, MRoPERotation)}
    found: list[tuple[str, nn.Module]] = []
    for fqn, module in reversed(list(model.named_modules())):  # children come before their parents
        inside = set(module.modules())
        takes_angles = parameters_of(module) & {pairing.cache for pairing, _ in REPLACEMENTS}
        if takes_angles and not inside & known and not any(other in inside for _, other in found):
            found.append((fqn, module))
    return found[::-1]


@register
class RoPEConverter(Converter):
    """Replaces the modules whose classes are registered."""

    name = "npu_rope"
    looks_for = "attention with a registered rotation"
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
        rotations = rotations_of(module)
        attention = convert_module(module, rotating(type(module), rotations))  # type: ignore[arg-type]
        if any("forward" in rotation.methods for rotation in rotations):
            attention.register_forward_pre_hook(pass_tables_by_keyword, prepend=True, with_kwargs=True)
        return attention

    def convert(self, model: nn.Module) -> None:
        if found := unregistered(model):
            log_on_first_rank(
                f"{self.name}: not converted: {summary(found)}; register what they rotate by with "
                "torchtitan_npu.layers.rotary.register_rotation"
            )
        targets = {module for _, module in self.targets(model) if any(p.cache for p in pairings_of(module))}
        shared = {
            owner: pairings
            for owner in model.modules()
            if (pairings := shared_pairings(owner, targets)) and (takes_positions(owner) or HALF in pairings)
        }
        unshared = targets.difference(*(owner.modules() for owner in shared))
        super().convert(model)
        for owner, pairings in shared.items():
            if takes_positions(owner):
                owner.register_forward_pre_hook(PositionTables(pairings), with_kwargs=True)
            else:
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
