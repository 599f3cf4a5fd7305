"""Fake tensors, ranks that exist in name only, and modes that see what reaches the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torchtitan_npu.torch_internals.dispatch import OpOverload, TorchDispatchMode


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
