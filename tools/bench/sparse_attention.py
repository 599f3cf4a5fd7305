#!/usr/bin/env python
"""Measure sparse attention on a GPU, forward and backward: DeepSeek-V3.2's 128 heads of 512 + 64, top 2048 keys.

    python tools/bench/sparse_attention.py [--triton] [--json FILE]
    python tools/bench/sparse_attention.py --peers DIR        # only a comparison with public kernels in DIR
    python tools/bench/sparse_attention.py --query-blocks   # only few heads: single queries and blocks

First bfloat16 is compared with float64 on a small sequence. Then one causal sequence of each length is timed, with
random selected keys; rates count the selected pairs only. At 4096 tokens other shapes are timed, too. These are: 16
heads, as on a tensor-parallel rank; two sequences in one tensor (TND); and queries and ``d_out`` in head-major layout,
as in the model. The last shape has scores so different between blocks of keys that exponentials are rescaled.
``--triton`` runs the Triton kernels where the Gluon kernels would run.

``small ops`` is the eager model: attention to all keys under a mask, where its scores fit into memory. ``compiled`` is
the same with torch.compile. Times are medians on the device, replayed from a CUDA graph. The limit is the operations at
the rate of a large matmul, or the bytes of arguments and results at the rate of a copy, both measured in the same run.

attn_gym 0.0.17 has the same attention (``sparse.gather_attn`` without a window, keys and values of 576). Before
Blackwell its kernel is unrolled over the selected keys at compile time: 4 keys take 47 s, 2048 are out of reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import sparse_attention_peers
import torch
from harness import (
    Machine,
    Row,
    Run,
    compiled,
    difference,
    in_turns,
    mask_of,
    measure_machine,
    need_gpu,
    of_peer,
    parser_of,
    peers_in,
    printed,
    show,
    size,
    store,
    timed,
)
from sparse_attention_peers import BACKWARD, FORWARD, ROPE, SCALE, SIZE, TOP_K, selection
from torch import Tensor

from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton as kernels
from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton_grad as of_gradient
from torchtitan_npu.gpu_kernels.sparse_flash_attention import triton_query_blocks as query_blocks
from torchtitan_npu.gpu_kernels.sparse_flash_attention.gluon_tiles import BLOCK_HEADS
from torchtitan_npu.ops.core import gpu

HEADS = 128
LENGTHS = [2048 << n for n in range(7)]
SMALL_OPS = (2048, 4096)
IN_ORDER = (2048, 4096, 8192)
SHAPES_AT = 4096
SHAPES: dict[str, dict[str, Any]] = {
    ", 16 heads": {"heads": 16},
    ", 2 documents (TND)": {"documents": 2},
    ", head by head": {"by_head": True},
    ", scores far apart": {"spread": 40.0},
}
"""Other shapes to time at this length."""
npu = torch.ops.npu


def tensors(
    length: int, top_k: int, heads: int = HEADS, documents: int = 0, by_head: bool = False, spread: float = 1.0
) -> dict[str, Tensor]:
    """Return the inputs of one sequence, or of several ``documents`` in one tensor (TND) with their ends.

    ``by_head`` selects the head-major layout. ``spread`` is the standard deviation of the scores.
    """

    def random(heads: int, size: int) -> Tensor:
        shape = (documents * length, heads, size) if documents else (1, length, heads, size)
        result = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        return result.transpose(1, 2).contiguous().transpose(1, 2) if by_head else result

    inputs = {
        "query": spread * random(heads, SIZE),
        "key": random(1, SIZE),
        "query_rope": spread * random(heads, ROPE),
        "key_rope": random(1, ROPE),
        "indices": selection(length, top_k),
    }
    if documents:
        inputs["indices"] = inputs["indices"][0].repeat(documents, 1, 1)
        inputs["ends"] = length * torch.arange(1, documents + 1, dtype=torch.int32, device="cuda")
    return inputs


def forward(
    query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, indices: Tensor, ends: Tensor | None = None
) -> tuple[Tensor, ...]:
    options = {"query_rope": query_rope, "key_rope": key_rope, "attention_mode": 2, "return_softmax_lse": True}
    if ends is not None:
        options |= {"layout_query": "TND", "layout_kv": "TND"}
        options |= {"actual_seq_lengths_query": ends, "actual_seq_lengths_kv": ends}
    return npu.npu_sparse_flash_attention(query, key, None, indices, SCALE, **options)


def backward(
    query: Tensor,
    key: Tensor,
    query_rope: Tensor,
    key_rope: Tensor,
    indices: Tensor,
    d_out: Tensor,
    results: tuple[Tensor, ...],
    ends: Tensor | None = None,
) -> tuple[Tensor, ...]:
    layout = "BSND" if ends is None else "TND"
    arguments = (query, key, None, indices, d_out, *results, SCALE, 1, query_rope, key_rope, ends, ends, layout)
    gradients = npu.npu_sparse_flash_attention_grad(*arguments, attention_mode=2)
    return tuple(gradient for gradient in gradients if gradient.numel())


def small_ops(query: Tensor, key: Tensor, query_rope: Tensor, key_rope: Tensor, mask: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkd->bhqk", query, key[:, :, 0])
    scores = (scores + torch.einsum("bqhd,bkd->bhqk", query_rope, key_rope[:, :, 0])) * SCALE
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.einsum("bhqk,bkd->bqhd", weights, key[:, :, 0])


def check() -> Iterator[Row]:
    """Yield the relative L2 errors against float64, the larger of two cases: few and most keys selected.

    There are several blocks of keys, and the workspace is filled several times.
    """
    before = kernels.WORKSPACE, of_gradient.WORKSPACE
    kernels.WORKSPACE = of_gradient.WORKSPACE = 2**26
    cases = [distances(tensors(1500, 600)), distances(tensors(1500, 1000, by_head=True))]
    for name in cases[0]:
        error = max(case[name] for case in cases)
        assert error < 1e-2, f"{name}: {error} is above bfloat16 rounding"
        yield {"what": name, "error": error}
    kernels.WORKSPACE, of_gradient.WORKSPACE = before


def distances(inputs: dict[str, Tensor]) -> dict[str, float]:
    results = forward(**inputs)
    d_out = torch.randn_like(inputs["query"])  # the shape of the output, the strides of the queries
    exact = {name: t.double() if t.is_floating_point() else t for name, t in inputs.items()}
    expected = forward(**exact)
    of_gradients = backward(**inputs, d_out=d_out, results=results)
    pairs = [*zip(results, expected, strict=True)]
    pairs += zip(of_gradients, backward(**exact, d_out=d_out.double(), results=expected), strict=True)
    names = ("out", "max", "sum", *(f"gradient of {name}" for name in ("query", "key", "query_rope", "key_rope")))
    far = [difference(got, value) for got, value in pairs]
    return dict(zip(names, far, strict=True))


def times(length: int, machine: Machine) -> Iterator[Row]:
    inputs = tensors(length, TOP_K)
    yield from kernel_rows(inputs, machine, in_order=length in IN_ORDER)
    if length in SMALL_OPS:
        yield from small_rows(inputs, with_compiled=length == SHAPES_AT)
    if length == SHAPES_AT:
        for name, shape in SHAPES.items():
            yield from kernel_rows(tensors(length, TOP_K, **shape), machine, name)


def kernel_rows(inputs: dict[str, Tensor], machine: Machine, name: str = "", in_order: bool = False) -> Iterator[Row]:
    """Time our forward pass, and the backward pass by its operator."""
    *tokens, heads, _ = inputs["query"].shape
    length = tokens[-1]
    pairs = 2 * heads * int((inputs["indices"] >= 0).sum())
    results = forward(**inputs)
    d_out = torch.randn_like(inputs["query"])
    flops = pairs * FORWARD
    moved = size(*inputs.values(), *results)
    limit = machine.limit_ms(moved, flops)
    yield timed(lambda: forward(**inputs), flops, what=f"forward{name}", length=length, limit_ms=limit)
    flops = pairs * BACKWARD
    # Gradients have the sizes of the inputs.
    limit = machine.limit_ms(moved + size(d_out, *inputs.values()) - inputs["indices"].nbytes, flops)

    def gradients() -> tuple[Tensor, ...]:
        return backward(**inputs, d_out=d_out, results=results)

    yield timed(gradients, flops, what=f"backward{name}", length=length, limit_ms=limit)
    if in_order:
        torch.use_deterministic_algorithms(True)
        yield timed(gradients, flops, what=f"backward{name}, in order", length=length, limit_ms=limit)
        torch.use_deterministic_algorithms(False)


def small_rows(inputs: dict[str, Tensor], with_compiled: bool) -> Iterator[Row]:
    """Time the eager model, and its compiled version."""
    mask = mask_of(inputs["indices"])
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items() if name != "indices"}
    d_out, length = torch.randn_like(inputs["query"]), len(mask)
    functions = {"": small_ops} | ({", compiled": compiled(small_ops)} if with_compiled else {})
    for name, function in functions.items():
        run = partial(function, **inputs, mask=mask)
        yield of_peer(timed, run, what=f"small ops forward{name}", length=length)
        backward = (list(inputs.values()), d_out)
        yield of_peer(timed, run, backward=backward, what=f"small ops backward{name}", length=length)


def block_rows(machine: Machine) -> Iterator[Row]:
    """Time single queries and the largest blocks of neighbouring queries in turns, for few heads."""
    for heads, (name, first) in product((16, 32), (("causal", 0), ("full rows", sparse_attention_peers.QUERIES))):
        case = sparse_attention_peers.Case(heads, first)
        tokens = case.query.shape[1]
        block = BLOCK_HEADS.value // heads
        sizes = {"single queries": 1, f"blocks of {block}": block}
        best = query_blocks.queries_per_block(heads, tokens, tokens, case.keys, TOP_K, True)
        for run, (direction, of_pair) in zip(case.ours(), sparse_attention_peers.PASSES.items(), strict=True):
            flops = case.pairs * of_pair
            builds = {
                f"{direction}, {heads} heads, {name}, {queries}{' (chosen)' * (number == best)}": partial(
                    with_block, number, run
                )
                for queries, number in sizes.items()
            }
            work = dict.fromkeys(builds, (flops, machine.limit_ms(0, flops)))
            yield from in_turns(builds, work, length=tokens)


def with_block(queries: int, run: Run) -> Run:
    """Return ``run`` with blocks of ``queries``."""

    def with_queries() -> object:
        with mock.patch.object(query_blocks, "queries_per_block", return_value=queries):
            return run()

    return with_queries


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--triton", action="store_true", help="run the Triton kernels on a Hopper GPU, too")
    parser.add_argument(
        "--peers", type=Path, help="folder of public kernels, as sparse_attention_peers.py describes it"
    )
    parser.add_argument("--query-blocks", action="store_true", help="compare single queries with blocks")
    args = parser.parse_args()
    need_gpu()
    if args.triton:
        gpu.is_hopper = lambda tensor: False
    torch.manual_seed(0)
    machine = measure_machine()
    about: dict[str, Any] = machine.rates()
    if args.peers:
        about |= {"peers": peers_in(args.peers, sparse_attention_peers.MODULES)}
        parts = [sparse_attention_peers.rows(machine)]
    elif args.query_blocks:
        parts = [block_rows(machine)]
    else:
        parts = [check(), *(times(length, machine) for length in LENGTHS)]
    store(args.json, printed(parts, show), **about)


if __name__ == "__main__":
    main()
