"""The Gluon kernel of sparse attention, on a Hopper GPU or else in a simulator, against the float64 oracle."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._helpers.error_budget import assert_within, rounding_budget, unit_roundoff
from tests._helpers.sparse_attention_check import assert_agrees
from tests._helpers.sparse_oracle import Attention
from tests.gpu_kernels import gluon_simulator
from tests.gpu_kernels.gluon_simulator import find_fault, on_hopper, simulated, with_fault
from tests.gpu_kernels.kernel_checks import DEVICE, docs_of
from torchtitan_npu.gpu_kernels.sparse_flash_attention import gluon
from torchtitan_npu.ops import OPS, define
from torchtitan_npu.ops.sparse_flash_attention import reference

ROOT = Path(__file__).parents[2]
TWO_PROGRAMS = 228 * 1024 // 2 - 1024
"""Bytes of shared memory that each of two programs on a Hopper multiprocessor may use."""
SCALE = (512 + 64) ** -0.5
CASES = {
    "one key": ("BSND", [(1, 1)], True, (64, 1), 1, "contiguous"),
    "rows of one to three blocks, causal": ("BSND", [(3, 129)] * 2, True, (64, 1), 129, "contiguous"),
    "packed documents, one without queries": ("TND", [(2, 70), (0, 2), (2, 7)], True, (128, 1), 150, "head by head"),
    "rows that see no key": ("TND", [(3, 2), (1, 2)], True, (16, 1), 4, "contiguous"),
    "two key heads, heads that do not fill a tile": ("BSND", [(2, 66)], False, (144, 2), 65, "tokens first"),
    "more entries than keys": ("BSND", [(2, 3)], False, (32, 1), 300, "strided"),
    "five blocks": ("BSND", [(1, 300)], False, (64, 1), 320, "contiguous"),
    "two queries in a tile, rows that see no key": ("TND", [(5, 2), (3, 150)], True, (32, 1), 150, "contiguous"),
    "four queries in a tile, of two documents": ("TND", [(3, 70), (5, 40)], True, (16, 1), 48, "contiguous"),
    "four queries in a tile, some of padding": ("BSND", [(4, 150), (2, 7)], True, (12, 1), 100, "tokens first"),
    "eight queries in a tile": ("BSND", [(8, 200)] * 2, False, (8, 1), 96, "head by head"),
    "queries that tiles do not divide": ("BSND", [(3, 70)] * 2, True, (16, 1), 64, "contiguous"),
}


@pytest.fixture(scope="module")
def hopper() -> Any:
    """Return a namespace of operators in which the forward pass is the Gluon kernel."""
    run = on_hopper(gluon, "npu_sparse_flash_attention")
    forward, grad = (OPS[f"npu_sparse_flash_attention{suffix}"] for suffix in ("", "_grad"))
    define("hopper_kernels", [dataclasses.replace(forward, reference=run), grad])
    return torch.ops.hopper_kernels


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_agrees_with_the_oracle(hopper: Any, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == torch.bfloat16:  # as in the simulator: several tiles per program
        monkeypatch.setattr(gluon, "multiprocessors", lambda _: 3)
    layout, sizes, causal, heads, top_k, arranged = CASES[case]
    docs = docs_of(layout, sizes, dtype, causal, arranged)
    assert_agrees(hopper, docs, heads, top_k, True, False, DEVICE, rounds=True, size=512, rope=64, scale=SCALE)


@pytest.mark.parametrize("scale", [3.0, -3.0])
def test_exponentials_far_apart(hopper: Any, scale: float) -> None:
    """The highest scores of a row's blocks differ by hundreds, so that the origin moves in both consumers."""
    docs = docs_of("BSND", [(2, 260)], torch.bfloat16, causal=False)
    assert_agrees(hopper, docs, (64, 1), 260, True, False, DEVICE, rounds=True, size=512, rope=64, scale=scale)


def inputs(rows: int, keys: int, heads: int = 64) -> dict[str, Any]:
    """Return the arguments of rows that select all ``keys`` in order."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(1, *shape, generator=generator).to(DEVICE, torch.bfloat16)

    indices = torch.arange(keys, dtype=torch.int32, device=DEVICE).expand(1, rows, 1, keys).contiguous()
    return {
        **{"query": random(rows, heads, 512), "key": random(keys, 1, 512), "value": None, "sparse_indices": indices},
        **{"query_rope": random(rows, heads, 64), "key_rope": random(keys, 1, 64), "scale_value": SCALE},
        **{"sparse_mode": 0, "attention_mode": 2, "return_softmax_lse": True},
    }


def test_entries_without_a_key_are_ignored(hopper: Any) -> None:
    """-1 may be anywhere: in the first block, between keys, and in all entries of a block."""
    call = inputs(2, 60)
    spread = torch.full((1, 2, 1, 300), -1, dtype=torch.int32, device=DEVICE)
    spread[..., 5:35], spread[..., 200:230] = call["sparse_indices"][..., :30], call["sparse_indices"][..., 30:]
    results = hopper.npu_sparse_flash_attention(**call | {"sparse_indices": spread})
    query, key = (torch.cat([call[name], call[f"{name}_rope"]], -1)[0].cpu() for name in ("query", "key"))
    u, rounded = unit_roundoff(torch.float32), unit_roundoff(torch.bfloat16)
    oracle = Attention(query, key, torch.ones(2, 1, 60, dtype=torch.bool), SCALE, u, rounded)
    expected, budget = oracle.output(call["key"][0].cpu())
    out, maximum, total = (result[0].cpu() for result in results)
    assert_within("out", out, expected, budget + rounding_budget(expected, torch.bfloat16))
    assert_within("max", maximum.transpose(0, 1), oracle.max, oracle.max_error)
    assert_within("sum", total.transpose(0, 1), oracle.sum, oracle.sum_error)


def test_equal_values_average_to_themselves(hopper: Any) -> None:
    call = inputs(1, 100)
    call["key"] = call["key"][:, :1].expand(1, 100, 1, 512).contiguous()
    out, _, _ = hopper.npu_sparse_flash_attention(**call)
    assert torch.equal(out, call["key"][:, :1].expand_as(out))


@pytest.mark.parametrize("heads", [64, 16], ids=["", "two queries in a tile"])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite(hopper: Any, number: float, heads: int) -> None:
    """The row and the heads that the reference makes NaN are NaN, and no others."""
    call = inputs(2, 100, heads)
    call["query"][0, 0, 3, 5] = number
    call["key_rope"][0, 70, 0, 1] = number
    call["sparse_indices"][0, 1, 0, 70] = 99  # the second row does not select that key
    call["sparse_indices"][0, 1, 0, 99] = -1
    out, highest, total = hopper.npu_sparse_flash_attention(**call)
    floats = ("query", "key", "query_rope", "key_rope")
    in_full = call | {name: call[name].float() for name in floats}
    defaults = {"actual_seq_lengths_query": None, "actual_seq_lengths_kv": None, "layout_query": "BSND"}
    expected, _, sums = reference.npu_sparse_flash_attention(**in_full, **defaults)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(total.isnan(), sums.isnan())
    assert not highest[0, 0, 1].isnan().any()


def test_results_are_bit_identical_in_every_run(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "multiprocessors", lambda _: 3)
    call = inputs(5, 200, heads=128)
    first, second = (hopper.npu_sparse_flash_attention(**call) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_rows_that_are_not_aligned_are_copied(hopper: Any) -> None:
    call = inputs(2, 70)
    expected = hopper.npu_sparse_flash_attention(**call)[0]
    for name in ("query", "key", "query_rope", "key_rope"):
        tensor = call[name]
        shifted = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=DEVICE)[1:].view(tensor.shape)
        call[name] = shifted.copy_(tensor)
    assert torch.equal(hopper.npu_sparse_flash_attention(**call)[0], expected)


LAST_WAIT = "    total, rounded = warpgroup_mma_wait(0, deps=[total, rounded])\n"
RELEASE = "    mbarrier.arrive(local_free.index(W))\n"
COPIED = "    mbarrier.wait(local_full.index(W), phase)\n"
STORES = "    k_rope.index(W).store(weights)\n    origins.index(W).store(new_origin)\n"
PUBLISH = "    mbarrier.arrive(published.index(W))\n"
FAULTS = {
    "scores before the keys arrive": ("    mbarrier.wait(rest_full.index(W), phase)\n", "", "changed|fence"),
    "keys released before the product": (f"{LAST_WAIT}{RELEASE}", f"{RELEASE}{LAST_WAIT}", "changed|fence"),
    "a copy without a fence": (f"{COPIED}    fence_async_shared()\n", COPIED, "fence"),
    "exponentials before they are published": ("    mbarrier.wait(published.index(1 - W), count & 1)\n", "", "differ"),
    "exponentials published before they are stored": (f"{STORES}{PUBLISH}", f"{PUBLISH}{STORES}", "differ"),
    "keys overwritten": ("    mbarrier.wait(rest_free.index(SLOT), free)\n", "", "changed|differ"),
    "a result in flight": ("    scores = warpgroup_mma_wait(0, deps=[scores])\n", "", "before warpgroup_mma_wait"),
    "keys never released": (RELEASE, "", "not reached"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_simulator_detects(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing wait, fence or arrival in the kernel is an error of the simulator, or changes the results."""
    before, after, error = FAULTS[fault]
    module = with_fault(gluon, before, after, tmp_path)
    lengths = {"actual_seq_lengths_query": None, "actual_seq_lengths_kv": None, "layout_query": "BSND"}
    expected = simulated(gluon, "npu_sparse_flash_attention")(**inputs(1, 600), **lengths)
    monkeypatch.setattr(gluon_simulator, "PATIENCE", 0.5)

    def run(seed: int) -> str:
        results = simulated(module, "npu_sparse_flash_attention", seed)(**inputs(1, 600), **lengths)
        return "" if all(map(torch.equal, results, expected)) else "the results differ"

    find_fault(run, error)


SPILLS = {
    "sparse_flash_attention.gluon._attend": 64,
    "lightning_indexer.gluon_grad._gradients": 16,
    "sparse_flash_attention.gluon_grad_kernel.add_gradients": 64,
}
"""Bytes that a kernel may spill. Most are spilled and loaded once per block of keys or less often."""


def test_compiled_for_hopper_with_few_spills(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    printed = subprocess.run(
        [sys.executable, ROOT / "tools/kernel_memory.py", "90", "--gluon"],
        env=environment | {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    kernels = {
        "gluon._attend": ("64 heads of 4 queries", "128 heads"),
        "gluon_grad_kernel.add_gradients": tuple(
            f"{heads}{order}" for heads in ("64 heads of 4 queries", "128 heads") for order in ("", ", in order")
        ),
    }
    compiled = {f"sparse_flash_attention.{kernel}, {heads}" for kernel, tiles in kernels.items() for heads in tiles}
    compiled |= {"indexer_kl_loss.gluon._distributions", "lightning_indexer.gluon_pairs._plan_pairs"}
    compiled |= {
        f"lightning_indexer.{name}" for name in ("gluon._score", "gluon_top_k._select", "gluon_grad._gradients")
    }
    assert "does not fit" not in printed
    reports = re.findall(r"^(\w+\..*)\nptxas(?:.*\n)*?.* (\d+) bytes spill stores", printed, re.MULTILINE)
    sizes = {name: int(size) for size, name in re.findall(r"^ +(\d+) (.+)$", printed, re.MULTILINE)}
    assert sizes["lightning_indexer.gluon_grad._gradients"] <= TWO_PROGRAMS
    spills = {kernel: int(size) for kernel, size in reports}
    assert spills.keys() >= compiled
    assert all(size <= SPILLS.get(name.partition(",")[0], 0) for name, size in spills.items())
    assert "before its warp groups start" not in printed
    assert "serialized" not in printed  # ptxas would wait for each product
    assert "injected" not in printed  # ptxas adds a wait if it cannot tell that a register is not in flight
