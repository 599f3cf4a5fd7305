"""The work of a step: floating-point operations, collectives, and their time at assumed rates."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import flop_counter
from torchtitan.distributed import ParallelDims

from torchtitan_npu import platform
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.ops.grouped_matmul.op import product_flops
from torchtitan_npu.pytree import tree_leaves
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema
from torchtitan_npu.torch_internals.distributed import process_group

Formula = Callable[[dict[str, Any], Any], int]
"""The FLOPs of a call, from its arguments by name and its output."""


def _formula(op: str) -> Formula:
    """Return the formula of one of this package's operators, which is in ``ops/``."""
    formula = OPS[op].flops
    assert formula is not None
    return lambda arguments, output: formula(**arguments)


FLOP_FORMULAS: dict[str, Formula] = {
    **{f"npu::{op.name}": _formula(op.name) for op in OPS.values() if op.flops is not None},
    # operators of torch_npu that this package does not define
    "npu::npu_fusion_attention_v3": _formula("npu_fusion_attention"),
    "npu::npu_fusion_attention_grad_v3": _formula("npu_fusion_attention_grad"),
    "aten::matmul": lambda a, output: 2 * output.numel() * a["self"].shape[-1],
    "aten::matmul_backward": lambda a, output: 2 * a["grad"].numel() * a["self"].shape[-1] * sum(a["mask"]),
    "aten::linear": lambda a, output: 2 * output.numel() * a["input"].shape[-1],
    "aten::_grouped_mm": lambda a, output: product_flops(a["self"], a["mat2"]),
    "aten::_scaled_dot_product_flash_attention_for_cpu": lambda a, output: flop_counter.sdpa_flop_count(
        *(a[name].shape for name in ("query", "key", "value"))
    ),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": lambda a, output: (
        flop_counter.sdpa_backward_flop_count(*(a[name].shape for name in ("grad_out", "query", "key", "value")))
    ),
}
"""Formulas by operator, where torch has none."""

BYTES_SENT_PER_INPUT_BYTE = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_to_all_single": lambda n: (n - 1) / n,
    "shard_dim_alltoall": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
}
"""Bytes that a rank sends in each functional collective over ``n`` ranks, per byte of its input."""

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


def flops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Return the FLOPs of one call; 0 for an operator without matrix products.

    Counted as torch counts: matrix products only, a multiplication and an addition each, without regard to masks.
    """
    formula = FLOP_FORMULAS.get(op_schema(op).name)
    if formula is not None:
        return formula(by_name(op, args, kwargs), output)
    known = flop_counter.flop_registry.get(op.overloadpacket)
    return known(*args, **kwargs, out_val=output) if known is not None else 0


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
    def from_dims(cls, dims: ParallelDims) -> Traffic:
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
        if "group_name" in arguments:
            group = process_group(arguments["group_name"])
        else:
            group = dist.ProcessGroup.unbox(arguments["process_group"])
        leaves = ([x for x in tree_leaves(value) if isinstance(x, Tensor)] for value in arguments.values())
        tensors = [found for found in leaves if found]
        # c10d operators take their output as first argument.
        sides = (tensors[-1], tensors[0]) if op.namespace == "c10d" else (tensors[0], tree_leaves(output))
        incoming, outgoing = (sum(x.numel() * x.element_size() for x in side) for side in sides)
        if collective == "all_to_all":  # a rank with busier experts receives more than it sends
            incoming = max(incoming, outgoing)
        key = self.names.get(group.group_name, "world"), collective
        if group.size() > 1:
            self.groups.add(group.group_name)
        self.calls[key] += 1
        self.sent[key] += round(incoming * COLLECTIVES[collective][1](group.size()))


def hccl_memory(communicators: Iterable[str], buffer_sizes: Mapping[str, int]) -> int:
    """Return the device memory that HCCL takes for the process groups ``communicators``; 0 if the job is not for NPUs.

    Each takes two buffers of HCCL_BUFFSIZE MB, 200 by default (train_configs/env/npu.env), or of its size among
    ``buffer_sizes`` (``comm.hccl_buffers``).
    """
    if platform.job_backend() != "npu":
        return 0
    size = os.environ.get("HCCL_BUFFSIZE", "200")
    if not size.isdecimal():
        raise UsageError(f"HCCL_BUFFSIZE={size}: must be a number of MB")
    return sum(2 * buffer_sizes.get(name, int(size)) << 20 for name in communicators)


@dataclass(frozen=True)
class Rates:
    """Rates of one device: 10¹² floating-point operations and 10⁹ bytes per second.

    The time of a step at these rates, with nothing overlapped, is to compare layouts, not to predict a speed.
    """

    tflops: float = 100.0
    bandwidth: float = 100.0
    groups: dict[str, float] = field(default_factory=dict)
    """Bandwidths of mesh dimensions that differ from ``bandwidth``."""

    @classmethod
    def parse(cls, tflops: float, bandwidth: str) -> Rates:
        """Parse ``bandwidth``: ``100``, or ``100,tp=200,ep=50``."""
        if not tflops > 0:
            raise UsageError(f"--tflops {tflops:g}: must be more than 0")
        found: dict[str, float] = {}
        """By group; all groups are ``""``."""
        for part in bandwidth.split(","):
            name, equals, number = part.rpartition("=")
            try:
                value = float(number)
            except ValueError:
                value = 0
            if not value > 0 or (equals and not name):
                raise UsageError(f"--bandwidth {bandwidth}: must be GB/s such as 100, or by group 100,tp=200,ep=50")
            if name not in ("", *(known := (*GROUPS, "loss", "world"))):
                raise UsageError(f"--bandwidth {bandwidth}: unknown group {name} ({', '.join(known)})")
            if name in found:
                raise UsageError(f"--bandwidth {bandwidth}: two values for {name or 'all groups'}")
            found[name] = value
        return cls(tflops, found.pop("", cls.bandwidth), found)

    def seconds(self, flops: float, sent: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds that ``compute`` and the bytes sent in each group take.

        A group of several mesh dimensions, such as ``ep/fsdp``, has the first rate that is set.
        """
        times = {"compute": flops / self.tflops / 1e12}
        for group, count in sent.items():
            rate = next((self.groups[name] for name in group.split("/") if name in self.groups), self.bandwidth)
            times[group] = count / rate / 1e9
        return times
