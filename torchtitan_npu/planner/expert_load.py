"""An assumed expert load: the token counts that the host reads, where tensors have no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.planner.fake_devices import BelowSubclasses
from torchtitan_npu.pytree import tree_leaves, tree_map
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema, real_tensor_mode
from torchtitan_npu.torch_internals.distributed import process_group

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

CONSTANTS = (aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default)

Load = Callable[[int, int], list[int]]
"""``load(choices, experts)`` returns how many of the ``choices`` (tokens × top-k) each expert gets; they sum to
``choices``."""


def balanced(choices: int, experts: int) -> list[int]:
    """Give every expert the same number of tokens; the first experts get the remainder."""
    each, remainder = divmod(choices, experts)
    return [each + (expert < remainder) for expert in range(experts)]


def uneven(factor: float, ep: int, top_k: int, busiest: int = 0) -> Load:
    """Return a load that gives the experts of expert-parallel rank ``busiest`` ``factor`` times the balanced load.

    Without expert parallel (``ep`` 1) the first expert is the busy one. ``math.inf`` is the worst case: the busy
    experts get every token once each. The other experts get the rest, balanced.
    """

    def load(choices: int, experts: int) -> list[int]:
        busy = experts // ep if ep > 1 else 1
        most = min(choices, busy * (choices // top_k))  # a token goes to an expert at most once
        busy_choices = round(min(most, factor * choices * busy / experts))
        others = balanced(choices - busy_choices, experts - busy)
        first = busiest * busy
        return others[:first] + balanced(busy_choices, busy) + others[first:]

    return load


class AssumedLoad(BelowSubclasses):
    """Return token counts of an assumed expert load when the host reads them.

    A MoE layer counts the tokens of each expert on the device. The host reads sums of these counts to split tensors and
    all-to-alls. Fake tensors have no values to read. In this mode the counts (``torch.histc``) get the values of
    ``load``, and single-element constants keep theirs. A tensor computed only from tensors with known values gets a
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
                values = self._compute(op, *tree_map(self._value, (args, kwargs)))
            for tensor, value in zip(tree_leaves(output), tree_leaves(values), strict=True):
                if isinstance(tensor, Tensor):
                    self._values[tensor] = value
        elif op_schema(op).is_mutable:
            self._invalidate(op, args, kwargs)
        return output

    def _value(self, argument: Any) -> Any:
        return self._values[argument] if isinstance(argument, Tensor) else argument

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
