"""The collectives of a step: which group, what kind, how many bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torchtitan.distributed import ParallelDims

from torchtitan_npu.ops.arguments import by_name

KINDS = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_reduce": ("allreduce", "all_reduce"),
    "all_to_all": ("alltoall", "all_to_all"),
    "broadcast": ("broadcast",),
    "send": ("send",),
    "receive": ("recv",),
}
"""By kind of collective: what the names of its operators hold."""

GROUPS = ("tp", "ep", "etp", "cp", "fsdp", "efsdp", "dp_replicate", "pp")
"""TorchTitan's names of mesh dimensions; ``fsdp`` spans dp_shard × cp, ``efsdp`` what EP leaves of it."""


@dataclass
class Traffic:
    """What this rank sends, by (group, kind)."""

    names: dict[str, str]
    """By process group: the mesh dimension that it belongs to."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes that this rank has to send, at the least."""

    @classmethod
    def over(cls, dims: ParallelDims) -> Traffic:
        names: dict[str, str] = {}
        for name in GROUPS:
            mesh = dims.get_optional_mesh(name)
            if mesh is not None:  # the same ranks are one group
                group = mesh.get_group().group_name
                names[group] = f"{names[group]}/{name}" if group in names else name
        return cls(names)

    def saw(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if op.namespace not in ("c10d", "_c10d_functional"):
            return
        name = op._schema.name.partition("::")[2]
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), None)
        if kind is None:  # a wait, a barrier
            return
        group = _group(by_name(op, args, kwargs))
        key = self.names.get(group.group_name, "world"), kind
        self.calls[key] += 1
        self.sent[key] += _sent(kind, group.size(), *_sizes(op, args, kwargs, output))


def _group(arguments: dict[str, Any]) -> Any:
    if "group_name" in arguments:
        return dist.distributed_c10d._resolve_process_group(arguments["group_name"])
    return dist.ProcessGroup.unbox(arguments["process_group"])


def _sizes(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> tuple[int, int]:
    """Bytes that go in and come out; operators that write into a buffer have it as their first argument."""
    tensors = [_bytes(argument) for argument in args if _bytes(argument)]
    if op.namespace == "_c10d_functional":
        return tensors[0], _bytes(output)
    return tensors[-1], tensors[0]


def _bytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, Tensor))


def _sent(kind: str, ranks: int, incoming: int, outgoing: int) -> int:
    if kind == "all_gather":
        return incoming * (ranks - 1)
    if kind == "reduce_scatter":
        return incoming * (ranks - 1) // ranks
    if kind == "all_reduce":
        return 2 * incoming * (ranks - 1) // ranks
    if kind == "all_to_all":  # a rank whose experts are busier receives more than it sends
        return max(incoming, outgoing) * (ranks - 1) // ranks
    if kind == "receive":
        return 0
    return incoming
