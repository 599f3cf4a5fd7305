#!/usr/bin/env python
"""The basic fused ops on a GPU: small ops, the best public peer, ours, and the machine's limit, forward and backward.

    python tools/bench/basic_kernels.py [--only rms_norm,permute,swiglu,rotary,grouped_matmul] [--json FILE]
    python tools/bench/basic_kernels.py --sweep     # other tiles, warps and stages of our kernels instead, best first

First every op is compared with its reference in float64, on groups and rows of ugly sizes; then it is timed in
bfloat16, alone on the device (``gpu_timing.device_ms``). The limit is the bytes that must move over the rate of a
device copy, or the operations over the rate of a matrix product, both measured in the same run. ``host`` is the time to
launch ours.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
import triton
from gpu_timing import Machine, backward_ms, forward_ms, host_us, measure_machine, write
from torch import Tensor

import torchtitan_npu.ops  # noqa: F401  (it defines npu::)

BF16 = torch.bfloat16
TOKENS, HIDDEN, TOP_K, EXPERT_HIDDEN = 4096, 7168, 8, 2048
npu = torch.ops.npu


@dataclass
class Row:
    """One measurement; times in milliseconds."""

    op: str
    shape: str
    eager: float
    peers: dict[str, float]
    ours: float
    limit: float
    host_us: float | None = None
    error: float = field(default=0.0)
    """The largest error of ours in correctness, 1 being a rounding to bfloat16 of the result in float64."""

    def line(self) -> str:
        peer = min(self.peers.items(), key=lambda pair: pair[1], default=("-", float("nan")))
        host = "" if self.host_us is None else f"{self.host_us:.0f} µs"
        return (
            f"| {self.op} | {self.shape} | {self.eager:.3f} | {peer[1]:.3f} ({peer[0]}) | {self.ours:.3f} "
            f"| {self.limit:.3f} | {self.limit / self.ours:.0%} | {self.eager / self.ours:.1f}× | {host} "
            f"| {self.error:.2f} |"
        )


def random(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16, requires_grad=grad)


def error(actual: Tensor, oracle: Tensor) -> float:
    """The largest error in units of its budget: a rounding to bfloat16, and float32's over sums of a few thousand."""
    budget = oracle.abs() * torch.finfo(BF16).eps / 2 + oracle.abs().max() * 2.0**-18 + 1e-30
    ratio = ((actual.double() - oracle).abs() / budget).max().item() if oracle.numel() else 0.0
    if not ratio <= 1.01:
        raise SystemExit(f"wrong result: {ratio:.2f} times the budget")
    return ratio


def compare(ours: Callable[..., Any], oracle: Callable[..., Any], *tensors: Tensor) -> float:
    """The largest error of ``ours`` and its gradients against ``oracle`` of the same ``tensors`` in float64."""
    results = []
    for function, dtype in ((ours, BF16), (oracle, torch.float64)):
        inputs = [t.detach().to(dtype).requires_grad_() for t in tensors]
        y = function(*inputs)
        torch.manual_seed(1)
        grad = torch.randn(y.shape, device="cuda", dtype=BF16)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, grad.to(dtype))])
    return max(error(actual, expected) for actual, expected in zip(*results, strict=True))


def small_norm(x: Tensor, gamma: Tensor) -> Tensor:
    wide = x.float()
    return ((wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)) * gamma.float()).to(x.dtype)


def rms_norm(machine: Machine) -> Iterator[Row]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def ours(x: Tensor, gamma: Tensor) -> Tensor:
        return npu.npu_rms_norm(x, gamma, 1e-6)[0]

    def liger(x: Tensor, gamma: Tensor) -> Tensor:
        return LigerRMSNormFunction.apply(x, gamma, 1e-6, 0.0, "llama", False)

    def aten(x: Tensor, gamma: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), gamma, 1e-6)

    def exact(x: Tensor, gamma: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gamma

    worst = max(compare(ours, exact, random(n, d), random(d)) for n, d in ((301, HIDDEN), (5, 1536), (1, 100)))
    for rows in (4096, 16384):
        x, gamma, dy = random(rows, HIDDEN, grad=True), random(HIDDEN, grad=True), random(rows, HIDDEN)
        ways = {"small ops": small_norm, "aten": aten, "Liger": liger, "ours": ours}
        with torch.no_grad():
            forward = {name: forward_ms(partial(way, x, gamma)) for name, way in ways.items()}
            host = host_us(partial(ours, x, gamma))
        backward = {name: backward_ms(partial(way, x, gamma), [x, gamma], dy) for name, way in ways.items()}
        for name, times, tensors in (("forward", forward, 2), ("backward", backward, 3)):
            limit = machine.limit_ms(bytes=tensors * x.numel() * 2)
            yield row(f"rms_norm {name}", f"{rows}×{HIDDEN}", times, limit, worst, host if name == "forward" else None)


def row(op: str, shape: str, times: dict[str, float], limit: float, worst: float, host: float | None = None) -> Row:
    times = dict(times)
    return Row(
        op, shape, times.pop("small ops"), ours=times.pop("ours"), peers=times, limit=limit, host_us=host, error=worst
    )


def choices(tokens: int, experts: int, top_k: int = TOP_K) -> Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top_k).indices


def small_permute(x: Tensor, experts: Tensor) -> Tensor:
    """As TorchTitan's MoE does it."""
    return x[torch.argsort(experts.view(-1), stable=True) // experts.shape[1]]


def small_unpermute(rows: Tensor, order: Tensor, scores: Tensor) -> Tensor:
    """As TorchTitan's MoE does it, with the scores after the experts."""
    unsorted = torch.zeros_like(rows)
    unsorted[order] = rows
    unsorted = unsorted.reshape(*scores.shape, rows.shape[1])
    return torch.bmm(scores.unsqueeze(1), unsorted.float()).to(rows.dtype).squeeze(1)


def permute(machine: Machine) -> Iterator[Row]:
    experts = choices(TOKENS, 64)
    x, dy = random(TOKENS, HIDDEN, grad=True), random(TOKENS * TOP_K, HIDDEN)
    some = choices(301, 5, 3)
    worst = compare(
        lambda x: npu.npu_moe_token_permute(x, some)[0], lambda x: small_permute(x, some), random(301, 1001)
    )
    ways = {
        "small ops": lambda: small_permute(x, experts),
        "ours": lambda: npu.npu_moe_token_permute(x, experts)[0],
    }
    with torch.no_grad():
        forward = {name: forward_ms(way) for name, way in ways.items()}
        host = host_us(ways["ours"])
    backward = {name: backward_ms(way, [x], dy) for name, way in ways.items()}
    shape, moved = f"{TOKENS}×{HIDDEN}, top {TOP_K}", (x.numel() + dy.numel()) * 2
    yield row("permute forward", shape, forward, machine.limit_ms(bytes=moved), worst, host)
    yield row("permute backward", shape, backward, machine.limit_ms(bytes=moved), worst)

    places = npu.npu_moe_token_permute(x.detach(), experts)[1]
    order = experts.view(-1).argsort(stable=True)
    rows, dy = dy.requires_grad_(), x.detach()
    scores = torch.rand(TOKENS, TOP_K, device="cuda").requires_grad_()
    ways = {
        "small ops": lambda: small_unpermute(rows, order, scores),
        "ours": lambda: npu.npu_moe_token_unpermute(rows, places, scores),
    }
    some_places, some_order = npu.npu_moe_token_permute(random(301, 8), some)[1], some.view(-1).argsort(stable=True)

    def exact(rows: Tensor, scores: Tensor) -> Tensor:
        unsorted = torch.empty_like(rows).index_copy(0, some_order, rows)
        return (unsorted.view(301, 3, -1) * scores.unsqueeze(-1)).sum(1)

    worst = compare(
        lambda rows, scores: npu.npu_moe_token_unpermute(rows, some_places, scores),
        exact,
        random(903, 1001),
        random(301, 3),
    )
    with torch.no_grad():
        forward = {name: forward_ms(way) for name, way in ways.items()}
        host = host_us(ways["ours"])
    backward = {name: backward_ms(way, [rows, scores], dy) for name, way in ways.items()}
    yield row("unpermute forward", shape, forward, machine.limit_ms(bytes=moved), worst, host)
    moved = (dy.numel() + 2 * rows.numel()) * 2
    yield row("unpermute backward", shape, backward, machine.limit_ms(bytes=moved), worst)


def swiglu(machine: Machine) -> Iterator[Row]:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def small(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    rows = TOKENS * TOP_K
    x, dy = random(rows, 2 * EXPERT_HIDDEN, grad=True), random(rows, EXPERT_HIDDEN)
    halves = [half.detach().contiguous().requires_grad_() for half in x.chunk(2, -1)]
    worst = max(compare(npu.npu_swiglu, small, random(n, d)) for n, d in ((301, 4096), (3, 1002)))
    with torch.no_grad():
        forward = {
            "small ops": forward_ms(lambda: small(x)),
            "Liger": forward_ms(lambda: LigerSiLUMulFunction.apply(*halves)),
            "ours": forward_ms(lambda: npu.npu_swiglu(x)),
        }
        host = host_us(lambda: npu.npu_swiglu(x))
    backward = {
        "small ops": backward_ms(lambda: small(x), [x], dy),
        "ours": backward_ms(lambda: npu.npu_swiglu(x), [x], dy),
    }
    shape = f"{rows}×2·{EXPERT_HIDDEN}"
    yield row("swiglu forward", shape, forward, machine.limit_ms(bytes=3 * dy.numel() * 2), worst, host)
    yield row("swiglu backward", shape, backward, machine.limit_ms(bytes=5 * dy.numel() * 2), worst)


def rotary(machine: Machine) -> Iterator[Row]:
    from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb

    heads, whole, size = 128, 192, 64
    q, dy = random(1, TOKENS, heads, whole, grad=True), random(1, TOKENS, heads, size)
    angles = torch.rand(TOKENS, size // 2, device="cuda") * 6.28
    turns = torch.polar(torch.ones_like(angles), angles)
    cos, sin = (t.repeat_interleave(2, -1).view(1, TOKENS, 1, size) for t in (angles.cos(), angles.sin()))

    def exact(x: Tensor) -> Tensor:
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * cos.to(BF16).to(x.dtype) + turned * sin.to(BF16).to(x.dtype)

    worst = compare(lambda x: npu.npu_rotary_mul(x, cos, sin, "interleave"), exact, random(1, TOKENS, 3, size))
    ways = {  # on the last channels of each head, where they lie
        "small ops": lambda: apply_rotary_emb(q[..., -size:].contiguous(), turns),
        "ours": lambda: npu.npu_rotary_mul(q[..., -size:], cos, sin, "interleave"),
    }
    part = q.detach()[..., -size:].contiguous().requires_grad_()
    backward_ways = {
        "small ops": lambda: apply_rotary_emb(part, turns),
        "ours": lambda: npu.npu_rotary_mul(part, cos, sin, "interleave"),
    }
    with torch.no_grad():
        forward = {name: forward_ms(way) for name, way in ways.items()}
        host = host_us(ways["ours"])
    backward = {name: backward_ms(way, [part], dy) for name, way in backward_ways.items()}
    shape = f"{TOKENS}×{heads}×{size}"
    yield row("rotary forward", shape, forward, machine.limit_ms(bytes=2 * dy.numel() * 2), worst, host)
    # the op gives the gradients of the angles besides, which read the input
    yield row("rotary backward", shape, backward, machine.limit_ms(bytes=3 * dy.numel() * 2), worst)


def loop(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2])
    for rows, matrix, result in zip(x.split(sizes), weight, out.split(sizes), strict=True):
        torch.mm(rows, matrix, out=result)
    return out


def loop_of_sums(x: Tensor, dy: Tensor, sizes: list[int]) -> Tensor:
    out = x.new_empty(len(sizes), x.shape[1], dy.shape[1])
    for rows, others, result in zip(x.split(sizes), dy.split(sizes), out, strict=True):
        torch.mm(rows.t(), others, out=result)
    return out


def product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int = 0) -> Tensor:
    keywords = {"group_list": counts, "split_item": 3, "group_type": group_type, "group_list_type": 1}
    return npu.npu_grouped_matmul([x], [weight], **keywords)[0]


def grouped_matmul(machine: Machine) -> Iterator[Row]:
    from torchtitan_npu.ops.grouped_matmul_function import grouped_matmul as differentiable
    from torchtitan_npu.ops.triton import grouped_matmul as kernels

    sizes = [513, 0, 1023, 7, 128, 0]
    counts = torch.tensor(sizes, device="cuda")
    x, weight = random(sum(sizes), 512), random(len(sizes), 512, 384)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([rows @ matrix for rows, matrix in zip(x.split(sizes), weight, strict=True)])

    worst = compare(lambda x, weight: differentiable(x, weight, counts), exact, x, weight)
    wide = exact(x.double(), weight.double())
    for given in (weight, weight.mT.contiguous().mT):
        worst = max(worst, error(kernels.rows_product(x, given, counts, False), wide))
    dy = random(sum(sizes), 384)
    sums = torch.stack([a.t() @ b for a, b in zip(x.double().split(sizes), dy.double().split(sizes), strict=True)])
    worst = max(worst, error(kernels.sums_product(x.t(), dy, counts, False), sums))

    rows = TOKENS * TOP_K
    for experts in (8, 64):
        sizes = [rows // experts] * experts
        counts = torch.tensor(sizes, device="cuda")
        ends = counts.cumsum(0).int()
        x, dy = random(rows, HIDDEN), random(rows, EXPERT_HIDDEN)
        weight = random(experts, EXPERT_HIDDEN, HIDDEN).mT  # as a checkpoint holds it
        limit = machine.limit_ms(flops=2 * rows * HIDDEN * EXPERT_HIDDEN)
        shape = f"{rows}×{HIDDEN}×{EXPERT_HIDDEN}, {experts} experts"
        for name, a, b, group_type in (
            ("forward", x, weight, 0),
            ("dX", dy, weight.mT, 0),
            ("dW", x.t(), dy, 2),
        ):
            ours = partial(product, a, b, counts, group_type)
            small = partial(loop_of_sums, x, dy, sizes) if group_type else partial(loop, a, b, sizes)
            triton_kernel = kernels.sums_product if group_type else kernels.rows_product
            runs = {
                "small ops": small,
                "torch._grouped_mm": partial(torch._grouped_mm, a, b, offs=ends),
                "Triton": partial(triton_kernel, a, b, counts, False),
                "ours": ours,
            }
            # in turns, and each time in the other order: the clock falls with what was multiplied before
            orders = [list(runs), list(runs)[::-1]] * 3
            rounds = [{name: forward_ms(runs[name]) for name in order} for order in orders]
            times = {name: statistics.median(one[name] for one in rounds) for name in runs}
            host = host_us(ours)
            yield row(f"grouped_matmul {name}", shape, times, limit, worst, host)


def sweep(machine: Machine) -> None:
    """Other configurations of our kernels, best first; one that does not compile is reported and left out."""
    from torchtitan_npu.ops.triton import grouped_matmul as gmm
    from torchtitan_npu.ops.triton import rms_norm as norm

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
                times.append((forward_ms(partial(run, config=config)), config))
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
        counts = torch.full((experts,), rows // experts, device="cuda")
        x, dy, weight = random(rows, HIDDEN), random(rows, EXPERT_HIDDEN), random(experts, EXPERT_HIDDEN, HIDDEN).mT
        limit = machine.limit_ms(flops=2 * rows * HIDDEN * EXPERT_HIDDEN)
        for name, kernel, a, b in (
            ("forward", gmm.rows_product, x, weight),
            ("dX", gmm.rows_product, dy, weight.mT),
            ("dW", gmm.sums_product, x.t(), dy),
        ):
            expected = gmm.torch_product(a, b, counts, False)  # of a few hundred: a rounding is up to 1
            configs = tiles if experts == 8 else tiles[:3]
            run = partial(kernel, a, b, counts, False)
            of(f"grouped_matmul {name}, {experts} experts", run, configs, limit, expected)


OPS = {f.__name__: f for f in (rms_norm, permute, swiglu, rotary, grouped_matmul)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(OPS), help="the ops, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="time other configurations of our kernels instead")
    parser.add_argument("--json", type=Path, help="where the rows go besides")
    args = parser.parse_args()
    if unknown := set(args.only.split(",")) - set(OPS):
        parser.error(f"--only takes {', '.join(OPS)}, not {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("basic_kernels.py measures a GPU, and there is none here")

    from torchtitan_npu import platform

    platform.prepare()

    torch.manual_seed(0)
    machine = measure_machine()
    rates = {"copy_GB_s": machine.copy_rate / 1e9, "matmul_TFLOP_s": machine.matmul_rate / 1e12}
    print(torch.cuda.get_device_name(), ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    if args.sweep:
        sweep(machine)
        return
    print(
        "| op | shape | small ops, ms | best peer, ms | ours, ms | limit, ms | of the limit | faster | host | error |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    for name in args.only.split(","):
        for one in OPS[name](machine):
            rows.append(one)
            print(one.line(), flush=True)
        torch.cuda.empty_cache()
    if args.json:
        write(args.json, [asdict(one) for one in rows], **rates)


if __name__ == "__main__":
    main()
