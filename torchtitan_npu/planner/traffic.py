"""The collectives of a step: which group, what kind, how many bytes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchtitan.distributed import ParallelDims

from torchtitan_npu import platform
from torchtitan_npu.distributed.collectives import SENT
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.torch_internals.dispatch import OpOverload, tree_leaves

KINDS: dict[str, tuple[tuple[str, ...], Callable[[int], float]]] = {
    "all_gather": (("allgather", "all_gather"), SENT["all_gather_into_tensor"]),
    "reduce_scatter": (("reduce_scatter",), SENT["reduce_scatter_tensor"]),
    "all_reduce": (("allreduce", "all_reduce"), SENT["all_reduce"]),
    "all_to_all": (("alltoall", "all_to_all"), SENT["all_to_all_single"]),
    "broadcast": (("broadcast",), lambda n: 1),
    "send": (("send",), lambda n: 1),
    "receive": (("recv",), lambda n: 0),
}
"""By kind of collective: what the names of its operators hold, and how many times its input a rank sends over ``n``."""

GROUPS = ("tp", "ep", "etp", "cp", "fsdp", "efsdp", "dp_replicate", "pp")
"""TorchTitan's names of mesh dimensions; ``fsdp`` spans dp_shard × cp, ``efsdp`` what EP leaves of it. Counts of tokens
go over ``loss``, all data-parallel ranks, which is named where its group is none of these."""


@dataclass
class Traffic:
    """What this rank sends, by (group, kind)."""

    names: dict[str, str]
    """By process group: the mesh dimension that it belongs to."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes that this rank has to send, at the least."""
    groups: set[str] = field(default_factory=set)
    """The process groups of more than one rank that were used."""

    @classmethod
    def over(cls, dims: ParallelDims) -> Traffic:
        names: dict[str, str] = {}
        for name in GROUPS:
            mesh = dims.get_optional_mesh(name)
            if mesh is not None:  # the same ranks are one group
                group = mesh.get_group().group_name
                names[group] = f"{names[group]}/{name}" if group in names else name
        if (experts := dims.get_optional_mesh(["dp_replicate", "efsdp"])) is not None:  # replicas of experts
            names.setdefault(experts.get_group("dp_replicate").group_name, "dp_replicate")
        if (loss := dims.get_optional_mesh("loss")) is not None:
            names.setdefault(loss.get_group().group_name, "loss")
        return cls(names)

    def saw(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if op.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
            return
        name = op._schema.name.partition("::")[2]
        kind = next((kind for kind, (parts, _) in KINDS.items() if any(part in name for part in parts)), None)
        if kind is None:  # a wait, a barrier
            return
        arguments = by_name(op, args, kwargs)
        group = _group(arguments)
        key = self.names.get(group.group_name, "world"), kind
        incoming, outgoing = _sizes(op, arguments, output)
        if kind == "all_to_all":  # a rank whose experts are busier receives more than it sends
            incoming = max(incoming, outgoing)
        if group.size() > 1:
            self.groups.add(group.group_name)
        self.calls[key] += 1
        self.sent[key] += round(incoming * KINDS[kind][1](group.size()))


def hccl_buffers(communicators: int) -> int:
    """Bytes of the device that HCCL takes for so many process groups; none where the job is not for NPUs.

    Each takes two buffers of HCCL_BUFFSIZE MB, by default 200 (train_configs/env/npu.env).
    """
    if platform.job_backend() != "npu":
        return 0
    size = os.environ.get("HCCL_BUFFSIZE", "200")
    if not size.isdecimal():
        raise UsageError(f"HCCL_BUFFSIZE={size}: a number of MB")
    return communicators * 2 * int(size) << 20


def _group(arguments: dict[str, Any]) -> Any:
    if "group_name" in arguments:
        group = arguments["group_name"]  # which since torch 2.13 may be the group itself
        return dist.distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
    return dist.ProcessGroup.unbox(arguments["process_group"])


def _sizes(op: OpOverload, arguments: dict[str, Any], output: Any) -> tuple[int, int]:
    """Bytes that go in and come out; operators that write into a buffer have it as their first argument."""
    tensors = [tree_leaves(value) for value in arguments.values()]
    tensors = [leaves for leaves in tensors if any(isinstance(x, Tensor) for x in leaves)]
    if op.namespace == "c10d":
        return _bytes(tensors[-1]), _bytes(tensors[0])
    return _bytes(tensors[0]), _bytes(output)


def _bytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, Tensor))
