"""The Triton kernels run on the GPU where there is one, and by Triton's interpreter on the CPU where there is none."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from tests._helpers.forbidden_pages import forbidden_pages
from tests._helpers.kernel_checks import DEVICE, dtype_on
from torchtitan_npu.ops import OPS, define


@pytest.fixture(scope="package", autouse=True)
def _out_of_bounds_is_an_error() -> Iterator[None]:
    if DEVICE == "cuda":  # where compute-sanitizer looks
        yield
        return
    with forbidden_pages():
        yield


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def half(device: str) -> torch.dtype:
    """The dtype to train in, or what stands for it."""
    return dtype_on(device, torch.bfloat16)


@pytest.fixture(scope="session")
def gpu() -> object:
    """The vocabulary with the GPU's kernels, on whatever device they run here."""
    ops = [dataclasses.replace(op, reference=op.cuda) for op in OPS.values() if op.cuda is not None]
    define("gpu_kernels", ops)
    return torch.ops.gpu_kernels
