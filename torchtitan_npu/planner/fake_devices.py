"""Fake tensors, fake process groups, an assumed expert load, and dispatch modes that see what reaches the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchtitan_npu import platform
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.pytree import tree_leaves, tree_map
from torchtitan_npu.torch_internals.dispatch import (
    OpOverload,
    TorchDispatchMode,
    fake_tensor_mode,
    op_schema,
    real_tensor_mode,
)
from torchtitan_npu.torch_internals.distributed import process_group
from torchtitan_npu.torch_internals.dtensor import clear_sharding_cache

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

CONSTANTS = (aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default)

Load = Callable[[int, int], list[int]]
"""``load(decisions, experts)`` returns how many of the routing decisions (tokens × top-k) each expert gets."""


def fake_device() -> AbstractContextManager[Any]:
    """Make tensors without memory in this context: they have a shape, a dtype and a device."""
    return fake_tensor_mode()


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one of ``world_size`` ranks whose collectives return at once and move nothing."""
    capability = dist.Backend.backend_capability
    before = capability[dist.Backend.FAKE]
    # torch_npu asks a group for the backend of its device
    capability[dist.Backend.FAKE] = list(dict.fromkeys([*before, platform.backend()]))
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        capability[dist.Backend.FAKE] = before
        dist.destroy_process_group()
        clear_sharding_cache()  # keyed by mesh, and the groups of the next mesh have the same names


class BelowSubclasses(TorchDispatchMode):
    """A dispatch mode that sees what reaches the device: the operators of a DTensor on its local tensors."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(cls, "__tensor_flatten__") for cls in types):
            return NotImplemented  # such a subclass unwraps itself, and its calls arrive here again
        return self.call(op, args, kwargs or {})

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Calls(BelowSubclasses):
    """Record the operators called in forward, backward and optimizer, below autograd and below DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """Names in call order, without the overload: ``"npu::npu_rms_norm"``."""

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(op_schema(op).name)
        return op(*args, **kwargs)

    def count(self, namespace: str) -> Counter[str]:
        """Count the calls of each operator of ``namespace``, by its name without the namespace."""
        parts = (name.partition("::") for name in self.names)
        return Counter(name for space, _, name in parts if space == namespace)


def balanced(decisions: int, experts: int) -> list[int]:
    """Give every expert the same number of tokens; the first experts get the remainder."""
    each, remainder = divmod(decisions, experts)
    return [each + (expert < remainder) for expert in range(experts)]


def uneven(factor: float, ep: int, top_k: int, busiest: int = 0) -> Load:
    """Return a load that gives the experts of expert-parallel rank ``busiest`` ``factor`` times the balanced load.

    Without expert parallel (``ep`` 1) the first expert is the busy one. ``math.inf`` is the worst case: the busy
    experts get every token once each. The remaining tokens are balanced over the remaining experts.
    """

    def load(decisions: int, experts: int) -> list[int]:
        busy = experts // ep if ep > 1 else 1
        most = min(decisions, busy * (decisions // top_k))  # a token goes to an expert at most once
        of_busy = round(min(most, factor * decisions * busy / experts))
        remaining = balanced(decisions - of_busy, experts - busy)
        first = busiest * busy
        return remaining[:first] + balanced(of_busy, busy) + remaining[first:]

    return load


class AssumedLoad(BelowSubclasses):
    """Return token counts of an assumed expert load when the host reads them.

    A MoE layer counts the tokens of each expert on the device. The host reads sums of these counts to split tensors and
    all-to-alls. Fake tensors have no values to read. In this mode the counts (``torch.histc``) get the values of
    ``load``, and single-element constants have a value. A tensor computed only from tensors with known values gets a
    value too. All ranks have the same load. Reading any other tensor is still an error.
    """

    def __init__(self, load: Load = balanced) -> None:
        super().__init__()
        self.load = load
        self._values = WeakTensorKeyDictionary()  # fake tensor -> its value, on the CPU

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = bool(tensors) and all(x in self._values for x in tensors)
        if op is aten._local_scalar_dense.default and known:
            with real_tensor_mode():
                return self._values[args[0]].item()
        output = op(*args, **kwargs)
        if op is aten.histc.default:
            with real_tensor_mode():
                counts = torch.tensor(self.load(args[0].numel(), output.numel()), dtype=output.dtype, device="cpu")
            self._values[output] = counts
        elif op in CONSTANTS and output.numel() == 1:  # for example an optimizer's step count
            with real_tensor_mode():
                self._values[output] = self._compute(op, args, kwargs)
        elif known:
            with real_tensor_mode():
                known_values = tree_map(lambda x: self._values[x] if isinstance(x, Tensor) else x, (args, kwargs))
                values = self._compute(op, *known_values)
            for tensor, value in zip(tree_leaves(output), tree_leaves(values), strict=True):
                if isinstance(tensor, Tensor):
                    self._values[tensor] = value
        elif op_schema(op).is_mutable:
            self._invalidate(op, args, kwargs)
        return output

    def _invalidate(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remove the known values of all tensors that share memory with the outputs that ``op`` mutates."""
        arguments = by_name(op, args, kwargs)
        written = [
            arguments[x.name] for x in op_schema(op).arguments if x.alias_info is not None and x.alias_info.is_write
        ]
        storages = {id(x.untyped_storage()) for x in tree_leaves(written) if isinstance(x, Tensor)}
        for tensor in list(self._values):
            if id(tensor.untyped_storage()) in storages:
                del self._values[tensor]

    def _compute(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is c10d.wait_tensor.default:
            return args[0]
        if op is c10d.all_to_all_single.default:
            counts, _, input_splits, group_name = args
            group = process_group(group_name)
            parts = counts.split(input_splits or counts.numel() // group.size())
            # All ranks have the same load: each sends what this rank sends to itself.
            return parts[group.rank()].repeat(group.size())
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        return op(*args, **kwargs)
