"""A training step without a device: fake tensors on ``npu``, ranks that exist in name only, and a stated expert load.

On fake tensors the real torch_npu runs its schemas, shape functions and autograd, and computes no numbers
(docs/rehearsal.md). Three things are needed besides:

    with fake_ranks(64), fake_device(), StatedLoad(), Calls() as calls:
        ...  # build, forward, backward, optimizer step
    print(calls.count("npu"))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from torchtitan_npu.ops.arguments import by_name

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def fake_device() -> FakeTensorMode:
    """Tensors made in this context have a shape, a dtype and a device, and no memory."""
    # what was made outside (meshes, learning rates) is taken as it is
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be one of ``world_size`` ranks whose collectives return at once and move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it is kept by mesh, and the next one's groups have the same names


class BelowSubclasses(TorchDispatchMode):
    """A mode that sees what reaches the device: a DTensor's operators and collectives on its local tensors."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(cls is Tensor or issubclass(cls, FakeTensor) for cls in types):
            return NotImplemented  # the subclass unwraps itself, and what it then calls comes by here again
        return self.call(op, args, kwargs or {})

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class Calls(BelowSubclasses):
    """Records the operators that are called, in forward, backward and optimizer, below autograd and below DTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """In order: ``"npu::npu_rms_norm"``, overloads by their common name."""

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(op._schema.name)
        return op(*args, **kwargs)

    def count(self, namespace: str) -> Counter[str]:
        """How often each operator of ``namespace`` was called, by its name in it."""
        parts = (name.partition("::") for name in self.names)
        return Counter(name for space, _, name in parts if space == namespace)


Load = Callable[[int, int], list[int]]
"""``load(choices, experts)``: how many of the ``choices`` (tokens × top-k) fall on each expert; their sum is
``choices``."""


def balanced(choices: int, experts: int) -> list[int]:
    """Every expert gets the same; the first ones get what is left over."""
    share, left = divmod(choices, experts)
    return [share + (expert < left) for expert in range(experts)]


class StatedLoad(BelowSubclasses):
    """Answers what the host reads of token counts, by a stated load of the experts.

    A MoE layer counts the tokens of each expert on the device, and reads sums of these counts on the host to cut its
    tensors and all-to-alls. Fake tensors have no values to read. Here the counts (``torch.histc``) get the values
    of ``load``, and every tensor that is computed from such tensors alone gets its value too. All ranks have the same
    load. What the host reads beyond that stays an error.
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
