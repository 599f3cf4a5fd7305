"""Record the functional collectives that DTensor calls, and their volume."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

from torch.distributed.tensor import DTensor

from torchtitan_npu.planner.work import BYTES_SENT_PER_INPUT_BYTE
from torchtitan_npu.torch_internals.dispatch import TorchDispatchMode, op_schema
from torchtitan_npu.torch_internals.distributed import AsyncCollectiveTensor, process_group


class Collective(NamedTuple):
    kind: str
    shape: tuple[int, ...]
    sent: int
    """Bytes that a rank sends."""


class Collectives(TorchDispatchMode):
    """Record the functional collectives called in this context, in order. FSDP's own collectives are not functional."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self.groups: list[str] = []
        """The name of each call's process group. Another run of the same job may have other names."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor | AsyncCollectiveTensor) for cls in types):
            return NotImplemented  # the subclass unwraps itself, and its calls come here again
        kind = op_schema(op).name.partition("::")[2]
        if op.namespace in ("_c10d_functional", "_dtensor") and kind in BYTES_SENT_PER_INPUT_BYTE:
            ranks = process_group(args[-1]).size()
            self.calls.append(
                Collective(
                    kind, tuple(args[0].shape), math.ceil(args[0].nbytes * BYTES_SENT_PER_INPUT_BYTE[kind](ranks))
                )
            )
            self.groups.append(args[-1])
        return op(*args, **(kwargs or {}))

    @property
    def kinds(self) -> Counter[str]:
        return Counter(call.kind for call in self.calls)

    @property
    def sent(self) -> int:
        return sum(call.sent for call in self.calls)
