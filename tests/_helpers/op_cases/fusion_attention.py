"""Calls of fused attention and its gradient."""

from __future__ import annotations

from typing import Any

import torch

from tests._helpers.op_cases import Arguments, Case, Shape, bf16, fp16, fp32

Shapes = tuple[Shape, Shape, Shape]
BSND: Shapes = ((2, 6, 4, 8), (2, 5, 2, 8), (2, 5, 2, 8))
BNSD: Shapes = ((2, 4, 6, 8), (2, 2, 5, 8), (2, 2, 5, 8))
BSH: Shapes = ((2, 6, 32), (2, 5, 16), (2, 5, 12))
SBH: Shapes = ((6, 2, 32), (5, 2, 16), (5, 2, 12))
TND: Shapes = ((6, 4, 8), (5, 2, 8), (5, 2, 4))
ENDS = {"actual_seq_qlen": [2, 6], "actual_seq_kvlen": [2, 5]}


def attention(
    layout: str,
    shapes: Shapes,
    head_num: int = 4,
    dtype: torch.dtype = bf16,
    mask: Shape | None = None,
    mask_dtype: torch.dtype = torch.bool,
    **keywords: Any,
) -> Arguments:
    """Return a call. ``mask`` is a shape."""

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
        kwargs = dict(keywords)
        if mask is not None:
            kwargs["atten_mask"] = torch.ones(mask, dtype=mask_dtype, device=device).triu(1)
        return (*tensors, head_num, layout), kwargs

    return arguments


def strided(layout: str) -> Arguments:
    """Return a call with BNSD as views of BSND, or the reverse."""

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        shapes = BNSD if layout == "BSND" else BSND
        tensors = (torch.randn(shape, dtype=bf16, device=device).transpose(1, 2) for shape in shapes)
        return (*tensors, 4, layout), {}

    return arguments


def grad(
    layout: str,
    shapes: Shapes,
    output: Shape = (2, 6, 4, 8),
    statistic: Shape = (2, 4, 6, 8),
    dtype: torch.dtype = bf16,
    **keywords: Any,
) -> Arguments:
    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = (torch.randn(shape, dtype=dtype, device=device) for shape in (*shapes, output))
        statistics = {name: torch.ones(statistic, device=device) for name in ("softmax_max", "softmax_sum")}
        attention_in = torch.randn(output, dtype=dtype, device=device)
        return (*tensors, 4, layout), statistics | {"attention_in": attention_in} | keywords

    return arguments


CAUSAL = (2048, 2048)
NAME, GRAD = "npu_fusion_attention", "npu_fusion_attention_grad"

CASES = [
    Case(NAME, "BSND, grouped queries", attention("BSND", BSND)),
    Case(NAME, "BNSD", attention("BNSD", BNSD, scale=0.5)),
    Case(NAME, "BSH, smaller values", attention("BSH", BSH)),
    Case(NAME, "SBH, smaller values", attention("SBH", SBH)),
    Case(NAME, "TND, smaller values", attention("TND", TND, **ENDS)),
    Case(NAME, "TND, statistics in TND", attention("TND", TND, **ENDS, softmax_layout="TND")),
    Case(NAME, "TND, an empty document", attention("TND", TND, actual_seq_qlen=[2, 2, 6], actual_seq_kvlen=[2, 2, 5])),
    Case(NAME, "float32", attention("BSND", BSND, dtype=fp32)),
    Case(NAME, "float16, BNSD", attention("BNSD", BNSD, dtype=fp16)),
    Case(NAME, "strided BSND", strided("BSND")),
    Case(NAME, "strided BNSD", strided("BNSD")),
    Case(NAME, "causal", attention("BSND", BSND, mask=CAUSAL, sparse_mode=2)),
    Case(NAME, "causal, ends aligned", attention("BNSD", BNSD, mask=CAUSAL, sparse_mode=3)),
    Case(NAME, "causal, uint8", attention("BSND", BSND, mask=CAUSAL, mask_dtype=torch.uint8, sparse_mode=2)),
    Case(NAME, "causal, TND", attention("TND", TND, mask=CAUSAL, sparse_mode=3, **ENDS)),
    Case(NAME, "mask SS", attention("BSND", BSND, mask=(6, 5))),
    Case(NAME, "mask 11SS", attention("BSND", BSND, mask=(1, 1, 6, 5), sparse_mode=1)),
    Case(NAME, "mask B1SS", attention("BSND", BSND, mask=(2, 1, 6, 5))),
    Case(NAME, "mask BNSS", attention("BSND", BSND, mask=(2, 4, 6, 5))),
    Case(NAME, "mask, TND", attention("TND", TND, mask=(4, 3), **ENDS)),
    Case(NAME, "empty batch", attention("BSND", ((0, 6, 4, 8), (0, 5, 2, 8), (0, 5, 2, 8)))),
    Case(NAME, "unknown layout", attention("BSXD", BSND), "torch_npu"),
    Case(NAME, "two dimensions", attention("BSH", ((6, 32), (5, 32), (5, 32))), "torch_npu"),
    Case(NAME, "no heads", attention("BSND", BSND, head_num=0), "torch_npu"),
    Case(NAME, "keep_prob 0", attention("BSND", BSND, keep_prob=0.0), "torch_npu"),
    Case(NAME, "sparse_mode 9", attention("BSND", BSND, mask=CAUSAL, sparse_mode=9), "torch_npu"),
    Case(NAME, "sparse_mode 5 in TND", attention("TND", TND, mask=CAUSAL, sparse_mode=5, **ENDS), "torch_npu"),
    Case(NAME, "TND without lengths", attention("TND", TND), "torch_npu"),
    Case(NAME, "TND with one length", attention("TND", TND, actual_seq_qlen=[2, 6]), "torch_npu"),
    Case(NAME, "softmax_layout NTD", attention("BSND", BSND, softmax_layout="NTD"), "torch_npu"),
    Case(NAME, "softmax_layout TND in BSND", attention("BSND", BSND, softmax_layout="TND"), "torch_npu"),
    Case(NAME, "lower case", attention("bsnd", BSND), "us"),
    Case(NAME, "dropout", attention("BSND", BSND, keep_prob=0.9), "us"),
    Case(NAME, "wrong head_num", attention("BSND", BSND, head_num=2), "us"),
    Case(NAME, "key heads do not divide", attention("BSND", (BSND[0], (2, 5, 3, 8), (2, 5, 3, 8))), "us"),
    Case(NAME, "head sizes differ", attention("BSND", (BSND[0], (2, 5, 2, 7), (2, 5, 2, 7))), "us"),
    Case(NAME, "larger values", attention("BSND", (BSND[0], BSND[1], (2, 5, 2, 9))), "us"),
    Case(NAME, "batches differ", attention("BSND", (BSND[0], (1, 5, 2, 8), (1, 5, 2, 8))), "us"),
    Case(NAME, "causal without a mask", attention("BSND", BSND, sparse_mode=2), "us"),
    Case(NAME, "causal with a mask of the scores' size", attention("BSND", BSND, mask=(6, 5), sparse_mode=2), "us"),
    Case(NAME, "float mask", attention("BSND", BSND, mask=(6, 5), mask_dtype=fp32), "us"),
    Case(NAME, "band", attention("BSND", BSND, mask=CAUSAL, sparse_mode=4), "us"),
    Case(NAME, "lengths that do not fit", attention("TND", TND, actual_seq_qlen=[2, 5], actual_seq_kvlen=[2, 5]), "us"),
    Case(NAME, "lengths in BSND", attention("BSND", BSND, **ENDS), "us"),
    Case(GRAD, "BSND", grad("BSND", BSND)),
    Case(GRAD, "BNSD, float32", grad("BNSD", BNSD, (2, 4, 6, 8), (2, 4, 6, 8), fp32)),
    Case(GRAD, "BSH", grad("BSH", BSH, (2, 6, 24), (2, 4, 6, 8))),
    Case(GRAD, "TND", grad("TND", TND, (6, 4, 4), (6, 4, 8), **ENDS)),
    Case(GRAD, "unknown layout", grad("BSXD", BSND), "torch_npu"),
    Case(GRAD, "keep_prob 2", grad("BSND", BSND, keep_prob=2.0), "torch_npu"),
    Case(GRAD, "statistics of the wrong shape", grad("BSND", BSND, (2, 6, 4, 8), (2, 6, 4, 8)), "us"),
    Case(GRAD, "dy of the wrong shape", grad("BSND", BSND, (2, 6, 4, 7), (2, 4, 6, 8)), "us"),
    Case(GRAD, "no statistics", grad("BSND", BSND, softmax_max=None), "us"),
]
