"""The Gluon kernel of sparse attention's gradient, on a Hopper GPU or else in a simulator, against the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._helpers.sparse_attention_check import assert_agrees
from tests._helpers.sparse_oracle import ARRANGEMENTS, Documents
from tests.gpu_kernels import gluon_simulator
from tests.gpu_kernels.gluon_simulator import find_fault, module_of, simulated
from tests.gpu_kernels.kernel_checks import DEVICE
from torchtitan_npu.gpu_kernels.registry import KERNELS
from torchtitan_npu.gpu_kernels.sparse_flash_attention import gluon_grad, gluon_grad_kernel, triton_grad
from torchtitan_npu.ops import OPS, define
from torchtitan_npu.ops.core.gpu import is_hopper

SCALE = (512 + 64) ** -0.5
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
    has_gpu = is_hopper(torch.empty(0, device=DEVICE))
    run = gluon_grad.npu_sparse_flash_attention_grad if has_gpu else simulated(gluon_grad, name)
    define("hopper_gradients", [OPS["npu_sparse_flash_attention"], dataclasses.replace(OPS[name], reference=run)])
    return torch.ops.hopper_gradients


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


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
    generator = torch.Generator().manual_seed(0)
    docs = Documents(layout, sizes, causal, half, generator, ARRANGEMENTS[arranged])
    assert_agrees(hopper, docs, heads, top_k, True, False, DEVICE, rounds=True, size=512, rope=64, scale=SCALE)


def arguments(half: torch.dtype, tokens: int, keys: int, top_k: int) -> dict[str, Any]:
    """Return the arguments of a backward pass with 64 heads."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(DEVICE, half)

    highest, total = (torch.full((1, 1, tokens, 64), value, device=DEVICE) for value in (3.0, 50.0))
    indices = torch.rand(1, tokens, 1, keys, generator=generator).argsort(-1)[..., :top_k].int().to(DEVICE)
    return {
        **{name: random(tokens, 64, 512) for name in ("query", "out", "d_out")},
        **{"query_rope": random(tokens, 64, 64), "key": random(keys, 1, 512), "key_rope": random(keys, 1, 64)},
        **{"value": None, "sparse_indices": indices, "softmax_max": highest, "softmax_sum": total},
        **{"scale_value": SCALE, "actual_seq_qlen": None, "actual_seq_kvlen": None},
        **{"layout": "BSND", "sparse_mode": 0},
    }


@pytest.mark.slow
def test_deterministic_gradients_are_bit_identical(half: torch.dtype) -> None:
    given = arguments(half, 40, 200, 128)
    run = simulated(gluon_grad, "npu_sparse_flash_attention_grad") if DEVICE == "cpu" else None
    run = run or gluon_grad.npu_sparse_flash_attention_grad
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(**given) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


FENCE = "fence_async_shared()\n            "
WAIT, RELEASE = "dq, dq_rope = warpgroup_mma_wait(1, deps=[dq, dq_rope])", "mbarrier.arrive(free_1)"
FAULTS = {
    "the first half of the keys without a fence": (f"{FENCE}mbarrier.arrive(full_0)", "mbarrier.arrive(full_0)"),
    "the second half of the keys without a fence": (f"{FENCE}mbarrier.arrive(full_1)", "mbarrier.arrive(full_1)"),
    "the softmax without a fence": (f"{FENCE}mbarrier.arrive(passed_full)", "mbarrier.arrive(passed_full)"),
    "queries overwritten": ("mbarrier.wait(queries_free, (filled & 1) ^ 1)", "pass"),
    "the softmax overwritten": ("mbarrier.wait(passed_free, phase ^ 1)", "pass"),
    "keys that have not arrived": ("mbarrier.wait(full_1, phase)", "pass"),
    "keys released before the product": (f"{WAIT}\n            {RELEASE}", f"{RELEASE}\n            {WAIT}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_detects(fault: str, half: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing wait or fence in the kernel is an error of the simulator."""
    before, after = FAULTS[fault]
    source = Path(gluon_grad_kernel.__file__).read_text()
    assert source.count(before) == 1
    module = module_of(source.replace(before, after), tmp_path)
    monkeypatch.setattr(gluon_simulator, "PATIENCE", 0.5)
    name = "npu_sparse_flash_attention_grad"

    def run(seed: int) -> str:
        kernel = gluon_simulator.Kernel(module, "add_gradients", seed)
        simulated(gluon_grad, name, add_gradients=kernel)(**arguments(half, 5, 140, 128))
        return ""

    find_fault(run, "changed|fence")


@pytest.mark.parametrize(
    ("heads", "top_k", "value", "suits"),
    [
        (128, 2048, False, True),
        (16, 64, False, True),
        (128, 100, False, False),
        (256, 64, False, True),
        (16, 64, True, False),
    ],
)
def test_choice_of_the_kernel(heads: int, top_k: int, value: bool, suits: bool) -> None:
    query, key = (torch.zeros(1, 2, n, 512, dtype=torch.bfloat16) for n in (heads, 1))
    rope, indices = torch.zeros(1, 2, heads, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 1, top_k, dtype=torch.int32)
    kernel = KERNELS["npu_sparse_flash_attention_grad"][0]
    call = {"query": query, "key": key, "value": key if value else None, "query_rope": rope, "sparse_indices": indices}
    assert kernel.hopper and kernel.suits(**call) == suits
