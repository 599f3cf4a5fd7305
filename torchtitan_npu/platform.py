"""Which backend this process runs in (Ascend NPU, NVIDIA GPU or CPU), and what TorchTitan 0.2.2 needs to start there.

This is the only file that asks which device there is, and the only one that changes process-wide state:
:func:`prepare`, one explicit call that the entry, the tools and the tests make before they import TorchTitan. On
NPU and GPU it changes next to nothing. TorchTitan 0.2.2 does not run on a CPU as it is; each thing done for that
backend says which upstream line makes it necessary.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform as python_platform
import resource
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch

from torchtitan_npu.errors import UsageError

Backend = Literal["npu", "cuda", "cpu"]


@functools.cache
def backend() -> Backend:
    """The backend of this process: where the model's tensors live."""
    if torch._C._get_privateuse1_backend_name() == "npu" and torch.get_device_module("npu").is_available():
        return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


_job_backends: list[Backend] = []


def job_backend() -> Backend:
    """The backend that the job is for, whose defaults and limits it has: this one's, unless another's is rehearsed."""
    return _job_backends[-1] if _job_backends else backend()


@contextmanager
def job_for(job: Backend) -> Iterator[None]:
    """In this context jobs are checked for the backend ``job``, though they run in this one."""
    _job_backends.append(job)
    try:
        yield
    finally:
        _job_backends.pop()


@functools.cache
def prepare() -> None:
    """Make TorchTitan importable and runnable in this backend; call it once, before anything imports TorchTitan."""
    if backend() != "cuda" or importlib.util.find_spec("triton") is None:
        _replace_triton_kernels()
    if backend() == "cpu":
        _answer_device_detection()
        _let_histc_count_integers()
        _shard_cpu_attention()
        for warning in (
            "In CPU autocast, but the target dtype",  # float32 needs no autocast
            "DTensor .* may not have complete support on cpu",  # see distributed/start.py
            "Set timeout is now only supported for",  # gloo keeps its first time-out
        ):
            warnings.filterwarnings("ignore", message=warning)


def _replace_triton_kernels() -> None:
    """models/moe/kernels.py:8 imports Triton; on an NPU that name is triton-ascend's, on a CPU nothing runs it."""
    from torchtitan_npu.upstream import permute_indices

    sys.modules.setdefault("torchtitan.models.moe.kernels", permute_indices)


class CpuDevice(ModuleType):
    """``torch.cpu`` with what TorchTitan asks of a device module: a name, a capacity and memory statistics.

    Memory is the process's resident set: its peak since the start, since the system does not let a peak be reset.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def set_device(self, device: torch.device) -> None:
        """Nothing to choose: ``cpu:1`` is the same processor as ``cpu:0``."""

    def current_device(self) -> int:
        return 0  # distributed/utils.py:386 hands it to barrier(device_ids=...), which wants a number

    def get_device_name(self, device: torch.device | None = None) -> str:
        return python_platform.processor() or python_platform.machine()

    def get_device_properties(self, device: torch.device | None = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    def memory_stats(self, device: torch.device | None = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self) -> None:
        """The resident set's peak cannot be reset."""

    def empty_cache(self) -> None:
        """There is no cache."""


def _answer_device_detection() -> None:
    """tools/utils.py:37 takes "no accelerator" for CUDA, when it is imported and again from dual_pipe_v.py:187.

    Importing that module imports half of TorchTitan, which copies the answer; so the answer has to be there first:
    torch's two functions are exchanged for the length of this one import, then only the module's own names keep the
    new ones.
    """
    import torch._utils as torch_utils

    if "torchtitan.tools.utils" in sys.modules:
        raise UsageError("torchtitan_npu.platform.prepare() must be called before torchtitan is imported")
    cpu = CpuDevice("torch.cpu")
    answers = {"_get_available_device_type": lambda: "cpu", "_get_device_module": lambda device_type: cpu}
    upstream = {name: getattr(torch_utils, name) for name in answers}
    vars(torch_utils).update(answers)
    try:
        import torchtitan.tools.utils  # noqa: F401
    finally:
        vars(torch_utils).update(upstream)


def _let_histc_count_integers() -> None:
    """moe.py:348 and :399 count tokens with ``torch.histc`` on integers, for which the CPU has no kernel.

    Integer input, an error until now, gets one; floating input keeps torch's.
    """
    floating = torch.library.get_kernel("aten::histc", "CPU")

    def histc(keys: Any, x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        if x.is_floating_point():
            return floating.call_boxed(keys, x, bins, min, max)
        if bins <= 0 or max <= min:
            raise RuntimeError(f"histc of integers needs bins > 0 and max > min, not {bins}, {max} and {min}")
        # equal bins over [min, max], the last one closed, as torch counts; what lies outside is left out
        values = x.flatten().long()
        values = values[(values >= min) & (values <= max)]
        bin_of = ((values - min) * bins).div(max - min, rounding_mode="floor").long().clamp_max(bins - 1)
        return torch.bincount(bin_of, minlength=bins).to(x.dtype)

    def histc_fake(x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
        return x.new_empty(bins)

    _library.impl("histc", histc, "CPU", with_keyset=True, allow_override=True)
    torch.library.register_fake("aten::histc", histc_fake, lib=_library, allow_override=True)


_library = torch.library.Library("aten", "IMPL")  # kernels live as long as this object


def _shard_cpu_attention() -> None:
    """DTensor has no rule for the CPU's attention kernel, which qwen3 meets under tensor parallel."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    aten = torch.ops.aten

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu.default)
    def attention(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
        rest = [None] * 2
        return [([p, p], [p, p, p, *rest]) for p in (Replicate(), Shard(0), Shard(1))]

    @register_sharding(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
    def backward(dy, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None):  # type: ignore[no-untyped-def]
        rest = [None] * 2
        return [([p] * 3, [p] * 6 + rest) for p in (Replicate(), Shard(0), Shard(1))]
