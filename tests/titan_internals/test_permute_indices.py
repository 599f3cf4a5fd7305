"""TorchTitan's MoE imports Triton; its replacement computes the same indices."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch
import torchtitan
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_npu.titan_internals.permute_indices import generate_permute_indices

KERNELS = Path(torchtitan.__file__).parent / "models/moe/kernels.py"


def test_torchtitan_imports_triton_with_the_module() -> None:
    """If this fails, TorchTitan imports it lazily, and the workaround can be deleted."""
    assert "\nimport triton\n" in KERNELS.read_text()


@pytest.fixture(scope="module")
def upstream_kernels() -> types.ModuleType:
    """Return TorchTitan's own module. Its CPU branch needs Triton only at import."""
    triton = types.ModuleType("triton")
    triton.jit = lambda fn: fn  # type: ignore[attr-defined]
    triton.language = types.ModuleType("triton.language")  # type: ignore[attr-defined]
    triton.language.constexpr = int
    spec = importlib.util.spec_from_file_location("upstream_moe_kernels", KERNELS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "triton", triton)
        patch.setitem(sys.modules, "triton.language", triton.language)
        spec.loader.exec_module(module)
    return module


@given(st.data())
def test_permute_indices_are_torchtitans(upstream_kernels: types.ModuleType, data: st.DataObject) -> None:
    ranks, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    alignment = data.draw(st.sampled_from([1, 8, 16]))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 20), min_size=ranks * experts, max_size=ranks * experts)))
    max_len = int(counts.sum()) + experts * alignment
    ours = generate_permute_indices(counts, experts, ranks, max_len, alignment)
    theirs = upstream_kernels.generate_permute_indices(counts, experts, ranks, max_len, alignment, use_cpu=True)
    for mine, reference in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=0)
