"""Fake tensors, fake process groups, and dispatch modes that see what reaches the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist

from torchtitan_npu import platform
from torchtitan_npu.torch_internals.dispatch import OpOverload, TorchDispatchMode, fake_tensor_mode, op_schema
from torchtitan_npu.torch_internals.dtensor import clear_sharding_cache


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
