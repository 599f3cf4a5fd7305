"""The device time of one training step by operator, with the limit of the hardware for the work of each operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from harness import Machine
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.planner.fake_devices import BelowSubclasses
from torchtitan_npu.planner.work import flops
from torchtitan_npu.pytree import tree_leaves
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema

WRITTEN_ONLY = ("aten::copy_", "aten::fill_", "aten::zero_")
"""Operators that do not read the tensor that they write."""
GATHERS = ("aten::embedding", "aten::index", "aten::gather")
"""Operators that read as much as they return."""
PROFILER_OVERHEAD = (
    "Activity Buffer Request",
    "Buffer Flush",
    "Command Buffer Full",
    "Driver Compiler",
    "Force Int",
    "Instrumentation",
    "Lazy Function Loading",
    "Resource",
    "Runtime Triggered Module Loading",
    "Unknown",
    "Unrecognized",
)
"""Kineto's names of the profiler's overhead (``overheadKindString``), which is listed among an operator's kernels."""


class Work(BelowSubclasses):
    """Count the calls, the floating-point operations and the bytes of each operator.

    Masked pairs are no work: entries of ``sparse_indices`` without a key, and keys after the query of the indexer.
    Bytes are those of arguments and results, each tensor once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def call(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op(*args, **kwargs)
        name = op_schema(op).name
        self.calls[name] += 1
        self.flops[name] += round(flops(op, args, kwargs, result) * unmasked_share(op, args, kwargs))
        self.bytes[name] += moved(op, args, kwargs, result)
        return result


def unmasked_share(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the share of (query, key) pairs that are computed, of those that the FLOPs of ``op`` count."""
    name = op_schema(op).name
    if not name.startswith("npu::"):
        return 1.0
    arguments = by_name(op, args, kwargs)
    if isinstance(indices := arguments.get("sparse_indices"), Tensor):
        return (indices >= 0).float().mean().item()
    if name == "npu::npu_lightning_indexer":
        tokens = arguments["query"].shape[1]  # (B, S, N, D), causal
        return (tokens + 1) / (2 * tokens)
    return 1.0


def moved(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the bytes that ``op`` has to read and write."""
    name = op_schema(op).name
    arguments = by_name(op, args, kwargs)
    writes = {x.name for x in op_schema(op).arguments if x.alias_info is not None and x.alias_info.is_write}
    written = [arguments[key] for key in writes]
    read = [value for key, value in arguments.items() if key not in writes or name not in WRITTEN_ONLY]
    known = {id(tensor) for tensor in tensors(arguments)}
    created = [tensor for tensor in tensors(result) if id(tensor) not in known]
    if name in GATHERS:
        read = created
    return sum(map(stored_bytes, [*tensors(read), *tensors(written), *created]))


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def stored_bytes(tensor: Tensor) -> int:
    """Return the bytes of ``tensor`` in memory, which are fewer if it is expanded."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def operator_rows(step: Callable[[], object], machine: Machine) -> list[dict[str, Any]]:
    """Run ``step`` twice, count its work and measure its kernels. Return a row per operator, the longest first."""
    work = Work()
    with work:
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    microseconds: Counter[str] = Counter()
    for event in profiled.events():
        kernels = [kernel for kernel in event.kernels if kernel.name not in PROFILER_OVERHEAD]
        if duration := sum(kernel.duration for kernel in kernels):
            while event is not None and event.name not in work.calls:
                event = event.cpu_parent
            microseconds[event.name if event else "other"] += duration
    return [
        {
            "operator": name,
            "calls": work.calls[name],
            "ms": us / 1e3,
            "limit_ms": machine.limit_ms(work.bytes[name], work.flops[name]),
        }
        for name, us in microseconds.most_common()
    ]
