#!/usr/bin/env python
"""Measure the basic fused operators on a GPU, forward and backward: eager, the best public kernel, ours, and the limit.

    python tools/bench/basic_kernels.py [--only rms_norm rotary grouped_matmul] [--json FILE]

Each operator is first compared with its reference in float64, on groups and rows of irregular sizes. Then it is timed
in bfloat16 on an otherwise idle device (``harness.device_ms``). The limit is the bytes to move at the rate of a device
copy, or the operations at the rate of a matmul, both measured in the same run. ``host`` is the host time of our launch.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from harness import (
    BF16,
    EXPERT_HIDDEN,
    HIDDEN,
    TOKENS,
    TOP_K,
    Machine,
    Row,
    Run,
    backward_ms,
    backward_of,
    compare,
    compiled,
    error,
    forward_ms,
    host_us,
    launches,
    measure_machine,
    need_gpu,
    op_line,
    op_row,
    parser_of,
    printed,
    random_tensor,
    size,
    store,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import torchtitan_npu.ops  # noqa: F401  (defines npu::)
from torchtitan_npu.ops.fusion_attention import op as fused_attention
from torchtitan_npu.ops.fusion_attention.op import causal_mask

npu = torch.ops.npu


def both_passes(
    op: str,
    shape: str,
    runs: Mapping[str, Run],
    inputs: Sequence[Tensor],
    dy: Tensor,
    limits: tuple[float, float],
    worst: float,
    backwards: Mapping[str, Run] | None = None,
) -> Iterator[Row]:
    """Yield the rows of the forward and of the backward pass.

    Args:
        inputs: the tensors whose gradients the backward pass computes from ``dy``, the gradient of the output.
        limits: milliseconds that the hardware needs at least for each pass.
        worst: the largest error, see :func:`harness.op_row`.
        backwards: the forward passes whose backward passes are measured, if they are not ``runs``.
    """
    with torch.no_grad():
        forward, host = forward_ms(runs, budget_ms=100), host_us(runs["ours"])
    yield op_row(f"{op} forward", shape, forward, limits[0], worst, host)
    yield op_row(f"{op} backward", shape, backward_ms(backwards or runs, inputs, dy), limits[1], worst)


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

    worst = max(
        compare(ours, exact, random_tensor(n, d), random_tensor(d)) for n, d in ((301, HIDDEN), (5, 1536), (1, 100))
    )
    for rows in (4096, 16384):
        x, gamma = random_tensor(rows, HIDDEN, grad=True), random_tensor(HIDDEN, grad=True)
        dy = random_tensor(rows, HIDDEN)
        functions = {"small ops": small_norm, "compiled": compiled(small_norm), "aten": aten, "Liger": liger}
        runs = {name: partial(function, x, gamma) for name, function in (functions | {"ours": ours}).items()}
        with torch.no_grad():
            forward, host = forward_ms(runs), host_us(runs["ours"])
            rstd = npu.npu_rms_norm(x, gamma, 1e-6)[1]
        operator = partial(npu.npu_rms_norm_backward, dy, x.detach(), gamma.detach(), rstd)
        backward = backward_ms(runs, [x, gamma], dy, operator=operator)
        # autograd casts the float32 gradient of gamma with another kernel
        alone = backward.pop("operator")
        shape, one = f"{rows}×{HIDDEN}", machine.limit_ms(bytes=x.numel() * 2)
        yield op_row("rms_norm forward", shape, forward, 2 * one, worst, host)
        yield op_row("rms_norm backward", shape, backward, 3 * one, worst)
        yield op_row("rms_norm backward, operator", shape, backward | {"ours": alone}, 3 * one, worst)


def add_rms_norm(machine: Machine) -> Iterator[Row]:
    def small(x1: Tensor, x2: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        x = x1 + x2
        return small_norm(x, gamma), x

    worst = 0.0
    for shape in ((301, HIDDEN), (TOKENS, HIDDEN)):
        x1, x2, gamma = random_tensor(*shape), random_tensor(*shape), random_tensor(HIDDEN)
        y, _, x = npu.npu_add_rms_norm(x1, x2, gamma, 1e-6)
        wide = x.double()  # the rounded sum is normalized
        exact = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * gamma.double()
        worst = max(worst, error(y, exact), error(x, x1.double() + x2.double()))
    runs: dict[str, Run] = {
        "small ops": partial(small, x1, x2, gamma),
        "compiled": partial(compiled(small), x1, x2, gamma),
        "ours": partial(npu.npu_add_rms_norm, x1, x2, gamma, 1e-6),
    }
    limit = machine.limit_ms(bytes=4 * x1.numel() * 2)
    yield op_row("add_rms_norm forward", f"{TOKENS}×{HIDDEN}", forward_ms(runs), limit, worst, host_us(runs["ours"]))


def swiglu(machine: Machine) -> Iterator[Row]:
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    def small(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return F.silu(a) * b

    rows = TOKENS * TOP_K
    x, dy = random_tensor(rows, 2 * EXPERT_HIDDEN, grad=True), random_tensor(rows, EXPERT_HIDDEN)
    worst = max(compare(npu.npu_swiglu, small, random_tensor(n, d)) for n, d in ((301, 4096), (3, 1002)))
    runs: dict[str, Run] = {
        "small ops": lambda: small(x),
        "compiled": partial(compiled(small), x),
        "Liger": lambda: LigerFusedGateUpSiLUMulFunction.apply(x),
        "ours": lambda: npu.npu_swiglu(x),
    }
    one = machine.limit_ms(bytes=dy.numel() * 2)
    yield from both_passes("swiglu", f"{rows}×2·{EXPERT_HIDDEN}", runs, [x], dy, (3 * one, 5 * one), worst)


def rotary(machine: Machine) -> Iterator[Row]:
    """Measure interleaved pairs of the last 64 channels (DeepSeek) and halves of all channels (Qwen3)."""
    yield from rotary_in(machine, "interleave", heads=128, width=192, size=64)
    yield from rotary_in(machine, "half", heads=32, width=128, size=128)


def textbook(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    if mode == "interleave":
        rotated = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        first, second = x.chunk(2, -1)
        rotated = torch.cat((-second, first), -1)
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)


def rotary_in(machine: Machine, mode: str, heads: int, width: int, size: int) -> Iterator[Row]:
    from liger_kernel.ops.rope import LigerRopeFunction
    from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb

    q, dy = random_tensor(1, TOKENS, heads, width, grad=True), random_tensor(1, TOKENS, heads, size)
    angles = torch.rand(TOKENS, size // 2, device="cuda") * 6.28
    turns = torch.polar(torch.ones_like(angles), angles)
    both = angles.repeat_interleave(2, -1) if mode == "interleave" else angles.repeat(1, 2)
    cos, sin = (t.view(1, TOKENS, 1, size).to(BF16) for t in (both.cos(), both.sin()))

    def small(x: Tensor) -> Tensor:
        return textbook(x, cos, sin, mode)

    key = random_tensor(1, TOKENS, 1, size)

    def liger(x: Tensor) -> Tensor:
        """Rotate halves of a head, and a key, in-place."""
        return LigerRopeFunction.apply(x.transpose(1, 2), key.transpose(1, 2), cos[:, :, 0], sin[:, :, 0])[0]

    def ours(x: Tensor) -> Tensor:
        return npu.npu_rotary_mul(x, cos, sin, mode)

    worst = compare(ours, small, random_tensor(1, TOKENS, 3, size))
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        # TorchTitan's complex numbers, which torch.compile leaves as they are; of halves it has the textbook's
        "small ops": (lambda x: apply_rotary_emb(x, turns)) if mode == "interleave" else small,
        "compiled": compiled(small),
        "Liger" if mode == "half" else "Liger, halves": liger,
        "ours": ours,
    }
    # forward, a strided view of the last channels of each head
    runs: dict[str, Run] = {name: partial(function, q[..., -size:]) for name, function in functions.items()}
    part = q.detach()[..., -size:].contiguous().requires_grad_()
    backwards: dict[str, Run] = {name: partial(function, part) for name, function in functions.items()}
    backwards |= {name: lambda: liger(part).transpose(1, 2) for name in runs if name.startswith("Liger")}
    shape = f"{TOKENS}×{heads}×{size}, {'pairs' if mode == 'interleave' else 'halves'}"
    # The backward operator also returns the gradients of the angles, which read the input.
    one = machine.limit_ms(bytes=dy.numel() * 2)
    yield from both_passes("rotary", shape, runs, [part], dy, (2 * one, 3 * one), worst, backwards)


def random_experts(tokens: int, experts: int, top_k: int = TOP_K) -> Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top_k).indices


def small_permute(x: Tensor, experts: Tensor) -> Tensor:
    """Permute like TorchTitan's MoE."""
    return x[torch.argsort(experts.view(-1), stable=True) // experts.shape[1]]


def small_unpermute(rows: Tensor, order: Tensor, scores: Tensor) -> Tensor:
    """Unpermute like TorchTitan's MoE, with the scores after the experts."""
    unsorted = small_unsort(rows, order).reshape(*scores.shape, rows.shape[1])
    return torch.bmm(scores.unsqueeze(1), unsorted.float()).to(rows.dtype).squeeze(1)


def small_unsort(rows: Tensor, order: Tensor) -> Tensor:
    unsorted = torch.zeros_like(rows)
    unsorted[order] = rows
    return unsorted


def gathered_unpermute(rows: Tensor, positions: Tensor, scores: Tensor) -> Tensor:
    """Unpermute as a sum over gathered rows, which compiles to one kernel."""
    slots = rows[positions].view(*scores.shape, rows.shape[1])
    return (slots.float() * scores.unsqueeze(-1)).sum(1).to(rows.dtype)


def permute(machine: Machine) -> Iterator[Row]:
    experts = random_experts(TOKENS, 64)
    x, dy = random_tensor(TOKENS, HIDDEN, grad=True), random_tensor(TOKENS * TOP_K, HIDDEN)
    some = random_experts(301, 5, 3)
    worst = compare(
        lambda x: npu.npu_moe_token_permute(x, some)[0], lambda x: small_permute(x, some), random_tensor(301, 1001)
    )
    runs: dict[str, Run] = {
        "small ops": lambda: small_permute(x, experts),
        "compiled": partial(compiled(small_permute), x, experts),
        "ours": lambda: npu.npu_moe_token_permute(x, experts)[0],
    }
    shape, moved = f"{TOKENS}×{HIDDEN}, top {TOP_K}", (x.numel() + dy.numel()) * 2
    limit = machine.limit_ms(bytes=moved)
    yield from both_passes("permute", shape, runs, [x], dy, (limit, limit), worst)

    positions = npu.npu_moe_token_permute(x.detach(), experts)[1]
    order = experts.view(-1).argsort(stable=True)
    rows, dy = dy.requires_grad_(), x.detach()
    scores = torch.rand(TOKENS, TOP_K, device="cuda").requires_grad_()
    runs = {
        "small ops": lambda: small_unpermute(rows, order, scores),
        "compiled": partial(compiled(small_unpermute), rows, order, scores),
        "compiled gather": partial(compiled(gathered_unpermute), rows, positions, scores),
        "ours": lambda: npu.npu_moe_token_unpermute(rows, positions, scores),
    }
    some_order = some.view(-1).argsort(stable=True)
    some_positions = npu.npu_moe_token_permute(random_tensor(301, 8), some)[1]

    def exact(rows: Tensor, scores: Tensor) -> Tensor:
        unsorted = torch.empty_like(rows).index_copy(0, some_order, rows)
        return (unsorted.view(301, 3, -1) * scores.unsqueeze(-1)).sum(1)

    worst = compare(
        lambda rows, scores: npu.npu_moe_token_unpermute(rows, some_positions, scores),
        exact,
        random_tensor(903, 1001),
        random_tensor(301, 3),
    )
    limits = limit, machine.limit_ms(bytes=(dy.numel() + 2 * rows.numel()) * 2)
    yield from both_passes("unpermute", shape, runs, [rows, scores], dy, limits, worst)

    runs = {
        "small ops": lambda: small_unsort(rows, order),
        "compiled": partial(compiled(small_unsort), rows, order),
        "index_select": lambda: rows.index_select(0, positions),
        "ours": lambda: npu.npu_moe_token_unpermute(rows, positions),
    }
    worst = compare(
        lambda rows: npu.npu_moe_token_unpermute(rows, some_positions),
        lambda rows: rows[some_positions],
        random_tensor(903, 1001),
    )
    shape, limit = f"{TOKENS * TOP_K}×{HIDDEN}", machine.limit_ms(bytes=2 * rows.numel() * 2)
    name = "unpermute without scores"
    yield from both_passes(name, shape, runs, [rows], torch.randn_like(rows), (limit, limit), worst)


EXPERTS, GROUPS, LIMITED_GROUPS = 256, 8, 4


def gating(machine: Machine) -> Iterator[Row]:
    """Measure the router of DeepSeek-V3.2 without its linear layer, with the counting of tokens."""
    from torchtitan.models.moe.moe import TokenChoiceTopKRouter

    from torchtitan_npu.converters.base import convert_module
    from torchtitan_npu.converters.gating import NpuRouter

    router = TokenChoiceTopKRouter(8, EXPERTS, GROUPS, LIMITED_GROUPS, TOP_K, "sigmoid", True, 2.5, False)
    router.gate = torch.nn.Identity()  # type: ignore[assignment]  # the input is the logits
    converted = convert_module(router, NpuRouter)
    bias = (random_tensor(EXPERTS) * 0.1).float()  # exact in bfloat16

    def operator(logits: Tensor) -> Tensor:
        groups = {"k_group": LIMITED_GROUPS, "group_count": GROUPS, "group_select_mode": 1}
        keywords = {"norm_type": 1, "out_flag": True, "routed_scaling_factor": 2.5, **groups}
        return npu.npu_moe_gating_top_k(logits, TOP_K, bias=bias.to(logits.dtype), **keywords)[0]

    worst = compare(operator, operator, random_tensor(301, EXPERTS))  # float64 runs the reference
    logits = random_tensor(TOKENS, EXPERTS, grad=True)
    dy = torch.randn(TOKENS, TOP_K, device="cuda")
    functions = {"small ops": router, "compiled": compiled(router), "ours": converted}
    runs: dict[str, Run] = {name: partial(function, logits, bias) for name, function in functions.items()}
    scores: dict[str, Run] = {name: lambda run=run: run()[0] for name, run in runs.items()}
    eager, ours = (
        [launches(run), launches(backward_of(run, [logits], dy))] for run in (scores["small ops"], scores["ours"])
    )
    with torch.no_grad():
        forward, host = forward_ms(runs), host_us(runs["ours"])
    backward = backward_ms(scores, [logits], dy)
    selected = TOKENS * TOP_K * (4 + 4)  # weights, and experts in int32
    limits = logits.numel() * (2 + 4) + selected, logits.numel() * 2 + selected + TOKENS * TOP_K * 4
    for number, (name, times) in enumerate((("forward", forward), ("backward", backward))):
        shape = f"{TOKENS}×{EXPERTS}, top {TOP_K}, launches {eager[number]} → {ours[number]}"
        limit = machine.limit_ms(bytes=limits[number])
        yield op_row(f"gating {name}", shape, times, limit, worst, None if number else host)


def unequal(rows: int, experts: int) -> list[int]:
    """Distribute ``rows``: the n-th expert gets about 1 / n of the first one's rows, the last one none."""
    shares = [1 / (n + 1) for n in range(experts - 1)]
    sizes = [int(rows * share / sum(shares)) for share in shares]
    return [sizes[0] + rows - sum(sizes), *sizes[1:], 0]


def loop(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2])
    for rows, matrix, result in zip(x.split(sizes), weight, out.split(sizes), strict=True):
        torch.mm(rows, matrix, out=result)
    return out


def loop_of_sums(x: Tensor, dy: Tensor, sizes: list[int]) -> Tensor:
    """Multiply ``x`` (M, T) by ``dy`` (T, N), with groups along T."""
    out = x.new_empty(len(sizes), x.shape[0], dy.shape[1])
    for columns, rows, result in zip(x.split(sizes, 1), dy.split(sizes), out, strict=True):
        torch.mm(columns, rows, out=result)
    return out


def product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int = 0) -> Tensor:
    keywords = {"group_list": counts, "split_item": 3, "group_type": group_type, "group_list_type": 1}
    return npu.npu_grouped_matmul([x], [weight], **keywords)[0]


def grouped_matmul(machine: Machine) -> Iterator[Row]:
    from torchtitan_npu.gpu_kernels import grouped_matmul as kernels
    from torchtitan_npu.ops.grouped_matmul.op import grouped_matmul as differentiable

    sizes = [513, 0, 1023, 7, 128, 0]
    counts = torch.tensor(sizes, device="cuda")
    ends = counts.cumsum(0).int()
    x, weight = random_tensor(sum(sizes), 512), random_tensor(len(sizes), 512, 384)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([rows @ matrix for rows, matrix in zip(x.split(sizes), weight, strict=True)])

    worst = compare(lambda x, weight: differentiable(x, weight, counts), exact, x, weight)
    wide = exact(x.double(), weight.double())
    for matrices in (weight, weight.mT.contiguous().mT):
        worst = max(worst, error(kernels.rows_product(x, matrices, ends), wide))
    dy = random_tensor(sum(sizes), 384)
    sums = torch.stack([a.t() @ b for a, b in zip(x.double().split(sizes), dy.double().split(sizes), strict=True)])
    worst = max(worst, error(kernels.sums_product(x.t(), dy, ends), sums))
    total = torch.zeros(sums.shape, device="cuda")
    worst = max(worst, error(npu.npu_grouped_matmul_add_(total, x, dy, counts, group_list_type=1), sums))

    rows = TOKENS * TOP_K
    for experts, sizes in ((8, [rows // 8] * 8), (64, [rows // 64] * 64), (64, unequal(rows, 64))):
        counts = torch.tensor(sizes, device="cuda")
        ends = counts.cumsum(0).int()
        x, dy = random_tensor(rows, HIDDEN), random_tensor(rows, EXPERT_HIDDEN)
        weight = random_tensor(experts, EXPERT_HIDDEN, HIDDEN).mT  # the layout of a checkpoint
        flops, moved = 2 * rows * HIDDEN * EXPERT_HIDDEN, size(x, dy, weight)
        limit = machine.limit_ms(moved, flops)
        shape = f"{rows}×{HIDDEN}×{EXPERT_HIDDEN}, {experts} {'' if len({*sizes}) == 1 else 'unequal '}experts"
        for name, a, b, group_type in (
            ("forward", x, weight, 0),
            ("dX", dy, weight.mT, 0),
            ("dW", dy.t(), x, 2),  # in the layout of the weight
        ):
            ours = partial(product, a, b, counts, group_type)
            small = partial(loop_of_sums if group_type else loop, a, b, sizes)
            triton_kernel = kernels.sums_product if group_type else kernels.rows_product
            runs: dict[str, Run] = {
                "small ops": small,
                "torch._grouped_mm": partial(torch._grouped_mm, a, b, offs=ends),
                "Triton": partial(triton_kernel, a, b, ends),
                "ours": ours,
            }
            yield op_row(f"grouped_matmul {name}", shape, forward_ms(runs, budget_ms=100), limit, worst, host_us(ours))
        # The accumulator is float32, read and written.
        limit = machine.limit_ms(size(x, dy) + 2 * 4 * weight.numel(), flops)
        total = torch.zeros(experts, EXPERT_HIDDEN, HIDDEN, device="cuda")
        runs = {
            "small ops": lambda: total.add_(loop_of_sums(dy.t(), x, sizes)),  # noqa: B023
            "torch._grouped_mm": lambda: total.add_(torch._grouped_mm(dy.t(), x, offs=ends)),  # noqa: B023
            "ours": partial(npu.npu_grouped_matmul_add_, total, dy, x, counts, group_list_type=1),
        }
        yield op_row("grouped_matmul_add", shape, forward_ms(runs, budget_ms=100), limit, worst)


def attention(machine: Machine) -> Iterator[Row]:
    """Measure causal attention as llama3 8B and DeepSeek-V3 call it, and packed documents."""
    yield from causal_attention(machine, "llama3 8B", 8192, heads=32, key_heads=8, width=128, value_width=128)
    yield from causal_attention(machine, "DeepSeek-V3", 4096, heads=128, key_heads=128, width=192, value_width=128)
    yield from packed_attention(machine, [1, 511, 100, 1436, 4096, 2048], heads=32, key_heads=8, width=128)


def causal_attention(
    machine: Machine, model: str, tokens: int, heads: int, key_heads: int, width: int, value_width: int
) -> Iterator[Row]:
    q, k, v = (
        random_tensor(1, tokens, n, d, grad=True)
        for n, d in ((heads, width), (key_heads, width), (key_heads, value_width))
    )
    dy, mask = random_tensor(1, tokens, heads, value_width), causal_mask(q.device)

    def sdpa(*backends: SDPBackend) -> Tensor:
        """Transpose as TorchTitan's models do."""
        query, key, value = (t.transpose(1, 2) for t in (q, k, v))
        with sdpa_kernel(list(backends), set_priority=True):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)

    def ours() -> Tensor:
        return fused_attention.attention(q, k, v, None, mask)

    torchtitans = partial(sdpa, SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    check_against(ours, torchtitans, [q, k, v], dy)
    runs: dict[str, Run] = {"small ops": torchtitans, "ours": ours}
    if width == value_width:
        runs["flash attention"] = partial(sdpa, SDPBackend.FLASH_ATTENTION)
    flops = tokens * tokens * heads * (width + value_width)  # half of the scores are masked
    forward, backward = machine.limit_ms(flops=flops), machine.limit_ms(flops=2.5 * flops)
    shape = f"{tokens}×{heads}×{width}"
    yield from both_passes(f"attention, {model}", shape, runs, [q, k, v], dy, (forward, backward), 0.0)


def packed_attention(machine: Machine, lengths: list[int], heads: int, key_heads: int, width: int) -> Iterator[Row]:
    tokens, ends = sum(lengths), list(itertools.accumulate(lengths))
    q, k, v = (random_tensor(tokens, n, width, grad=True) for n in (heads, key_heads, key_heads))
    dy, mask = random_tensor(tokens, heads, width), causal_mask(q.device)
    starts = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")

    def varlen() -> Tensor:
        longest = max(lengths)
        keys, values = (t.repeat_interleave(heads // key_heads, 1) for t in (k, v))  # torch 2.11 has no enable_gqa
        return cast(Tensor, varlen_attn(q, keys, values, starts, starts, longest, longest, window_size=(-1, 0)))

    def ours() -> Tensor:
        return fused_attention.packed_attention(q, k, v, ends, None, mask)

    check_against(ours, varlen, [q, k, v], dy)
    runs: dict[str, Run] = {"small ops": varlen, "varlen_attn": varlen, "ours": ours}
    flops = sum(n * n for n in lengths) * heads * 2 * width
    shape = f"{tokens}×{heads}×{width}, {len(lengths)} documents"
    forward, backward = machine.limit_ms(flops=flops), machine.limit_ms(flops=2.5 * flops)
    yield from both_passes("attention, packed", shape, runs, [q, k, v], dy, (forward, backward), 0.0)


def check_against(ours: Run, peer: Run, inputs: list[Tensor], dy: Tensor) -> None:
    """Check that the output and gradients differ from the peer's by at most two roundings of their norm."""
    results = []
    for run in (ours, peer):
        y = run()
        results.append([y.detach(), *torch.autograd.grad(y, inputs, dy)])
    for actual, expected in zip(*results, strict=True):
        if (actual - expected).norm() > torch.finfo(BF16).eps * expected.norm():
            raise SystemExit("wrong result: attention differs from the peer's")


OPS = {f.__name__: f for f in (rms_norm, add_rms_norm, gating, permute, swiglu, rotary, grouped_matmul, attention)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(OPS), default=list(OPS))
    args = parser.parse_args()
    need_gpu()
    if importlib.util.find_spec("liger_kernel") is None:
        raise SystemExit("basic_kernels.py needs Liger's kernels: pip install liger-kernel")

    from torchtitan_npu import platform

    platform.prepare()

    torch.manual_seed(0)
    machine = measure_machine()
    rates = machine.rates()
    print(torch.cuda.get_device_name(), ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    print("| op | shape | eager, ms | best peer, ms | ours, ms | limit, ms | of the limit | speed-up | host | error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    store(args.json, printed((OPS[name](machine) for name in args.only), op_line), **rates)


if __name__ == "__main__":
    main()
