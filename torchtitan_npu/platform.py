"""The backend of this process (Ascend NPU, NVIDIA GPU or CPU), and the set-up that TorchTitan 0.2.2 needs on it.

This is the only module that asks which device there is, and the only one with process-wide set-up: :func:`prepare`, one
explicit call that the entry, the tools and the tests make before they import TorchTitan. On NPU and GPU it does next
to nothing. TorchTitan 0.2.2 does not run on a CPU; each step for that backend names the upstream line that needs it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform as python_platform
import resource
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch

from torchtitan_npu.errors import UsageError

Backend = Literal["npu", "cuda", "cpu"]


_CPU_ONLY = "TORCHTITAN_NPU_CPU_ONLY"


def use_cpu() -> None:
    """Make the CPU the backend of this process and of those it starts, also on a machine with other devices."""
    os.environ |= {_CPU_ONLY: "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if backend() != "cpu":
        raise RuntimeError(f"use_cpu() must be called before backend(), which returned {backend()!r}")


@functools.cache
def backend() -> Backend:
    """Return the backend of this process, on whose device the model's tensors are."""
    if os.environ.get(_CPU_ONLY):
        return "cpu"
    npu = getattr(torch, "npu", None)  # torch_npu registers it, and torch loads torch_npu if it is installed
    if npu is not None and npu.is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def cann_version() -> str | None:
    """Return the version of CANN that torch_npu loaded, such as ``"9.1.0"``, or ``None`` without an NPU."""
    return torch.get_device_module("npu").utils.get_cann_version() or None if backend() == "npu" else None


_job_backends: list[Backend] = []


def job_backend() -> Backend:
    """Return the backend whose defaults and limits a job has: this process's, unless :func:`job_for` sets another."""
    return _job_backends[-1] if _job_backends else backend()


@contextmanager
def job_for(job: Backend) -> Iterator[None]:
    """Check jobs for the backend ``job`` in this context, although they run in this process."""
    _job_backends.append(job)
    try:
        yield
    finally:
        _job_backends.pop()


@functools.cache
def prepare() -> None:
    """Make TorchTitan importable and runnable on this backend. Call it once, before anything imports TorchTitan."""
    if backend() != "cuda" or importlib.util.find_spec("triton") is None:
        _replace_triton_kernels()
    if backend() == "npu":  # torch sets time-outs for NCCL and gloo; the Trainer sets HCCL's
        warnings.filterwarnings("ignore", message="Set timeout is now only supported for")
    if backend() == "cpu":
        _detect_cpu()
        _add_integer_histc()
        _shard_cpu_attention()
        for warning in (
            "In CPU autocast, but the target dtype",  # float32 needs no autocast
            "DTensor .* may not have complete support on cpu",  # see distributed/cpu_ranks.py
            "Set timeout is now only supported for",  # gloo keeps its first timeout
        ):
            warnings.filterwarnings("ignore", message=warning)


def _replace_triton_kernels() -> None:
    """Register a module in place of TorchTitan's Triton kernel: see ``titan_internals.permute_indices``."""
    from torchtitan_npu.titan_internals import permute_indices

    sys.modules.setdefault("torchtitan.models.moe.kernels", permute_indices)


class CpuDevice(ModuleType):
    """``torch.cpu`` with what TorchTitan expects of a device module: a name, a capacity and memory statistics.

    Memory is the resident set of the process. Its peak is since the start, because the system cannot reset it.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: torch.device) -> None:
        """Do nothing: ``cpu:1`` is the same processor as ``cpu:0``."""

    def current_device(self) -> int:
        return 0  # distributed/utils.py:386 passes it to barrier(device_ids=...), which requires an int

    def get_device_name(self, device: torch.device | None = None) -> str:
        return python_platform.processor() or python_platform.machine()

    def get_device_properties(self, device: torch.device | None = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: torch.device | None = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self) -> None:
        """Do nothing: the peak of the resident set cannot be reset."""

    def empty_cache(self) -> None:
        """Do nothing: there is no cache."""


def _detect_cpu() -> None:
    """Let TorchTitan detect the CPU: tools/utils.py:37 takes "no accelerator" for CUDA.

    Half of TorchTitan copies the result at import, so it has to be right as soon as that module is executed.
    """
    if _CpuUtilsFinder.MODULE in sys.modules:
        raise UsageError("torchtitan_npu.platform.prepare() must be called before torchtitan is imported")
    sys.meta_path.insert(0, _CpuUtilsFinder())


class _CpuUtilsFinder(MetaPathFinder):
    """Find ``torchtitan.tools.utils`` as usual, with a loader that sets its device to the CPU."""

    MODULE = "torchtitan.tools.utils"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _CpuUtilsLoader(fullname, spec.origin)
        return spec


class _CpuUtilsLoader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        device = "cpu", CpuDevice("torch.cpu")
        vars(module).update(device_type=device[0], device_module=device[1])
        module.get_device_info = lambda: device  # type: ignore[attr-defined] # dual_pipe_v.py:187 calls it


def _add_integer_histc() -> None:
    """Add a CPU kernel of ``torch.histc`` for integers: moe.py:348 and :399 count tokens with it.

    Integer input is an error without it. Floating input still goes to torch's kernel.
    """
    floating = torch.library.get_kernel("aten::histc", "CPU")

    def histc(keys: Any, x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        if x.is_floating_point():
            return floating.call_boxed(keys, x, bins, min, max)
        if bins <= 0 or max <= min:
            raise RuntimeError(f"histc of integers needs bins > 0 and max > min, not {bins}, {max} and {min}")
        # equal bins over [min, max], the last one closed, as in torch; values outside are ignored
        values = x.flatten().long()
        values = values[(values >= min) & (values <= max)]
        bin_of = ((values - min) * bins).div(max - min, rounding_mode="floor").long().clamp_max(bins - 1)
        return torch.bincount(bin_of, minlength=bins).to(x.dtype)

    def histc_fake(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        return x.new_empty(bins)

    with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch warns that a kernel is overridden
        _library.impl("histc", histc, "CPU", with_keyset=True, allow_override=True)
    torch.library.register_fake("aten::histc", histc_fake, lib=_library, allow_override=True)


_library = torch.library.Library("aten", "IMPL")  # kernels live as long as this object


def _shard_cpu_attention() -> None:
    """Register DTensor strategies for the CPU's attention kernel, which qwen3 calls under tensor parallel."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    aten = torch.ops.aten

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)
    def attention(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
        no_placement = [None] * 2
        return [([p, p], [p, p, p, *no_placement]) for p in (Replicate(), Shard(0), Shard(1))]

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    def backward(dy, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
        no_placement = [None] * 2
        return [([p] * 3, [p] * 6 + no_placement) for p in (Replicate(), Shard(0), Shard(1))]
