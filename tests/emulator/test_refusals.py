"""GetWorkspaceSize refuses an object of another type, a dtype or rank of no document, sizes that do not fit."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from torchtitan_npu.emulator.build import (
    ACL_DTYPES,
    ANY_DTYPE,
    ANY_RANK,
    OPERATORS,
    RUNTIME,
    dtype_set,
    in_version,
    rank_set,
)
from torchtitan_npu.emulator.kernels.registry import KERNELS

PARAMETER_ERROR = 161002


def test_a_missing_kernel_names_the_lines_to_add(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 3).npu()
    monkeypatch.delitem(KERNELS, "aclnnClamp")
    with pytest.raises(RuntimeError) as error:
        x.clamp(0, 1).cpu()
    text = str(error.value)
    assert "no kernel for aclnnClamp(self=float32[2, 3], clipValueMin=0, clipValueMax=1, out=float32[2, 3])" in text
    assert "Add to torchtitan_npu/emulator/kernels/indexing.py:" in text
    assert (
        '@kernel("aclnnClamp")\ndef clamp(self, clip_value_min, clip_value_max, out):\n    ...  # write out in place'
    ) in text


def test_an_object_of_another_type_is_named() -> None:
    torch.ones(1).npu()  # the libraries are loaded
    runtime, operators = ctypes.CDLL(RUNTIME), ctypes.CDLL(OPERATORS)
    runtime.aclCreateScalar.restype = runtime.aclGetRecentErrMsg.restype = ctypes.c_void_p
    value, workspace, executor = ctypes.c_float(1), ctypes.c_uint64(), ctypes.c_void_p()
    scalar = ctypes.c_void_p(runtime.aclCreateScalar(ctypes.byref(value), ACL_DTYPES["float32"]))

    def refused(*arguments: ctypes.c_void_p | None) -> str:
        code = operators.aclnnAddGetWorkspaceSize(*arguments, ctypes.byref(workspace), ctypes.byref(executor))
        assert code == PARAMETER_ERROR
        return ctypes.string_at(runtime.aclGetRecentErrMsg()).decode()

    assert refused(None, scalar, scalar, None) == (
        "aclnnAdd: argument 2, other, is aclScalar; its prototype has aclTensor"
    )
    runtime.aclDestroyScalar(scalar)
    assert refused(None, None, scalar, None) == (
        "aclnnAdd: argument 3, alpha, is no object of ACL, or one that was destroyed; its prototype has aclScalar"
    )


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape).npu()


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64).npu()


def doubles(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float64).npu()


UNDOCUMENTED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "matmul of float64": (
        lambda: doubles(2, 2) @ doubles(2, 2),
        r"aclnnMatmul: self is float64; CANN \S+ on Ascend910B3 takes float32, float16, bfloat16 \(hicann/ops-nn/",
    ),
    "nll_loss of float64": (lambda: F.nll_loss(doubles(2, 2), zeros(2)), r"aclnnNLLLoss: self is float64"),
    "layer_norm of float64": (lambda: F.layer_norm(doubles(2, 2), (2,)), r"aclnnLayerNorm\w*: input is float64"),
    "gelu of float64": (lambda: F.gelu(doubles(2)), r"aclnnGelu\w*: \w+ is float64"),
    "sort of float64": (lambda: doubles(2).sort().values, r"aclnnSort: self is float64"),
    "matmul of 7 dimensions": (
        lambda: ones(1, 1, 1, 1, 1, 2, 3) @ ones(3, 2),
        r"aclnnMatmul: self has 7 dimensions; CANN \S+ on Ascend910B3 takes 1, 2, 3, 4, 5, 6 \(hicann/ops-nn/",
    ),
    "embedding of 1 dimension": (
        lambda: F.embedding(zeros(2), ones(4)),
        r"aclnnEmbedding: weight has 1 dimension; CANN \S+ on Ascend910B3 takes 2 \(",
    ),
}


@pytest.mark.parametrize("case", UNDOCUMENTED)
def test_a_dtype_or_rank_of_no_document_is_refused(case: str) -> None:
    call, message = UNDOCUMENTED[case]
    with pytest.raises(RuntimeError, match=rf"error code is {PARAMETER_ERROR}[\s\S]*{message}"):
        call()


SIZES: dict[str, tuple[Callable[[], object], str]] = {
    "mm": (lambda: ones(2, 3) @ ones(4, 2), "aclnnMatmul"),
    "bmm": (lambda: torch.bmm(ones(3, 2, 3), ones(2, 3, 2)), "aclnnBatchMatMul"),
    "baddbmm": (lambda: torch.baddbmm(ones(2, 2, 2), ones(2, 2, 3), ones(2, 4, 2)), "aclnnBaddbmm"),
    "mv": (lambda: torch.mv(ones(2, 3), ones(2)), "aclnnMv"),
    "dot": (lambda: torch.dot(ones(2), ones(3)), "aclnnDot"),
    "cat": (lambda: torch.cat([ones(2, 3), ones(2, 4)]), "aclnnCat"),
    "stack": (lambda: torch.stack([ones(2), ones(3)]), "aclnnStack"),
    "topk": (lambda: torch.topk(ones(2, 3), 4), r"aclnnTopk\w*"),
    "sort": (lambda: ones(2).sort(1), "aclnnSort"),
    "softmax": (lambda: ones(2, 3).softmax(2), "aclnnSoftmax"),
    "index_select": (lambda: ones(2, 3).index_select(0, zeros(2, 2)), "aclnnIndexSelect"),
    "gather": (lambda: ones(2, 3).gather(1, zeros(3, 3)), "aclnnGather"),
    "scatter_add": (lambda: ones(2, 3).scatter_add(1, zeros(2, 4), ones(2, 3)), "aclnnScatterAdd"),
    "index_add": (lambda: ones(2, 3).index_add(0, zeros(2), ones(3, 3)), "aclnnIndexAdd"),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_do_not_fit_are_refused(case: str) -> None:
    call, operator = SIZES[case]
    with pytest.raises(RuntimeError, match=rf"error code is {PARAMETER_ERROR}[\s\S]*{operator}\(.*\): "):
        call()


BFLOAT16 = """
import torch, torch_npu
x = torch.ones(2, dtype=torch.bfloat16).npu()
print("start")
try:
    print(x + x)
except RuntimeError as error:
    print(next(line for line in str(error).splitlines() if "chip" in line or "CANN" in line))
"""


def test_the_dtypes_of_a_chip() -> None:
    """Collectives of bfloat16 run on a 910_93 (test_hccl.py)."""
    environment = {**os.environ, "NPU_EMULATOR_CHIP": "Ascend910A"}
    ran = subprocess.run([sys.executable, "-c", BFLOAT16], env=environment, capture_output=True, text=True, check=True)
    message = "aclnnAdd: self is bfloat16; CANN 9.2.0 on Ascend910A takes float32, float16, "
    assert message in ran.stdout.partition("start\n")[2], ran.stdout


def test_the_runtime_numbers_dtypes_as_the_build() -> None:
    runtime = ctypes.CDLL(str(Path(os.environ["ASCEND_HOME_PATH"], "lib64", RUNTIME)))
    runtime.emulator_dtype_name.restype = ctypes.c_char_p
    names = {number: runtime.emulator_dtype_name(number).decode() for number in range(64)}
    assert {name: number for number, name in names.items() if name != "unknown"} == ACL_DTYPES


def test_the_dtypes_of_a_version() -> None:
    document = {"self out": {"910B 910_93": {"9.0": "float32 float16", "master": None}}}
    assert dtype_set(document, "out", "910_93", "9.1") == 0b11
    unknown = [("self", "910B", "8.5"), ("self", "910B", "master"), ("self", "950", "9.1"), ("other", "910B", "9.1")]
    assert {dtype_set(document, *which) for which in unknown} == {ANY_DTYPE}
    assert in_version("9.1", {"8.5": 1, "9.0": 2}) == 2 and in_version("8.5", {"9.0": 2}) is None


def test_the_ranks_of_a_version() -> None:
    document = {"self out": {"9.0": "2 3", "master": None}}
    assert rank_set(document, "out", "9.1") == 0b1100
    assert {rank_set(document, *which) for which in (("self", "8.5"), ("self", "master"), ("x", "9.1"))} == {ANY_RANK}
