"""Run the Triton kernels on the GPU, or in Triton's interpreter on a machine without one."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence

import pytest
import torch

from tests.gpu_kernels.interpreter import forbidden_pages, quick_interpreter
from tests.gpu_kernels.kernel_checks import DEVICE, dtype_on
from torchtitan_npu.gpu_kernels import launch as triton_launch
from torchtitan_npu.gpu_kernels.indexer_kl_loss import triton as loss_triton
from torchtitan_npu.gpu_kernels.lightning_indexer import gluon_grad as indexer_gluon_grad
from torchtitan_npu.gpu_kernels.lightning_indexer import triton as indexer_triton
from torchtitan_npu.gpu_kernels.lightning_indexer import triton_grad as indexer_triton_grad
from torchtitan_npu.gpu_kernels.lightning_indexer import triton_top_k
from torchtitan_npu.gpu_kernels.sparse_flash_attention import gluon_grad, triton, triton_grad
from torchtitan_npu.ops import OPS, define
from torchtitan_npu.ops.core.gpu import kernels

INDEXER = (indexer_gluon_grad, indexer_triton, indexer_triton_grad, triton_top_k, loss_triton)
WITH_WORKSPACES = (gluon_grad, triton, triton_grad, *INDEXER)


@pytest.fixture(scope="package", autouse=True)
def _out_of_bounds_is_an_error() -> Iterator[None]:
    if DEVICE == "cuda":  # compute-sanitizer checks this on a GPU
        yield
        return
    with quick_interpreter(), forbidden_pages():
        yield


@pytest.fixture(scope="package", autouse=True)
def _workspaces_are_nan() -> Iterator[None]:
    """Fill workspaces with NaN, so that a kernel that reads what it has not written returns NaN or wrong keys."""

    def not_a_number(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(tuple(shape), torch.nan, dtype=dtype, device=device)

    with pytest.MonkeyPatch.context() as patch:
        for module in WITH_WORKSPACES:
            patch.setattr(module, "uninitialized", not_a_number)
        yield
        forgotten = [
            name
            for name, module in list(sys.modules.items())
            if name.startswith("torchtitan_npu.gpu_kernels.") and module is not triton_launch
            if getattr(module, "uninitialized", None) is triton_launch.uninitialized
        ]
        assert not forgotten, "WITH_WORKSPACES does not have them"


@pytest.fixture(scope="session")
def device() -> str:
    return DEVICE


@pytest.fixture(scope="session")
def half(device: str) -> torch.dtype:
    """Return bfloat16, or float16 in the interpreter."""
    return dtype_on(device, torch.bfloat16)


@pytest.fixture(params=[False, True], ids=["", "in order"])
def deterministic(request: pytest.FixtureRequest) -> bool:
    """Run with and without deterministic algorithms, which change only the sums of the keys' gradients."""
    torch.use_deterministic_algorithms(request.param)
    return request.param


@pytest.fixture(scope="session")
def gpu() -> object:
    """Return a namespace of operators whose kernels are the GPU's, on the device of these tests."""
    ops = [dataclasses.replace(OPS[name], reference=OPS[name].cuda) for name in kernels()]
    define("gpu_kernels", ops)
    return torch.ops.gpu_kernels
