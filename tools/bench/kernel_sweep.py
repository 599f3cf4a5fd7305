#!/usr/bin/env python
"""Other tiles, warps and stages of our kernels for RMSNorm and grouped products on a GPU, best first.

python tools/bench/kernel_sweep.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
from gpu_timing import Machine, forward_ms, measure_machine
from op_rows import EXPERT_HIDDEN, HIDDEN, TOKENS, TOP_K, random
from record import need_gpu
from torch import Tensor

import torchtitan_npu.ops  # noqa: F401  (it defines npu::)


def sweep(machine: Machine) -> None:
    """Other configurations of our kernels, best first; one that does not compile is reported and left out."""
    from torchtitan_npu.ops.grouped_matmul import triton as gmm
    from torchtitan_npu.ops.rms_norm import triton as norm

    def of(
        name: str, run: Callable[..., Any], configs: list[dict[str, Any]], limit: float, expected: Tensor | None = None
    ) -> None:
        times = []
        for config in configs:
            try:
                result = run(config=config)
                if expected is not None and not torch.allclose(result, expected, rtol=2**-6, atol=0.5):
                    print(f"{name}: {config}: a wrong result")
                    continue
                times.append((forward_ms({"": partial(run, config=config)})[""], config))
            except triton.runtime.errors.OutOfResources as problem:  # an answer too
                print(f"{name}: {config}: {type(problem).__name__}: {str(problem)[:120]}")
        for time, config in sorted(times, key=lambda pair: pair[0]):
            print(f"{name}: {time:.4f} ms, {limit / time:.0%} of the limit, {config}", flush=True)

    def norm_forward(x: Tensor, gamma: Tensor, config: dict[str, Any]) -> Any:
        return norm.npu_rms_norm(x, gamma, 1e-6, **config)

    def norm_backward(*tensors: Tensor, config: dict[str, Any]) -> Any:
        return norm.npu_rms_norm_backward(*tensors, **config)

    for rows in (4096, 16384):
        x, gamma, dy = random(rows, HIDDEN), random(HIDDEN), random(rows, HIDDEN)
        rstd = norm.npu_rms_norm(x, gamma, 1e-6)[1]
        forward = [{"ROWS": 1, "BLOCK": 8192, "num_warps": w} for w in (4, 8, 16)]
        limit = machine.limit_ms(bytes=4 * x.numel())
        of(f"rms_norm forward {rows}", partial(norm_forward, x, gamma), forward, limit)
        backward = [
            {"ROWS": 1, "BLOCK": 8192, "STAGES": s, "num_warps": w, "per_multiprocessor": p}
            for w in (8, 16)
            for s, p in ((1, 1), (2, 1), (3, 1), (4, 1), (3, 2))
        ]
        limit = machine.limit_ms(bytes=6 * x.numel())
        of(f"rms_norm backward {rows}", partial(norm_backward, dy, x, gamma, rstd), backward, limit)

    tiles = [
        {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": w, "num_stages": s, "FLATTEN": f}
        for m, n, k, w, s, f in (
            (128, 256, 64, 8, 3, False),
            (128, 256, 64, 8, 4, False),
            (128, 256, 64, 8, 3, True),
            (256, 128, 64, 8, 4, False),
            (256, 128, 64, 8, 3, True),
            (128, 128, 64, 4, 4, False),
        )
    ]
    rows = TOKENS * TOP_K
    for experts in (8, 64):
        ends = torch.full((experts,), rows // experts, device="cuda").cumsum(0).int()
        x, dy, weight = random(rows, HIDDEN), random(rows, EXPERT_HIDDEN), random(experts, EXPERT_HIDDEN, HIDDEN).mT
        limit = machine.limit_ms(flops=2 * rows * HIDDEN * EXPERT_HIDDEN)
        for name, kernel, a, b in (
            ("forward", gmm.rows_product, x, weight),
            ("dX", gmm.rows_product, dy, weight.mT),
            ("dW", gmm.sums_product, dy.t(), x),
        ):
            expected = gmm.torch_product(a, b, ends)  # of a few hundred: a rounding is up to 1
            configs = tiles if experts == 8 else tiles[:3]
            run = partial(kernel, a, b, ends)
            of(f"grouped_matmul {name}, {experts} experts", run, configs, limit, expected)


if __name__ == "__main__":
    need_gpu()
    torch.manual_seed(0)
    sweep(measure_machine())
