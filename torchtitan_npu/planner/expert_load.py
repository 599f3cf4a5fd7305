"""A stated load of the experts: what the host reads of token counts, where tensors have no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils.weak import WeakTensorKeyDictionary

from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.planner.fake_devices import BelowSubclasses
from torchtitan_npu.torch_internals.dispatch import OpOverload, tree_flatten, tree_map_only

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

CONSTANTS = (aten.zeros.default, aten.ones.default, aten.full.default, aten.scalar_tensor.default)

Load = Callable[[int, int], list[int]]
"""``load(choices, experts)``: how many of the ``choices`` (tokens × top-k) fall on each expert; their sum is
``choices``."""


def balanced(choices: int, experts: int) -> list[int]:
    """Every expert gets the same; the first ones get what is left over."""
    share, left = divmod(choices, experts)
    return [share + (expert < left) for expert in range(experts)]


def uneven(factor: float, ep: int, top_k: int, busiest: int = 0) -> Load:
    """The experts of rank ``busiest`` of ``ep`` expert-parallel ones get ``factor`` times as much as with a balanced
    load.

    Without expert parallel, the first expert does. ``math.inf`` is the worst case: they get all that they can, which is
    every token once each. The other experts share what is left.
    """

    def load(choices: int, experts: int) -> list[int]:
        busy = experts // ep if ep > 1 else 1
        most = min(choices, busy * (choices // top_k))  # a token takes an expert once
        share = round(min(most, factor * choices * busy / experts))
        others = balanced(choices - share, experts - busy)
        first = busiest * busy
        return others[:first] + balanced(share, busy) + others[first:]

    return load


class StatedLoad(BelowSubclasses):
    """Answers what the host reads of token counts, by a stated load of the experts.

    A MoE layer counts the tokens of each expert on the device, and reads sums of these counts on the host to cut its
    tensors and all-to-alls. Fake tensors have no values to read. Here the counts (``torch.histc``) get the values
    of ``load``, single numbers the value that they are made with, and every tensor that is computed from such tensors
    alone gets its value too. All ranks have the same load. What the host reads beyond that stays an error.
    """

    def __init__(self, load: Load = balanced) -> None:
        super().__init__()
        self.load = load
        self._values = WeakTensorKeyDictionary()  # fake tensor -> its value, on the CPU

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        known = bool(tensors) and all(x in self._values for x in tensors)
        if op is aten._local_scalar_dense.default and known:
            with unset_fake_temporarily():
                return self._values[args[0]].item()
        output = op(*args, **kwargs)
        if op is aten.histc.default:
            with unset_fake_temporarily():
                counts = torch.tensor(self.load(args[0].numel(), output.numel()), dtype=output.dtype, device="cpu")
            self._values[output] = counts
        elif op in CONSTANTS and output.numel() == 1:  # an optimizer's count of its steps
            with unset_fake_temporarily():
                self._values[output] = self._compute(op, args, kwargs)
        elif known:
            with unset_fake_temporarily():
                values = self._compute(op, *tree_map_only(Tensor, self._values.__getitem__, (args, kwargs)))
            for tensor, value in zip(tree_flatten(output)[0], tree_flatten(values)[0], strict=True):
                if isinstance(tensor, Tensor):  # and no device or number
                    self._values[tensor] = value
        elif op._schema.is_mutable:
            self._forget(op, args, kwargs)
        return output

    def _forget(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What ``op`` has overwritten with something unknown is unknown, and so is every view of it."""
        arguments = by_name(op, args, kwargs)
        written = [
            arguments[x.name] for x in op._schema.arguments if x.alias_info is not None and x.alias_info.is_write
        ]
        storages = {x.untyped_storage()._cdata for x in tree_flatten(written)[0] if isinstance(x, Tensor)}
        for tensor in list(self._values):
            if tensor.untyped_storage()._cdata in storages:
                del self._values[tensor]

    def _compute(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is c10d.wait_tensor.default:
            return args[0]
        if op is c10d.all_to_all_single.default:
            counts, _, input_splits, group_name = args
            group = dist.distributed_c10d._resolve_process_group(group_name)
            parts = counts.split(input_splits or counts.numel() // group.size())
            # each rank sends what this one would send to itself
            return parts[group.rank()].repeat(group.size())
        if "device" in kwargs:
            kwargs = kwargs | {"device": torch.device("cpu")}
        return op(*args, **kwargs)
