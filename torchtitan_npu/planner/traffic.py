"""The collectives of a step: by group and kind, how often they are called and how many bytes a rank sends."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torchtitan.distributed import ParallelDims

from torchtitan_npu import platform
from torchtitan_npu.distributed.collective_volume import BYTES_SENT_PER_INPUT_BYTE
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.pytree import tree_leaves
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema
from torchtitan_npu.torch_internals.distributed import process_group

COLLECTIVES: dict[str, tuple[tuple[str, ...], Callable[[int], float]]] = {
    "all_gather": (("allgather", "all_gather"), BYTES_SENT_PER_INPUT_BYTE["all_gather_into_tensor"]),
    "reduce_scatter": (("reduce_scatter",), BYTES_SENT_PER_INPUT_BYTE["reduce_scatter_tensor"]),
    "all_reduce": (("allreduce", "all_reduce"), BYTES_SENT_PER_INPUT_BYTE["all_reduce"]),
    "all_to_all": (("alltoall", "all_to_all"), BYTES_SENT_PER_INPUT_BYTE["all_to_all_single"]),
    "broadcast": (("broadcast",), lambda n: 1),
    "send": (("send",), lambda n: 1),
    "receive": (("recv",), lambda n: 0),
}
"""By collective: substrings of its operators' names, and how many times its input a rank sends in a group of ``n``."""

GROUPS = ("tp", "ep", "etp", "cp", "fsdp", "efsdp", "dp_replicate", "pp")
"""TorchTitan's names of mesh dimensions. ``fsdp`` spans dp_shard × cp, and ``efsdp`` is the part of it that EP leaves.
Token counts are reduced over ``loss``, all data-parallel ranks, named so where its group is none of these."""


@dataclass
class Traffic:
    """The collectives that this rank called, by (group, collective)."""

    names: dict[str, str]
    """The mesh dimension of each process group, by the group's name."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes that this rank has to send at least."""
    groups: set[str] = field(default_factory=set)
    """The process groups of more than one rank that were used."""

    @classmethod
    def over(cls, dims: ParallelDims) -> Traffic:
        names: dict[str, str] = {}
        for name in GROUPS:
            mesh = dims.get_optional_mesh(name)
            if mesh is not None:  # dimensions over the same ranks have one group
                group = mesh.get_group().group_name
                names[group] = f"{names[group]}/{name}" if group in names else name
        if (experts := dims.get_optional_mesh(["dp_replicate", "efsdp"])) is not None:  # replicas of experts
            names.setdefault(experts.get_group("dp_replicate").group_name, "dp_replicate")
        if (loss := dims.get_optional_mesh("loss")) is not None:
            names.setdefault(loss.get_group().group_name, "loss")
        return cls(names)

    def communicators(self) -> list[str]:
        """Return the mesh dimensions of the groups of more than one rank that were used."""
        return [self.names.get(group, "world") for group in self.groups]

    def record(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Record a call of ``op`` if it is a collective; a wait or a barrier sends nothing."""
        if op.namespace not in ("c10d", "_c10d_functional", "_dtensor"):
            return
        name = op_schema(op).name.partition("::")[2]
        matching = (kind for kind, (parts, _) in COLLECTIVES.items() if any(part in name for part in parts))
        collective = next(matching, None)
        if collective is None:
            return
        arguments = by_name(op, args, kwargs)
        group = _group(arguments)
        key = self.names.get(group.group_name, "world"), collective
        incoming, outgoing = _sizes(op, arguments, output)
        if collective == "all_to_all":  # a rank with busier experts receives more than it sends
            incoming = max(incoming, outgoing)
        if group.size() > 1:
            self.groups.add(group.group_name)
        self.calls[key] += 1
        self.sent[key] += round(incoming * COLLECTIVES[collective][1](group.size()))


def hccl_memory(communicators: Iterable[str], own_sizes: Mapping[str, int]) -> int:
    """Return the device memory that HCCL takes for the process groups ``communicators``; 0 if the job is not for NPUs.

    Each takes two buffers of HCCL_BUFFSIZE MB, 200 by default (train_configs/env/npu.env), or of its size among
    ``own_sizes`` (``comm.hccl_buffers``).
    """
    if platform.job_backend() != "npu":
        return 0
    size = os.environ.get("HCCL_BUFFSIZE", "200")
    if not size.isdecimal():
        raise UsageError(f"HCCL_BUFFSIZE={size}: must be a number of MB")
    return sum(2 * own_sizes.get(name, int(size)) << 20 for name in communicators)


def _group(arguments: dict[str, Any]) -> Any:
    if "group_name" in arguments:
        return process_group(arguments["group_name"])
    return dist.ProcessGroup.unbox(arguments["process_group"])


def _sizes(op: OpOverload, arguments: dict[str, Any], output: Any) -> tuple[int, int]:
    """Return the bytes of a collective's input and output. c10d operators take their output as first argument."""
    tensors = [tree_leaves(value) for value in arguments.values()]
    tensors = [leaves for leaves in tensors if any(isinstance(x, Tensor) for x in leaves)]
    if op.namespace == "c10d":
        return _bytes(tensors[-1]), _bytes(tensors[0])
    return _bytes(tensors[0]), _bytes(output)


def _bytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, Tensor))
