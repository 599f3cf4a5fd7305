#!/usr/bin/env python
"""Sparse attention on a GPU, forward and backward: DeepSeek-V3.2's 128 heads of 512 + 64, the best 2048 keys.

    python tools/bench/sparse_attention.py [--lengths 2048 4096 ...] [--json FILE]

First bfloat16 is compared with float64 on a small sequence. Then one causal sequence of each length is timed, rows of
which selected keys at random among those they may see; rates count the selected pairs only. ``small ops`` attends to
all keys under a mask, as the eager model does, where its scores fit. The limit is the operations over the rate of a
large matrix product, or the bytes of arguments and results over that of a copy, both measured in the same run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from gpu_timing import Machine, measure_machine, size, timed
from record import write
from torch import Tensor

from torchtitan_npu.ops.triton import sparse_flash_attention as kernels
from torchtitan_npu.ops.triton import sparse_flash_attention_grad as of_gradient

HEADS, SIZE, ROPE, TOP_K = 128, 512, 64, 2048
SCALE = (SIZE + ROPE) ** -0.5
SMALL_OPS = (2048, 4096)
npu = torch.ops.npu
Row = dict[str, Any]


def selection(length: int, top_k: int) -> Tensor:
    """(1, length, 1, top_k): keys that each row may see, in ascending order, and -1 after them."""
    indices = torch.full((1, length, 1, top_k), -1, dtype=torch.int32, device="cuda")
    keys = torch.arange(length, device="cuda")
    for start in range(0, length, 512):
        rows = keys[start : start + 512, None]
        chances = torch.rand(len(rows), length, device="cuda").masked_fill_(keys > rows, 2)
        order = chances.argsort(-1)[:, :top_k]
        order = torch.where(order > rows, length, order).sort(-1).values
        indices[0, start : start + 512, 0, : order.shape[1]] = torch.where(order == length, -1, order)
    return indices


def tensors(length: int, top_k: int) -> dict[str, Any]:
    def random(heads: int, size: int) -> Tensor:
        return torch.randn(1, length, heads, size, device="cuda", dtype=torch.bfloat16)

    return {
        "query": random(HEADS, SIZE),
        "key": random(1, SIZE),
        "query_rope": random(HEADS, ROPE),
        "key_rope": random(1, ROPE),
        "indices": selection(length, top_k),
    }


def forward(query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, indices: Tensor) -> tuple[Tensor, ...]:
    options = {"query_rope": query_rope, "key_rope": key_rope, "attention_mode": 2, "return_softmax_lse": True}
    return npu.npu_sparse_flash_attention(query, key, None, indices, SCALE, **options)


def backward(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    indices: Tensor,
    d_out: Tensor,
    results: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    arguments = (query, key, None, indices, d_out, *results, SCALE, 1, query_rope, key_rope)
    gradients = npu.npu_sparse_flash_attention_grad(*arguments, attention_mode=2)
    return tuple(gradient for gradient in gradients if gradient.numel())


def small_ops(query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkd->bhqk", query, key[:, :, 0])
    scores = (scores + torch.einsum("bqhd,bkd->bhqk", query_rope, key_rope[:, :, 0])) * SCALE
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("bhqk,bkd->bqhd", weights, key[:, :, 0])


def check() -> Iterator[Row]:
    """The Euclidean distances from float64, relative to the length of what is compared with. There are several blocks
    of keys, and the workspace is filled several times."""
    kernels.WORKSPACE = of_gradient.WORKSPACE = 2**26
    given = tensors(1500, 600)
    results = forward(**given)
    d_out = torch.randn_like(results[0])
    exact = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    expected = forward(**exact)
    of_gradients = backward(**given, d_out=d_out, results=results)
    pairs = [*zip(results, expected, strict=True)]
    pairs += zip(of_gradients, backward(**exact, d_out=d_out.double(), results=expected), strict=True)
    names = ("out", "max", "sum", *(f"gradient of {name}" for name in ("query", "key", "query_rope", "key_rope")))
    for name, (got, value) in zip(names, pairs, strict=True):
        error = ((got.double() - value).norm() / value.norm()).item()
        assert error < 1e-2, f"{name}: {error} is more than bfloat16's rounding"
        yield {"what": name, "error": error}
    kernels.WORKSPACE = of_gradient.WORKSPACE = 2**29


def times(length: int, machine: Machine) -> Iterator[Row]:
    given = tensors(length, TOP_K)
    pairs = 2 * HEADS * int((given["indices"] >= 0).sum())
    results = forward(**given)
    d_out = torch.randn_like(results[0])
    flops = pairs * (2 * SIZE + ROPE)
    moved = size(*given.values(), *results)
    limit = machine.limit_ms(moved, flops)
    yield timed(lambda: forward(**given), flops, what="forward", length=length, limit_ms=limit)
    flops = pairs * (5 * SIZE + 2 * ROPE)
    # the gradients are as long as what they are of
    limit = machine.limit_ms(moved + size(d_out, *given.values()) - given["indices"].nbytes, flops)

    def gradients() -> tuple[Tensor, ...]:
        return backward(**given, d_out=d_out, results=results)

    yield timed(gradients, flops, what="backward", length=length, limit_ms=limit)
    if length in SMALL_OPS:
        torch.use_deterministic_algorithms(True)
        yield timed(gradients, flops, what="backward, in order", length=length, limit_ms=limit)
        torch.use_deterministic_algorithms(False)
        indices = given.pop("indices")
        mask = torch.zeros(1, 1, length, length + 1, dtype=torch.bool, device="cuda")
        mask[0, 0].scatter_(-1, indices[0, :, 0].long() % (length + 1), True)
        inputs = {name: tensor.requires_grad_() for name, tensor in given.items()}
        mask = mask[..., :length]
        yield timed(lambda: small_ops(**inputs, mask=mask), what="small ops forward", length=length)
        out = small_ops(**inputs, mask=mask)
        leaves = list(inputs.values())
        run = partial(torch.autograd.grad, out, leaves, d_out, retain_graph=True)
        yield timed(run, what="small ops backward", length=length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048 << n for n in range(7)])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    machine = measure_machine()
    rows: list[Row] = []
    for row in check():
        rows.append(row)
        print(f"{row['what']:24} {row['error']:.2e}", flush=True)
    for length in args.lengths:
        for row in times(length, machine):
            rows.append(row)
            rate = f"{row['tflops']:5.0f} TFLOP/s" if row["tflops"] else " " * 13
            limit = f"{row['limit_ms'] / row['ms']:4.0%} of the limit" if "limit_ms" in row else ""
            memory = f"{row['peak_mib']:8.0f} MiB"
            print(f"{row['what']:24} {length:7} {row['ms']:9.2f} ms {rate} {memory} {limit}", flush=True)
        torch.cuda.empty_cache()
    if args.json:
        write(args.json, rows, **machine.rates())


if __name__ == "__main__":
    main()
