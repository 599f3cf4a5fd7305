"""Calls of the grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch

from tests._helpers.op_cases import Case


def gmm(  # type: ignore[no-untyped-def]
    x: tuple[int, ...] = (16, 8),
    weight: tuple[int, ...] = (4, 8, 6),
    groups: tuple[int, ...] = (4,),
    dtype: torch.dtype = torch.bfloat16,
    index: torch.dtype = torch.int64,
    transposed: str = "",
    bias: tuple[int, ...] | None = None,
    bias_dtype: torch.dtype = torch.float32,
    **keywords: Any,
):
    """``transposed`` names the tensors that are transposed views: ``"x"``, ``"weight"``."""

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            if name in transposed:
                return torch.randn(*shape[:-2], shape[-1], shape[-2], dtype=dtype, device=device).mT
            return torch.randn(shape, dtype=dtype, device=device)

        kwargs = {"split_item": 3, "group_type": 0, "group_list_type": 1} | keywords
        if kwargs["group_type"] != -1 and "group_list" not in kwargs:
            kwargs["group_list"] = torch.zeros(groups, dtype=index, device=device)
        if bias is not None:
            kwargs["bias"] = [torch.randn(bias, dtype=bias_dtype, device=device)]
        return ([make("x", x)], [make("weight", weight)]), kwargs

    return arguments


def lists(  # type: ignore[no-untyped-def]
    *shapes: tuple[tuple[int, ...], tuple[int, ...]], bias: bool = False, **keywords: Any
):
    """Return a call without groups: a product for each pair of shapes."""

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight = ([torch.randn(pair[i], device=device) for pair in shapes] for i in range(2))
        kwargs = {"split_item": 0, "group_type": -1} | keywords
        if bias:
            kwargs["bias"] = [torch.randn(one.shape[1], device=device) for one in weight]
        return (x, weight), kwargs

    return arguments


def add(  # type: ignore[no-untyped-def]
    input: tuple[int, ...] = (4, 8, 6),
    x: tuple[int, ...] = (16, 8),
    weight: tuple[int, ...] = (16, 6),
    dtype: torch.dtype = torch.bfloat16,
    accumulator: torch.dtype = torch.float32,
    index: torch.dtype = torch.int64,
    **keywords: Any,
):
    return lambda device: (
        (
            torch.zeros(input, dtype=accumulator, device=device),
            torch.randn(x, dtype=dtype, device=device),
            torch.randn(weight, dtype=dtype, device=device),
            torch.zeros(4, dtype=index, device=device),
        ),
        keywords,
    )


K = {"x": (8, 16), "weight": (16, 6), "group_type": 2}

CASES = [
    Case("npu_grouped_matmul", "rows by sizes, bf16", gmm()),
    Case("npu_grouped_matmul", "rows by ends, float16", gmm(group_list_type=0, dtype=torch.float16)),
    Case("npu_grouped_matmul", "rows, float32", gmm(dtype=torch.float32)),
    Case("npu_grouped_matmul", "rows, split_item 2", gmm(split_item=2)),
    Case("npu_grouped_matmul", "rows, transposed weight", gmm(transposed="weight")),
    Case("npu_grouped_matmul", "rows, no tokens", gmm(x=(0, 8))),
    Case("npu_grouped_matmul", "rows, one group", gmm(weight=(1, 8, 6), groups=(1,), group_list_type=0)),
    Case("npu_grouped_matmul", "rows, bias", gmm(bias=(4, 6))),
    Case("npu_grouped_matmul", "rows, float16 bias", gmm(bias=(4, 6), bias_dtype=torch.float16, dtype=torch.float16)),
    Case("npu_grouped_matmul", "summed dimension by sizes", gmm(**K, transposed="x")),
    Case("npu_grouped_matmul", "summed dimension by ends", gmm(**K, transposed="x", group_list_type=0)),
    Case("npu_grouped_matmul", "summed dimension, float32", gmm(**K, transposed="x", dtype=torch.float32)),
    Case("npu_grouped_matmul", "summed dimension, no tokens", gmm((8, 0), (0, 6), transposed="x", group_type=2)),
    Case("npu_grouped_matmul", "no groups", lists(((3, 8), (8, 6)), ((5, 4), (4, 2)))),
    Case("npu_grouped_matmul", "no groups, bias", lists(((3, 8), (8, 6)), ((5, 4), (4, 2)), bias=True)),
    Case("npu_grouped_matmul", "no groups, more dimensions", lists(((2, 3, 8), (8, 6)), ((2, 4, 4), (4, 2)))),
    Case("npu_grouped_matmul", "no groups, more and fewer dimensions", lists(((2, 3, 8), (8, 6)), ((5, 4), (4, 2)))),
    Case("npu_grouped_matmul", "no groups, one product", lists(((2, 3, 8), (8, 6)))),
    Case("npu_grouped_matmul", "groups of columns", gmm(group_type=1), "torch_npu"),
    Case("npu_grouped_matmul", "no group_type", gmm(group_type=None), "torch_npu"),
    Case("npu_grouped_matmul", "empty lists", lists(), "torch_npu"),
    Case("npu_grouped_matmul", "no groups, split_item 1", lists(((3, 8), (8, 6)), split_item=1), "torch_npu"),
    Case("npu_grouped_matmul", "K mismatch", gmm(x=(16, 7)), "us"),
    Case("npu_grouped_matmul", "mismatch in the summed dimension", gmm((8, 15), (16, 6), group_type=2), "us"),
    Case("npu_grouped_matmul", "int32 group_list", gmm(index=torch.int32), "us"),
    Case("npu_grouped_matmul", "group_list too short", gmm(groups=(3,)), "us"),
    Case("npu_grouped_matmul", "group_list of pairs", gmm(groups=(4, 2)), "us"),
    Case("npu_grouped_matmul", "no group_list", gmm(group_list=None), "us"),
    Case("npu_grouped_matmul", "group_list_type 2", gmm(group_list_type=2), "us"),
    Case("npu_grouped_matmul", "split_item 0 with groups", gmm(split_item=0), "us"),
    Case("npu_grouped_matmul", "bias of the wrong shape", gmm(bias=(6,)), "us"),
    Case("npu_grouped_matmul", "bias with group_type 2", gmm(**K, bias=(4, 6)), "us"),
    Case("npu_grouped_matmul", "activation", gmm(act_type=1), "us"),
    Case("npu_grouped_matmul_add_", "by ends", add()),
    Case("npu_grouped_matmul_add_", "by sizes, float16", add(group_list_type=1, dtype=torch.float16)),
    Case("npu_grouped_matmul_add_", "no tokens", add(x=(0, 8), weight=(0, 6))),
    Case("npu_grouped_matmul_add_", "group_type 0", add(group_type=0), "torch_npu"),
    Case("npu_grouped_matmul_add_", "x not transposed", add(transpose_x=False), "us"),
    Case("npu_grouped_matmul_add_", "bf16 accumulator", add(accumulator=torch.bfloat16), "us"),
    Case("npu_grouped_matmul_add_", "input of the wrong shape", add(input=(4, 8, 7)), "us"),
    Case("npu_grouped_matmul_add_", "int32 group_list", add(index=torch.int32), "us"),
]
