"""The Triton kernels of sparse attention and its gradient, against the float64 oracle."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests._helpers.sparse_attention_check import assert_agrees
from tests.gpu_kernels.kernel_checks import docs_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton as forward
from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton_grad as gradient
from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton_segments as segments

CASES = {
    "documents of a batch, some shorter": ("BSND", [(5, 7), (2, 3)], True, (4, 1), 3, True, False),
    "packed documents, one without queries, two key heads": ("TND", [(3, 4), (0, 2), (2, 7)], True, (6, 2), 9, True, 1),
    "one token": ("BSND", [(1, 1)], True, (1, 1), 1, False, False),
    "rows that see no key": ("TND", [(5, 2), (2, 2)], True, (4, 1), 4, True, False),
    "top-k wider than the sequence": ("BSND", [(3, 4)] * 2, True, (4, 1), 11, False, True),
    "every key is seen": ("BSND", [(3, 6)] * 2, False, (4, 1), 3, True, False),
    "several blocks of keys": ("TND", [(2, 70), (1, 3)], False, (3, 1), 69, True, False),
    "several blocks of few of the keys": ("BSND", [(2, 80)], False, (3, 1), 37, True, False),
    "more heads than a block has": ("BSND", [(1, 5)], False, (130, 1), 5, True, False),
}


@pytest.mark.parametrize("sizes", [[(1, 3)] * 2, [(3, 3)] * 2], ids=["one token each", "several"])
def test_strided_batches(gpu: Any, device: str, half: torch.dtype, sizes: list[tuple[int, int]]) -> None:
    """The sequences of a batch are not contiguous."""
    docs = docs_of("BSND", sizes, half, arranged="tokens first")
    assert_agrees(gpu, docs, (4, 1), 3, True, False, device, rounds=True)


slow = pytest.mark.slow
in_order_is_slow = pytest.mark.parametrize(
    "deterministic", [False, pytest.param(True, marks=slow)], ids=["", "in order"], indirect=True
)
IN_ORDER = ("documents of a batch, some shorter", "packed documents, one without queries, two key heads", "one token")
"""Cases whose deterministic sums belong to the default run."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 and 32 keys, and a workspace of one or two rows, so that small inputs have several of each."""
    for module in (forward, gradient):
        monkeypatch.setattr(module, "WORKSPACE", 2000)
        monkeypatch.setitem(module.SCORES, "BLOCK_KEYS", 32)
    for config in (forward.VALUES, gradient.QUERIES, gradient.KEYS):
        monkeypatch.setitem(config, "BLOCK_KEYS", 16)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize(
    ("case", "deterministic"),
    [
        pytest.param(case, in_order, id=f"{case}{', in order' * in_order}", marks=[slow] * (case not in IN_ORDER))
        if in_order
        else pytest.param(case, False, id=case)
        for case in CASES
        for in_order in (False, True)
    ],
    indirect=["deterministic"],
)
def test_agrees_with_the_oracle(gpu: Any, device: str, half: torch.dtype, case: str, deterministic: bool) -> None:
    layout, sizes, causal, heads, top_k, rope, value = CASES[case]
    dtype, arranged = (torch.float32, "transposed") if deterministic else (half, "head by head")
    docs = docs_of(layout, sizes, dtype, causal, arranged)
    assert_agrees(gpu, docs, heads, top_k, rope, bool(value), device, rounds=True)


def test_default_blocks_and_large_selections(
    gpu: Any, device: str, half: torch.dtype, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Default blocks, more rows per key and more entries than a program takes, and a rope wider than the features."""
    monkeypatch.setattr(segments, "AT_ONCE", 2)
    monkeypatch.setattr(segments, "ENTRIES", 16)
    docs = docs_of("BSND", [(3, 9)] * 2, half)
    assert_agrees(gpu, docs, (4, 1), 5, True, False, device, rounds=True, size=3, rope=20)


@in_order_is_slow
@pytest.mark.parametrize(("heads", "size", "rope", "value"), [((16, 1), 520, 20, True), ((128, 1), 512, 64, False)])
def test_feature_sizes_of_models(
    gpu: Any,
    device: str,
    half: torch.dtype,
    heads: tuple[int, int],
    size: int,
    rope: int,
    value: bool,
    deterministic: bool,
) -> None:
    """Several blocks of columns in every kernel, with a partial last one; and DeepSeek-V3's sizes."""
    docs = docs_of("BSND", [(2, 5)], half)
    assert_agrees(
        gpu, docs, heads, 4, True, value, device, rounds=True, size=size, rope=rope, scale=(size + rope) ** -0.5
    )


@in_order_is_slow
@pytest.mark.usefixtures("small_pieces")
def test_exponentials_far_apart(gpu: Any, device: str, half: torch.dtype, deterministic: bool) -> None:
    """The highest scores of a row's blocks differ by hundreds, so that their exponentials need different origins."""
    docs = docs_of("BSND", [(2, 80)], torch.float32 if deterministic else half, causal=False)
    assert_agrees(gpu, docs, (3, 1), 75, True, False, device, rounds=True, scale=50.0)


@pytest.mark.parametrize("count", [1, 100])
def test_equal_values_average_to_themselves(gpu: Any, device: str, half: torch.dtype, count: int) -> None:
    """Bit-identical, although rounding moves the exponentials of all keys but the first in the same direction."""
    value = (1.99 - 0.001 * torch.arange(8)).to(half)
    rope = torch.full((count,), -1.0, dtype=half)
    rope[0] = 0.25
    key, key_rope, query, query_rope = (
        t.to(device).view(1, -1, 1, t.shape[-1])
        for t in (value.expand(count, 8), rope[:, None], torch.zeros_like(value), torch.ones(1, dtype=half))
    )
    indices = torch.arange(count, dtype=torch.int32, device=device).view(1, 1, 1, count)
    out, _, total = gpu.npu_sparse_flash_attention(
        *(query, key, None, indices, 1.0),
        **{"query_rope": query_rope, "key_rope": key_rope, "sparse_mode": 0},
        **{"attention_mode": 2, "return_softmax_lse": True},
    )
    assert torch.equal(out.flatten().cpu(), value)
    assert total.item() == pytest.approx(1 + (count - 1) * math.exp(-1.25), rel=1e-6)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("border", [60.0, -60.0, 180.0])
def test_exponents_at_the_border_of_two_origins(gpu: Any, device: str, border: float) -> None:
    """The highest exponent of a block is at the border between two origins, or one rounding away from it.

    All blocks of a row are at the border, or some are far away.
    """
    near = torch.tensor([border] * 3)
    near[1:].copy_(torch.nextafter(near[1:], torch.tensor([-torch.inf, torch.inf])))
    for highest in (near, near[:1].expand(3), near[1:2].expand(3), near[2:].expand(3), near - torch.tensor([0, 50, 0])):
        scores = (highest[:, None] - 0.25 * torch.arange(32)).flatten()  # three blocks
        key = torch.stack([scores, *torch.randn(3, 96, generator=torch.Generator().manual_seed(0))], -1)
        query = torch.tensor([1.0, 0.0, 0.0, 0.0])
        out, maximum, total = gpu.npu_sparse_flash_attention(
            *(t.view(1, -1, 1, 4).to(device) for t in (query, key)),
            *(None, torch.arange(96, dtype=torch.int32, device=device).view(1, 1, 1, 96), math.log(2)),
            **{"sparse_mode": 0, "attention_mode": 2, "return_softmax_lse": True},
        )
        exact = scores.double() * math.log(2)
        expected = exact.softmax(0) @ key.double()
        torch.testing.assert_close(out.flatten().double().cpu(), expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(maximum.flatten().double().cpu(), exact.max()[None], rtol=1e-6, atol=0)
        torch.testing.assert_close(
            total.flatten().double().cpu(), (exact - exact.max()).exp().sum()[None], rtol=2e-5, atol=0
        )


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("scale", [0.3, -200.0], ids=["", "far below 0"])
def test_entries_without_a_key_are_ignored(gpu: Any, device: str, scale: float, deterministic: bool) -> None:
    """-1 may be anywhere: 40 of them before the first key, and some between keys. In deterministic mode torch fills
    unwritten memory with NaN."""
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.rand(1, n, h, 4, generator=generator).to(device) for n, h in ((2, 3), (9, 1)))
    compact = torch.tensor([[3, 7, 0, -1], [8, 1, 2, 5]], dtype=torch.int32).view(1, 2, 1, 4)
    spread = torch.full((1, 2, 1, 90), -1, dtype=torch.int32)
    spread[..., [40, 41, 60, 89]] = compact
    results = []
    for indices in (compact, spread):
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key)]
        out, maximum, total = gpu.npu_sparse_flash_attention(
            *leaves, None, indices.to(device), scale, sparse_mode=0, attention_mode=2, return_softmax_lse=True
        )
        results.append([out, maximum, total, *torch.autograd.grad(out.sin().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
