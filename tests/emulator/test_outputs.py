"""Which arguments an operator writes: the list in prototypes.json, and the check of every kernel in conftest.py."""

from __future__ import annotations

import json

import pytest
import torch

from tests.emulator.checked_kernels import checked
from torchtitan_npu.emulator.build import PROTOTYPES
from torchtitan_npu.emulator.kernels.registry import KERNELS

TABLE = json.loads(PROTOTYPES.read_text())
WITHOUT_OUTPUT = {"aclnnSleep"}


def test_outputs_are_tensors() -> None:
    for name, entry in TABLE.items():
        types = dict(zip(entry["arguments"], entry["types"], strict=True))
        assert all(types[output] in "tTo" for output in entry["outputs"]), name
        assert entry["outputs"] or name in WITHOUT_OUTPUT, name


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("aclnnAdd", ["out"]),
        ("aclnnInplaceMul", ["selfRef"]),
        ("aclnnSoftmaxBackward", ["out"]),  # output and gradOutput are inputs
        ("aclnnTanhBackward", ["gradInput"]),
        ("aclnnEmbedding", ["out"]),  # const in its header
        ("aclnnGroupedMatmulV2", ["y"]),
        ("aclnnApplyAdamWV2", ["varRef", "mRef", "vRef", "maxGradNormOptionalRef"]),
        ("aclnnSparseFlashAttention", ["attentionOut", "softmaxMax", "softmaxSum"]),
        ("aclnnSparseLightningIndexerGradKLLoss", ["dQueryIndex", "dKeyIndex", "dWeights", "loss"]),
    ],
)
def test_outputs_of(name: str, outputs: list[str]) -> None:
    assert TABLE[name]["outputs"] == outputs


def test_a_kernel_that_writes_an_input_is_found() -> None:
    left, right, out = torch.zeros(2), torch.ones(2), torch.zeros(2)
    KERNELS["aclnnMul"](left, right, out)
    KERNELS["aclnnMul"](left, right, left)  # in place
    before = KERNELS["aclnnMul"]

    def wrong(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        right.zero_()

    with pytest.raises(AssertionError, match="aclnnMul writes other, which"):
        checked("aclnnMul", wrong, TABLE["aclnnMul"]["arguments"], [False, False, True])(left, right, out)
    assert KERNELS["aclnnMul"] is before
