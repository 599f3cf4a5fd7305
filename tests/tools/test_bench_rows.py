"""The benchmarks of the kernels, run through on the CPU at small sizes: nothing is timed, all is computed."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "bench"))

import basic_kernels
import expert_kernels
import gpu_timing
import indexer_kernels
import op_rows
import sparse_attention
import token_kernels

from torchtitan_npu.ops.grouped_matmul import triton as grouped_matmul

MACHINE = gpu_timing.Machine(copy_rate=1e9, matmul_rate=1e12)
LENGTH = 40


class OnCpu(TorchFunctionMode):
    """What is made on a GPU is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What was computed where a time would be taken, a dictionary by name for each table row or group of rows."""
    kept: list[dict[str, Any]] = []

    def computed(builds: dict[str, Any], budget_ms: float = 0) -> dict[str, float]:
        kept.append({name: build()() for name, build in builds.items()})
        return dict.fromkeys(builds, 1.0)

    monkeypatch.setattr(gpu_timing, "device_ms", computed)
    monkeypatch.setattr(gpu_timing, "_peak_bytes", lambda run: 0)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    torch.manual_seed(0)
    with OnCpu():
        yield kept


def first(result: Any) -> Tensor:
    """Of several outputs the first; the others are not the same for all ways."""
    return result[0] if isinstance(result, tuple) else result


def assert_close(one: Tensor, other: Tensor) -> None:
    """But for what bfloat16 rounds on the way."""
    assert (one.double() - other.double()).norm() < 2e-2 * other.double().norm()


def by_what(rows: list[dict[str, Any]], results: list[dict[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if "failed" not in row]
    return {row["what"]: result[""] for row, result in zip(measured, results, strict=True)}


def test_rows_of_sparse_attention(results: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEADS": 4, "SIZE": 16, "ROPE": 8, "TOP_K": 12, "SHAPES_AT": LENGTH}.items():
        monkeypatch.setattr(sparse_attention, name, value)
    monkeypatch.setattr(sparse_attention, "SMALL_OPS", (LENGTH,))
    monkeypatch.setattr(sparse_attention, "IN_ORDER", (LENGTH,))
    rows = list(sparse_attention.times(LENGTH, MACHINE))
    got = by_what(rows, results)
    assert list(got) == [
        *("forward", "backward", "backward, in order"),
        *("small ops forward", "small ops backward", "small ops forward, compiled", "small ops backward, compiled"),
        *("forward, 16 heads", "backward, 16 heads", "forward, 2 documents (TND)", "backward, 2 documents (TND)"),
        *("forward, head by head", "backward, head by head"),
        *("forward, scores far apart", "backward, scores far apart"),
    ]
    assert [row["length"] for row in rows] == [LENGTH] * 9 + [2 * LENGTH] * 2 + [LENGTH] * 4
    assert all(row["limit_ms"] > 0 and row["tflops"] > 0 for row in rows if "small" not in row["what"])
    assert_close(got["forward"][0], got["small ops forward"])
    assert len(got["backward"]) == len(got["small ops backward"]) == 4
    assert not torch.are_deterministic_algorithms_enabled()


def test_rows_of_the_indexer(results: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"HEADS": 2, "SIZE": 16, "TOP_K": 12, "SMALL_OPS": LENGTH}.items():
        monkeypatch.setattr(indexer_kernels, name, value)
    monkeypatch.setattr(indexer_kernels.indexer, "__defaults__", (12, False))
    monkeypatch.setattr(indexer_kernels.pairs, "__defaults__", (12,))
    monkeypatch.setattr(indexer_kernels, "ATTENTION", {"heads": 4, "size": 16, "rope": 8})
    for name in ("LENGTHS", "PEER_LENGTHS", "LOSS_LENGTHS"):
        monkeypatch.setattr(indexer_kernels, name, (LENGTH,))
    ops = {name: dataclasses.replace(op, cuda=op.reference) for name, op in indexer_kernels.OPS.items()}
    monkeypatch.setattr(indexer_kernels, "OPS", ops)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "attn_gym", None)

    rows = list(indexer_kernels.indexer_rows(MACHINE))
    peer = rows.pop()
    assert peer["what"] == "attn_gym" and "attn_gym" in peer["failed"]  # it is not there, and the others are measured
    got = by_what(rows, results)
    assert list(got) == ["indexer", "indexer with scores", "small ops"]
    ours, small = got["indexer"][0][0, -1, 0].tolist(), got["small ops"][0, -1].tolist()
    assert len(ours) == len(small) == 12 and len({*ours} & {*small}) >= 10  # scores in bfloat16 are close

    results.clear()
    rows = list(indexer_kernels.loss_rows(MACHINE))
    got = by_what(rows, results)
    loss, gradients = "loss and gradients", "gradients"
    small = [f"{what}, small ops{how}" for what in (loss, gradients) for how in ("", ", compiled")]
    assert list(got) == [loss, *small, gradients, "gradients, in order"]
    for one, other in zip(got["gradients, small ops"], got["gradients"], strict=True):
        assert_close(one, other)


def group_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """As torch._grouped_mm: groups of rows with a matrix each, or of what is summed over."""
    bounds = list(itertools.pairwise([0, *ends.tolist()]))
    a, b, dtype = a.float(), b.float(), a.dtype
    if b.dim() == 3:
        return torch.cat([a[start:end] @ b[group] for group, (start, end) in enumerate(bounds)]).to(dtype)
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in bounds]).to(dtype)


def rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return tuple(token_kernels.textbook(x, cos[:, None], sin[:, None], "half") for x in (query, key))


PEERS: dict[str, dict[str, Any]] = {
    "rms_norm": {"LigerRMSNormFunction": lambda x, gamma, *_: F.rms_norm(x, x.shape[-1:], gamma, 1e-6)},
    "swiglu": {"LigerFusedGateUpSiLUMulFunction": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]},
    "rope": {"LigerRopeFunction": rope},
}
"""What Liger's functions compute, by their module."""


def test_rows_of_the_other_operators(results: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (token_kernels, expert_kernels):
        for name, value in {"TOKENS": 32, "HIDDEN": 64, "TOP_K": 4, "EXPERT_HIDDEN": 32}.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(expert_kernels.choices, "__defaults__", (4,))
    for name, functions in PEERS.items():
        classes = {name: SimpleNamespace(apply=function) for name, function in functions.items()}
        monkeypatch.setitem(sys.modules, f"liger_kernel.ops.{name}", SimpleNamespace(**classes))  # type: ignore[arg-type]
    monkeypatch.setattr(torch, "_grouped_mm", lambda a, b, offs: group_product(a, b, offs))
    monkeypatch.setattr(grouped_matmul, "rows_product", group_product)
    monkeypatch.setattr(grouped_matmul, "sums_product", group_product)
    rows = [row for op in basic_kernels.OPS.values() for row in op(MACHINE)]

    def both(name: str) -> list[str]:
        return [f"{name} forward", f"{name} backward"]

    products = ["grouped_matmul forward", "grouped_matmul dX", "grouped_matmul dW", "grouped_matmul_add"]
    assert [row.op for row in rows] == [
        *([*both("rms_norm"), "rms_norm backward, operator"] * 2),
        "add_rms_norm forward",
        *(*both("permute"), *both("unpermute"), *both("unpermute without scores")),
        "re_routing forward",
        *(*both("swiglu"), *both("rotary"), *both("rotary"), "apply_rotary_pos_emb forward"),
        *(products * 3),
    ]
    for ways in results:
        for name, result in ways.items():
            if not name.startswith("Liger"):  # it is not here
                assert_close(first(result), first(ways["ours"]))
    # rows, their gradients, and the sum of 64 experts in float32, which is read and written
    assert rows[-1].limit == pytest.approx((128 * (64 + 32) * 2 + 64 * 32 * 64 * 4 * 2) / MACHINE.copy_rate * 1e3)
    assert op_rows.best_peer({"Triton": 1.0, "Liger": 2.0}) == ("Liger", 2.0)
