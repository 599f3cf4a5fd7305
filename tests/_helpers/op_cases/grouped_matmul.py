"""Calls of the grouped matrix products."""

from __future__ import annotations

from typing import Any

import torch

from tests._helpers.op_cases import Arguments, Case, Shape, bf16, fp16, fp32, int32, int64


def gmm(
    x: Shape = (16, 8),
    weight: Shape = (4, 8, 6),
    groups: Shape = (4,),
    dtype: torch.dtype = bf16,
    index: torch.dtype = int64,
    transposed: str = "",
    bias: Shape | None = None,
    bias_dtype: torch.dtype = fp32,
    **keywords: Any,
) -> Arguments:
    """``transposed`` names the tensors that are transposed views: ``"x"``, ``"weight"``."""

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def make(name: str, shape: Shape) -> torch.Tensor:
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


def lists(*shapes: tuple[Shape, Shape], bias: bool = False, **keywords: Any) -> Arguments:
    """Return a call without groups: a product for each pair of shapes."""

    def arguments(device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, weight = ([torch.randn(pair[i], device=device) for pair in shapes] for i in range(2))
        kwargs = {"split_item": 0, "group_type": -1} | keywords
        if bias:
            kwargs["bias"] = [torch.randn(one.shape[1], device=device) for one in weight]
        return (x, weight), kwargs

    return arguments


def add(
    input: Shape = (4, 8, 6),
    x: Shape = (16, 8),
    weight: Shape = (16, 6),
    dtype: torch.dtype = bf16,
    accumulator: torch.dtype = fp32,
    index: torch.dtype = int64,
    **keywords: Any,
) -> Arguments:
    return lambda device: (
        (
            torch.zeros(input, dtype=accumulator, device=device),
            torch.randn(x, dtype=dtype, device=device),
            torch.randn(weight, dtype=dtype, device=device),
            torch.zeros(4, dtype=index, device=device),
        ),
        keywords,
    )


GMM, ADD = "npu_grouped_matmul", "npu_grouped_matmul_add_"
K = {"x": (8, 16), "weight": (16, 6), "group_type": 2}

CASES = [
    Case(GMM, "rows by sizes, bf16", gmm()),
    Case(GMM, "rows by ends, float16", gmm(group_list_type=0, dtype=fp16)),
    Case(GMM, "rows, float32", gmm(dtype=fp32)),
    Case(GMM, "rows, split_item 2", gmm(split_item=2)),
    Case(GMM, "rows, transposed weight", gmm(transposed="weight")),
    Case(GMM, "rows, no tokens", gmm(x=(0, 8))),
    Case(GMM, "rows, one group", gmm(weight=(1, 8, 6), groups=(1,), group_list_type=0)),
    Case(GMM, "rows, bias", gmm(bias=(4, 6))),
    Case(GMM, "rows, float16 bias", gmm(bias=(4, 6), bias_dtype=fp16, dtype=fp16)),
    Case(GMM, "summed dimension by sizes", gmm(**K, transposed="x")),
    Case(GMM, "summed dimension by ends", gmm(**K, transposed="x", group_list_type=0)),
    Case(GMM, "summed dimension, float32", gmm(**K, transposed="x", dtype=fp32)),
    Case(GMM, "summed dimension, no tokens", gmm((8, 0), (0, 6), transposed="x", group_type=2)),
    Case(GMM, "no groups", lists(((3, 8), (8, 6)), ((5, 4), (4, 2)))),
    Case(GMM, "no groups, bias", lists(((3, 8), (8, 6)), ((5, 4), (4, 2)), bias=True)),
    Case(GMM, "no groups, more dimensions", lists(((2, 3, 8), (8, 6)), ((2, 4, 4), (4, 2)))),
    Case(GMM, "no groups, more and fewer dimensions", lists(((2, 3, 8), (8, 6)), ((5, 4), (4, 2)))),
    Case(GMM, "no groups, one product", lists(((2, 3, 8), (8, 6)))),
    Case(GMM, "groups of columns", gmm(group_type=1), "torch_npu"),
    Case(GMM, "no group_type", gmm(group_type=None), "torch_npu"),
    Case(GMM, "empty lists", lists(), "torch_npu"),
    Case(GMM, "no groups, split_item 1", lists(((3, 8), (8, 6)), split_item=1), "torch_npu"),
    Case(GMM, "K mismatch", gmm(x=(16, 7)), "us"),
    Case(GMM, "mismatch in the summed dimension", gmm((8, 15), (16, 6), group_type=2), "us"),
    Case(GMM, "int32 group_list", gmm(index=int32), "us"),
    Case(GMM, "group_list too short", gmm(groups=(3,)), "us"),
    Case(GMM, "group_list of pairs", gmm(groups=(4, 2)), "us"),
    Case(GMM, "no group_list", gmm(group_list=None), "us"),
    Case(GMM, "group_list_type 2", gmm(group_list_type=2), "us"),
    Case(GMM, "split_item 0 with groups", gmm(split_item=0), "us"),
    Case(GMM, "bias of the wrong shape", gmm(bias=(6,)), "us"),
    Case(GMM, "bias with group_type 2", gmm(**K, bias=(4, 6)), "us"),
    Case(GMM, "activation", gmm(act_type=1), "us"),
    Case(ADD, "by ends", add()),
    Case(ADD, "by sizes, float16", add(group_list_type=1, dtype=fp16)),
    Case(ADD, "no tokens", add(x=(0, 8), weight=(0, 6))),
    Case(ADD, "group_type 0", add(group_type=0), "torch_npu"),
    Case(ADD, "x not transposed", add(transpose_x=False), "us"),
    Case(ADD, "bf16 accumulator", add(accumulator=bf16), "us"),
    Case(ADD, "input of the wrong shape", add(input=(4, 8, 7)), "us"),
    Case(ADD, "int32 group_list", add(index=int32), "us"),
]
