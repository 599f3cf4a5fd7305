"""Norms, rotations and activations: operators that work on every token by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from gpu_timing import Machine, Run, backward_ms, compiled, forward_ms, host_us
from op_rows import BF16, EXPERT_HIDDEN, HIDDEN, TOKENS, TOP_K, Row, compare, error, random, row
from torch import Tensor

npu = torch.ops.npu


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
        functions = {"small ops": small_norm, "compiled": compiled(small_norm), "aten": aten, "Liger": liger}
        ways = {name: partial(way, x, gamma) for name, way in (functions | {"ours": ours}).items()}
        with torch.no_grad():
            forward = forward_ms(ways)
            host = host_us(ways["ours"])
            rstd = npu.npu_rms_norm(x, gamma, 1e-6)[1]
        # autograd casts gamma's gradient, which the operator gives in float32: a kernel more
        operator = partial(npu.npu_rms_norm_backward, dy, x.detach(), gamma.detach(), rstd)
        backward = backward_ms(ways, [x, gamma], dy, besides={"operator": operator})
        ours_alone = backward.pop("operator")
        alone = backward | {"ours": ours_alone}
        passes = (("forward", forward, 2), ("backward", backward, 3), ("backward, operator", alone, 3))
        for name, times, tensors in passes:
            limit = machine.limit_ms(bytes=tensors * x.numel() * 2)
            yield row(f"rms_norm {name}", f"{rows}×{HIDDEN}", times, limit, worst, host if name == "forward" else None)


def add_rms_norm(machine: Machine) -> Iterator[Row]:
    def small(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        x = x1 + x2
        return small_norm(x, gamma), x

    worst = 0.0
    for shape in ((301, HIDDEN), (TOKENS, HIDDEN)):
        x1, x2, gamma = random(*shape), random(*shape), random(HIDDEN)
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, 1e-6)
        wide = x.double()  # what is normalised is the rounded sum
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * gamma.double()
        worst = max(worst, error(y, exact), error(x, x1.double() + x2.double()))
    ways: dict[str, Run] = {
        "small ops": partial(small, x1, x2, gamma),
        "compiled": partial(compiled(small), x1, x2, gamma),
        "ours": partial(npu.npu_add_rms_norm, x1, x2, gamma, 1e-6),
    }
    limit = machine.limit_ms(bytes=4 * x1.numel() * 2)
    yield row("add_rms_norm forward", f"{TOKENS}×{HIDDEN}", forward_ms(ways), limit, worst, host_us(ways["ours"]))


def swiglu(machine: Machine) -> Iterator[Row]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    def small(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    rows = TOKENS * TOP_K
    x, dy = random(rows, 2 * EXPERT_HIDDEN, grad=True), random(rows, EXPERT_HIDDEN)
    worst = max(compare(npu.npu_swiglu, small, random(n, d)) for n, d in ((301, 4096), (3, 1002)))
    ways: dict[str, Run] = {
        "small ops": lambda: small(x),
        "compiled": partial(compiled(small), x),
        "Liger": lambda: LigerFusedGateUpSiLUMulFunction.apply(x),
        "ours": lambda: npu.npu_swiglu(x),
    }
    with torch.no_grad():
        forward = forward_ms(ways)
        host = host_us(ways["ours"])
    backward = backward_ms(ways, [x], dy)
    shape = f"{rows}×2·{EXPERT_HIDDEN}"
    yield row("swiglu forward", shape, forward, machine.limit_ms(bytes=3 * dy.numel() * 2), worst, host)
    yield row("swiglu backward", shape, backward, machine.limit_ms(bytes=5 * dy.numel() * 2), worst)


def rotary(machine: Machine) -> Iterator[Row]:
    """Pairs of the last 64 channels of a head, as DeepSeek's; halves of a whole head, as Qwen3's."""
    yield from rotary_in(machine, "interleave", heads=128, whole=192, size=64)
    yield from rotary_in(machine, "half", heads=32, whole=128, size=128)
    yield from applied_rotary(machine)


def textbook(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    if mode == "interleave":
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def applied_rotary(machine: Machine) -> Iterator[Row]:
    """Queries and keys in one call, of halves. Forward only: torch_npu has no gradient for it."""
    from liger_kernel.ops.rope import LigerRopeFunction

    query, key = random(1, TOKENS, 32, 128), random(1, TOKENS, 8, 128)
    angles = (torch.rand(1, TOKENS, 1, 64, device="cuda") * 6.28).repeat(1, 1, 1, 2)
    cos, sin = angles.cos().to(BF16), angles.sin().to(BF16)

    def small(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return textbook(query, cos, sin, "half"), textbook(key, cos, sin, "half")

    def liger() -> tuple[Tensor, ...]:
        return LigerRopeFunction.apply(query.transpose(1, 2), key.transpose(1, 2), cos[:, :, 0], sin[:, :, 0])

    ways: dict[str, Run] = {
        "small ops": partial(small, query, key),
        "compiled": partial(compiled(small), query, key),
        "ours": partial(npu.npu_apply_rotary_pos_emb, query, key, cos, sin),
    }
    worst = max(map(error, ways["ours"](), small(query.double(), key.double())))
    ways["Liger"] = liger  # in place, so it comes after the comparison
    shape, limit = f"{TOKENS}×(32 + 8)×128, halves", machine.limit_ms(bytes=2 * (query.nbytes + key.nbytes))
    yield row("apply_rotary_pos_emb forward", shape, forward_ms(ways), limit, worst, host_us(ways["ours"]))


def rotary_in(machine: Machine, mode: str, heads: int, whole: int, size: int) -> Iterator[Row]:
    from liger_kernel.ops.rope import LigerRopeFunction
    from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb

    q, dy = random(1, TOKENS, heads, whole, grad=True), random(1, TOKENS, heads, size)
    angles = torch.rand(TOKENS, size // 2, device="cuda") * 6.28
    turns = torch.polar(torch.ones_like(angles), angles)
    both = angles.repeat_interleave(2, -1) if mode == "interleave" else angles.repeat(1, 2)
    cos, sin = (t.view(1, TOKENS, 1, size).to(BF16) for t in (both.cos(), both.sin()))

    def small(x: Tensor) -> Tensor:
        return textbook(x, cos, sin, mode)

    key = random(1, TOKENS, 1, size)

    def liger(x: Tensor) -> Tensor:
        """It turns the halves of a head, in place, and a key besides."""
        return LigerRopeFunction.apply(x.transpose(1, 2), key.transpose(1, 2), cos[:, :, 0], sin[:, :, 0])[0]

    def ours(x: Tensor) -> Tensor:
        return npu.npu_rotary_mul(x, cos, sin, mode)

    worst = compare(ours, small, random(1, TOKENS, 3, size))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        # TorchTitan's complex numbers, which torch.compile leaves as they are; of halves it has the textbook's
        "small ops": (lambda x: apply_rotary_emb(x, turns)) if mode == "interleave" else small,
        "compiled": compiled(small),
        "Liger" if mode == "half" else "Liger, halves": liger,
        "ours": ours,
    }
    with torch.no_grad():  # on the last channels of each head, where they lie
        ways: dict[str, Run] = {name: partial(way, q[..., -size:]) for name, way in functions.items()}
        forward = forward_ms(ways)
        host = host_us(ways["ours"])
    part = q.detach()[..., -size:].contiguous().requires_grad_()
    ways = {name: partial(way, part) for name, way in functions.items()}
    ways |= {name: lambda: liger(part).transpose(1, 2) for name in ways if name.startswith("Liger")}
    backward = backward_ms(ways, [part], dy)
    shape = f"{TOKENS}×{heads}×{size}, {'pairs' if mode == 'interleave' else 'halves'}"
    yield row("rotary forward", shape, forward, machine.limit_ms(bytes=2 * dy.numel() * 2), worst, host)
    # the op gives the gradients of the angles besides, which read the input
    yield row("rotary backward", shape, backward, machine.limit_ms(bytes=3 * dy.numel() * 2), worst)
