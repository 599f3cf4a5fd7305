"""Records the collectives that DTensor calls, with what they carry; for tests and benchmarks."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from torchtitan_npu.torch_internals.dispatch import TorchDispatchMode

SENT = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
    "shard_dim_alltoall": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}
"""By kind, how many times its input a rank sends over ``n`` ranks, directly or around a ring."""


class Collective(NamedTuple):
    kind: str
    shape: tuple[int, ...]
    sent: int
    """Bytes that a rank sends."""


class Collectives(TorchDispatchMode):
    """The functional collectives called in this context, in order; what FSDP itself calls is of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self.groups: list[str] = []
        """The name of each call's process group, which another run of the same job may have under another name."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor | AsyncCollectiveTensor) for cls in types):
            return NotImplemented  # it unwraps itself, and what it then calls comes by here again
        kind = op._schema.name.partition("::")[2]
        if op.namespace in ("_c10d_functional", "_dtensor") and kind in SENT:
            ranks = dist.distributed_c10d._resolve_process_group(args[-1]).size()
            self.calls.append(Collective(kind, tuple(args[0].shape), math.ceil(args[0].nbytes * SENT[kind](ranks))))
            self.groups.append(args[-1])
        return op(*args, **(kwargs or {}))

    @property
    def kinds(self) -> Counter[str]:
        return Counter(call.kind for call in self.calls)

    @property
    def sent(self) -> int:
        return sum(call.sent for call in self.calls)
