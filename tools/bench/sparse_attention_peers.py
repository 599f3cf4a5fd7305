"""Public kernels of sparse attention beside ours, on the same tensors in one run.

A folder holds what is there of the peers, importable from it:

- ``flash_mla``: FlashMLA, https://github.com/deepseek-ai/FlashMLA. Its sparse prefill takes 64 or 128 heads.
- ``tilelang`` with its dependencies, and from its examples the modules ``sparse_mla_fwd``, ``sparse_mla_fwd_pipelined``
  and ``sparse_mla_bwd`` of ``deepseek_v32``.
- ``cudnn``: cuDNN frontend, ``pip install nvidia-cudnn-frontend[cutedsl]``. On Hopper it has the backward pass.

Causal rows are 4096 tokens from the first on. Full rows are 4096 queries at positions 4096 to 8191 of 8192 keys: each
selects 2048. Rates count the selected pairs. tilelang computes all 2048 entries of a causal row, and FlashMLA does so
unless it gets the number of keys of each row. cuDNN always gets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module

import torch
from harness import Machine, Row, Run, check_peer, in_turns
from torch import Tensor

import torchtitan_npu.ops  # noqa: F401  (it defines npu::)

SIZE, ROPE, TOP_K, QUERIES = 512, 64, 2048, 4096
SCALE = (SIZE + ROPE) ** -0.5
HEADS = (128, 64, 16)
FORWARD, BACKWARD = 2 * SIZE + ROPE, 5 * SIZE + 3 * ROPE
"""Multiplications and additions for a selected pair, each counted once."""
PASSES = {"forward": FORWARD, "backward": BACKWARD}
MODULES = {"tilelang": "tilelang", "FlashMLA": "flash_mla", "cuDNN frontend": "cudnn"}
npu = torch.ops.npu


def selection(queries: int, top_k: int, first: int = 0) -> Tensor:
    """Return random visible keys of queries from position ``first`` on, ascending, then -1: (1, queries, 1, top_k)."""
    indices = torch.full((1, queries, 1, top_k), -1, dtype=torch.int32, device="cuda")
    keys = torch.arange(first + queries, device="cuda")
    for start in range(0, queries, 512):
        last = keys[first + start : first + start + 512, None]
        order = torch.rand(len(last), len(keys), device="cuda").masked_fill_(keys > last, 2).argsort(-1)[:, :top_k]
        order = torch.where(order > last, len(keys), order).sort(-1).values
        indices[0, start : start + 512, 0, : order.shape[1]] = torch.where(order == len(keys), -1, order)
    return indices


class Case:
    """The inputs of one comparison: queries from position ``first`` on, and as many keys as they may select from."""

    def __init__(self, heads: int, first: int):
        self.first, self.keys = first, first + QUERIES
        self.query = torch.randn(1, QUERIES, heads, SIZE + ROPE, device="cuda", dtype=torch.bfloat16) / 2
        self.key = torch.randn(1, self.keys, 1, SIZE + ROPE, device="cuda", dtype=torch.bfloat16) / 2
        self.indices = selection(QUERIES, TOP_K, first)
        self.lengths = (self.indices[0, :, 0] >= 0).sum(-1).int()
        self.pairs = 2 * heads * int(self.lengths.sum())
        self.d_out = torch.randn(1, QUERIES, heads, SIZE, device="cuda", dtype=torch.bfloat16)

    def ours(self) -> tuple[Run, Run]:
        """Return our forward and backward pass."""
        (query, query_rope), (key, key_rope) = (
            [part.contiguous() for part in tensor.split([SIZE, ROPE], -1)] for tensor in (self.query, self.key)
        )
        ropes = {"query_rope": query_rope, "key_rope": key_rope, "attention_mode": 2}

        def forward() -> tuple[Tensor, ...]:
            return npu.npu_sparse_flash_attention(
                query, key, None, self.indices, SCALE, return_softmax_lse=True, **ropes, sparse_mode=3
            )

        inputs = (query, key, None, self.indices, self.d_out, *forward(), SCALE, 1)
        arguments = (*inputs, query_rope, key_rope, None, None, "BSND")
        return forward, lambda: npu.npu_sparse_flash_attention_grad(*arguments, attention_mode=2)

    def flash_mla(self, ours: Run, with_lengths: bool) -> Run:
        kernel = import_module("flash_mla").flash_mla_sparse_fwd
        lengths = self.lengths if with_lengths else None

        def run() -> tuple[Tensor, ...]:
            return kernel(self.query[0], self.key[0], self.indices[0], SCALE, topk_length=lengths)

        check_peer(run()[0], ours()[0][0], 1e-2)
        return run

    def cudnn(self, forward: Run, backward: Run) -> Run:
        """Return cuDNN's backward pass. ``forward`` and ``backward`` are ours."""
        kernel = import_module("cudnn").DSA.sparse_attention_backward_wrapper
        out, highest, total = forward()
        log_sum = (highest + total.log())[0, 0]
        no_sink = torch.full_like(log_sum[0], float("-inf"))
        arguments = (self.query[0], self.key[0, :, 0], out[0], self.d_out[0], log_sum, no_sink, self.indices[0, :, 0])

        def run() -> dict[str, Tensor]:
            return kernel(*arguments, softmax_scale=SCALE, topk_length=self.lengths)

        gradients, ours = run(), backward()
        check_peer(gradients["dq"], torch.cat([ours[0], ours[3]], -1)[0], 1e-2)
        check_peer(gradients["dkv"], torch.cat([ours[1], ours[4]], -1)[0, :, 0], 1e-2)
        return run

    def tilelang(self) -> Iterator[tuple[str, Callable[[], Run], int]]:
        """Yield the name, the kernel and the operations of each tilelang kernel that takes the case."""
        beyond = torch.where(self.indices < 0, self.keys, self.indices)

        def pipelined() -> Run:
            module = import_module("sparse_mla_fwd_pipelined")
            kernel = module.sparse_mla_fwd_interface(self.query, self.key, beyond, self.first, 1, return_kernel=True)
            first = torch.tensor([self.first], dtype=torch.int32, device="cuda")
            return lambda: kernel(self.query, self.key, beyond, first)

        def plain() -> Run:
            kernel = import_module("sparse_mla_fwd").sparse_mla_fwd_interface
            return lambda: kernel(self.query, self.key, beyond)

        def backward() -> Run:
            out, lse = import_module("sparse_mla_fwd").sparse_mla_fwd_interface(self.query, self.key, beyond)
            kernel, d_out = import_module("sparse_mla_bwd").sparse_mla_bwd, torch.randn_like(out)
            return lambda: kernel(self.query, self.key, out, d_out, beyond, lse)

        yield "forward, tilelang, pipelined", pipelined, FORWARD
        if self.first == 0:
            yield "forward, tilelang", plain, FORWARD
            yield "backward, tilelang", backward, BACKWARD


def rows(machine: Machine) -> Iterator[Row]:
    """Time our kernels and the peers in turns. A peer that is missing or fails has a row with its error."""
    for heads in HEADS:
        for name, first in (("causal", 0), ("full rows", QUERIES)):
            case = Case(heads, first)
            forward, backward = case.ours()
            kernels: list[tuple[str, Callable[[], Run], int]] = [
                ("forward, ours", lambda: forward, FORWARD),  # noqa: B023
                ("forward, FlashMLA", partial(case.flash_mla, forward, False), FORWARD),
                ("forward, FlashMLA, given lengths", partial(case.flash_mla, forward, True), FORWARD),
                *case.tilelang(),
                ("backward, ours", lambda: backward, BACKWARD),  # noqa: B023
                ("backward, cuDNN", partial(case.cudnn, forward, backward), BACKWARD),
            ]
            for operations in PASSES.values():
                flops = case.pairs * operations
                builds = {
                    f"{kernel}, {heads} heads, {name}": build
                    for kernel, build, of_pair in kernels
                    if of_pair == operations
                }
                work = dict.fromkeys(builds, (flops, machine.limit_ms(0, flops)))
                yield from in_turns(builds, work, length=QUERIES)
            torch.cuda.empty_cache()
