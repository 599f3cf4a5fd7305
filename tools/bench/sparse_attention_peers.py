"""Public kernels of sparse attention beside ours, on the same tensors in one run.

A folder holds what is there of the peers, importable from it:

- ``flash_mla``: FlashMLA, https://github.com/deepseek-ai/FlashMLA. Its sparse prefill takes 64 or 128 heads.
- ``tilelang`` with its dependencies, and from its examples the modules ``sparse_mla_fwd``, ``sparse_mla_fwd_pipelined``
  and ``sparse_mla_bwd`` of ``deepseek_v32``.

Causal rows are 4096 tokens from the first on. Full rows are 4096 queries at positions 4096 to 8191 of 8192 keys: each
selects 2048. Rates count the selected pairs. tilelang computes all 2048 places of a causal row, and FlashMLA does so
unless it gets the number of keys of each row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from harness import Machine, Row, device_ms, of_peer, peak_bytes
from torch import Tensor

import torchtitan_npu.ops  # noqa: F401  (it defines npu::)

SIZE, ROPE, TOP_K, QUERIES = 512, 64, 2048, 4096
SCALE = (SIZE + ROPE) ** -0.5
HEADS = (128, 64, 16)
FORWARD, BACKWARD = 2 * SIZE + ROPE, 5 * SIZE + 3 * ROPE
"""Multiplications and additions for a selected pair, each counted once."""
npu = torch.ops.npu
Kernel = Callable[[], object]


class Case:
    """The inputs of one comparison: queries from position ``first`` on, and as many keys as they may select from."""

    def __init__(self, heads: int, first: int):
        self.first, self.keys = first, first + QUERIES
        self.query = torch.randn(1, QUERIES, heads, SIZE + ROPE, device="cuda", dtype=torch.bfloat16) / 2
        self.key = torch.randn(1, self.keys, 1, SIZE + ROPE, device="cuda", dtype=torch.bfloat16) / 2
        self.indices = torch.full((1, QUERIES, 1, TOP_K), -1, dtype=torch.int32, device="cuda")
        positions = torch.arange(self.keys, device="cuda")
        for start in range(0, QUERIES, 512):
            last = first + torch.arange(start, start + 512, device="cuda")[:, None]
            order = torch.rand(512, self.keys, device="cuda").masked_fill_(positions > last, 2).argsort(-1)[:, :TOP_K]
            order = torch.where(order > last, self.keys, order).sort(-1).values
            self.indices[0, start : start + 512, 0] = torch.where(order == self.keys, -1, order)
        self.pairs = 2 * heads * int((self.indices >= 0).sum())

    def ours(self) -> tuple[Kernel, Kernel]:
        """Return our forward and backward pass."""
        (query, query_rope), (key, key_rope) = (
            [part.contiguous() for part in tensor.split([SIZE, ROPE], -1)] for tensor in (self.query, self.key)
        )
        ropes = {"query_rope": query_rope, "key_rope": key_rope, "attention_mode": 2}

        def forward() -> tuple[Tensor, ...]:
            return npu.npu_sparse_flash_attention(
                query, key, None, self.indices, SCALE, return_softmax_lse=True, **ropes, sparse_mode=3
            )

        d_out, results = torch.randn_like(query), forward()
        arguments = (
            query,
            key,
            None,
            self.indices,
            d_out,
            *results,
            SCALE,
            1,
            query_rope,
            key_rope,
            None,
            None,
            "BSND",
        )
        return forward, lambda: npu.npu_sparse_flash_attention_grad(*arguments, attention_mode=2)

    def flash_mla(self, with_lengths: bool) -> Kernel:
        kernel = import_module("flash_mla").flash_mla_sparse_fwd
        lengths = (self.indices[0, :, 0] >= 0).sum(-1).int() if with_lengths else None
        return lambda: kernel(self.query[0], self.key[0], self.indices[0], SCALE, topk_length=lengths)

    def tilelang(self) -> Iterator[tuple[str, Callable[[], Kernel], int]]:
        """Yield the name, the kernel and the operations of each tilelang kernel that takes the case."""
        beyond = torch.where(self.indices < 0, self.keys, self.indices)

        def pipelined() -> Kernel:
            module = import_module("sparse_mla_fwd_pipelined")
            kernel = module.sparse_mla_fwd_interface(self.query, self.key, beyond, self.first, 1, return_kernel=True)
            first = torch.tensor([self.first], dtype=torch.int32, device="cuda")
            return lambda: kernel(self.query, self.key, beyond, first)

        def plain() -> Kernel:
            kernel = import_module("sparse_mla_fwd").sparse_mla_fwd_interface
            return lambda: kernel(self.query, self.key, beyond)

        def backward() -> Kernel:
            out, lse = import_module("sparse_mla_fwd").sparse_mla_fwd_interface(self.query, self.key, beyond)
            kernel, d_out = import_module("sparse_mla_bwd").sparse_mla_bwd, torch.randn_like(out)
            return lambda: kernel(self.query, self.key, out, d_out, beyond, lse)

        yield "forward, tilelang, pipelined", pipelined, FORWARD
        if self.first == 0:
            yield "forward, tilelang", plain, FORWARD
            yield "backward, tilelang", backward, BACKWARD


def versions(folder: Path) -> dict[str, str]:
    """Return the versions of the peers in ``folder``, which becomes importable. FlashMLA has none."""
    sys.path.insert(0, str(folder))
    found = {}
    for name, module in (("tilelang", "tilelang"), ("FlashMLA", "flash_mla")):
        if find_spec(module):
            found[name] = getattr(import_module(module), "__version__", "from source")
    return found


def rows(machine: Machine) -> Iterator[Row]:
    """Time our kernels and the peers; a peer that is missing or fails has a row with its error."""
    for heads in HEADS:
        for name, first in (("causal", 0), ("full rows", QUERIES)):
            case = Case(heads, first)
            forward, backward = case.ours()
            kernels: list[tuple[str, Callable[[], Kernel], int]] = [
                ("forward, ours", partial(_given, forward), FORWARD),
                ("forward, FlashMLA", partial(case.flash_mla, False), FORWARD),
                ("forward, FlashMLA, given lengths", partial(case.flash_mla, True), FORWARD),
                *case.tilelang(),
                ("backward, ours", partial(_given, backward), BACKWARD),
            ]
            for operations in (FORWARD, BACKWARD):
                flops = case.pairs * operations
                builds = {
                    f"{kernel}, {heads} heads, {name}": build for kernel, build, of in kernels if of == operations
                }
                yield from _in_turns(builds, flops, length=QUERIES, limit_ms=machine.limit_ms(0, flops))
            torch.cuda.empty_cache()


def _in_turns(builds: dict[str, Callable[[], Kernel]], flops: int, **row: object) -> Iterator[Row]:
    """Time the kernels of one pass in turns, because the clock depends on the preceding work."""
    runs: dict[str, Kernel] = {}

    def prepare(build: Callable[[], Kernel], what: str, **row: object) -> Row:
        run = build()
        peak = peak_bytes(run)
        runs[what] = run
        return row | {"what": what, "peak_mib": peak / 2**20}

    rows = [of_peer(prepare, build, what=what, **row) for what, build in builds.items()]
    times = device_ms({what: partial(_given, run) for what, run in runs.items()})
    for prepared in rows:
        ms = times.get(prepared["what"])
        yield prepared if ms is None else prepared | {"ms": ms, "tflops": flops / ms / 1e9}


def _given(kernel: Kernel) -> Kernel:
    return kernel
