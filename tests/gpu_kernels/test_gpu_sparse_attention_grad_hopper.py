"""The Gluon kernel of sparse attention's gradient, on a Hopper GPU or else in a simulator, against the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests._helpers.sparse_attention_check import assert_agrees
from tests.gpu_kernels.gluon_simulator import on_hopper
from tests.gpu_kernels.kernel_checks import DEVICE, docs_of
from tests.gpu_kernels.test_gpu_sparse_attention_hopper import SCALE, inputs
from torchtitan_npu.gpu_kernels.sparse_flash_attention import gluon_grad, triton_grad
from torchtitan_npu.ops import OPS, define

CASES = {
    "documents of a batch, some shorter": ("BSND", [(2, 150), (1, 3)], True, (16, 1), 192, "contiguous"),
    "packed documents, one without queries": ("TND", [(2, 150), (0, 2), (1, 7)], True, (8, 1), 192, "head by head"),
    "rows that see no key": ("TND", [(3, 2), (1, 2)], True, (16, 1), 64, "contiguous"),
    "two key heads, a strided batch": ("BSND", [(2, 130)] * 2, False, (144, 2), 128, "tokens first"),
    "several blocks": ("BSND", [(3, 600)], False, (64, 1), 576, "contiguous"),
    "two tiles of heads, few keys": ("BSND", [(4, 10)], False, (72, 1), 64, "contiguous"),
    "200 heads": ("BSND", [(3, 130)], False, (200, 1), 64, "contiguous"),
    "128 heads": ("BSND", [(5, 300)], True, (128, 1), 320, "strided"),
    "eight queries in a row, of two documents": ("TND", [(3, 70), (13, 40)], True, (4, 1), 64, "contiguous"),
    "four queries in a row": ("BSND", [(4, 300), (12, 200)], True, (32, 1), 256, "head by head"),
    "64 heads, keys in any order": ("BSND", [(6, 200)], False, (64, 1), 192, "contiguous"),
}
BY_DEFAULT = {
    "documents of a batch, some shorter": (False, True),
    "two key heads, a strided batch": (False,),
    "eight queries in a row, of two documents": (False, True),
    "two tiles of heads, few keys": (True,),
}
"""Cases of the default run, with atomic and with deterministic sums."""


@pytest.fixture(scope="module")
def hopper() -> Any:
    """Return a namespace of operators in which the backward pass has the Gluon kernel."""
    name = "npu_sparse_flash_attention_grad"
    grad = dataclasses.replace(OPS[name], reference=on_hopper(gluon_grad, name))
    define("hopper_gradients", [OPS["npu_sparse_flash_attention"], grad])
    return torch.ops.hopper_gradients


@pytest.mark.parametrize(
    ("case", "deterministic"),
    [
        pytest.param(
            *(case, deterministic),
            marks=[pytest.mark.slow] * (deterministic not in BY_DEFAULT.get(case, ())),
            id=case + ", in order" * deterministic,
        )
        for case in CASES
        for deterministic in (False, True)
    ],
    indirect=["deterministic"],
)
def test_agrees_with_the_oracle(
    hopper: Any, half: torch.dtype, case: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gluon_grad, "multiprocessors", lambda _: 3)  # as in the simulator: several tiles per program
    layout, sizes, causal, heads, top_k, arranged = CASES[case]
    # In most cases several chunks, of up to three rows with two tiles of heads, or up to two if only d_out is copied
    row = heads[1] * top_k * 2 * (512 + 64) * triton_grad.contribution_dtype(half).itemsize
    monkeypatch.setattr(triton_grad, "WORKSPACE", 3 * row // 2 if deterministic else 2048 * heads[0])
    docs = docs_of(layout, sizes, half, causal, arranged)
    assert_agrees(hopper, docs, heads, top_k, True, False, DEVICE, rounds=True, size=512, rope=64, scale=SCALE)


@pytest.mark.slow
def test_deterministic_gradients_are_bit_identical(hopper: Any) -> None:
    torch.use_deterministic_algorithms(True)
    call = inputs(40, 192)
    leaves = [call[name].requires_grad_() for name in ("query", "key", "query_rope", "key_rope")]
    out = hopper.npu_sparse_flash_attention(**call)[0]
    first, second = (torch.autograd.grad(out.sin().sum(), leaves, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
