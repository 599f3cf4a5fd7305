"""Operators of mixtures of experts: tokens sorted by expert and back, and the experts' products."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from gpu_timing import Machine, Run, backward_ms, compiled, forward_ms, host_us, size
from op_rows import EXPERT_HIDDEN, HIDDEN, TOKENS, TOP_K, Row, compare, error, random, row
from torch import Tensor

npu = torch.ops.npu


def choices(tokens: int, experts: int, top_k: int = TOP_K) -> Tensor:
    return torch.rand(tokens, experts, device="cuda").topk(top_k).indices


def small_permute(x: Tensor, experts: Tensor) -> Tensor:
    """As TorchTitan's MoE does it."""
    return x[torch.argsort(experts.view(-1), stable=True) // experts.shape[1]]


def small_unpermute(rows: Tensor, order: Tensor, scores: Tensor) -> Tensor:
    """As TorchTitan's MoE does it, with the scores after the experts."""
    unsorted = small_unsort(rows, order).reshape(*scores.shape, rows.shape[1])
    return torch.bmm(scores.unsqueeze(1), unsorted.float()).to(rows.dtype).squeeze(1)


def small_unsort(rows: Tensor, order: Tensor) -> Tensor:
    unsorted = torch.zeros_like(rows)
    unsorted[order] = rows
    return unsorted


def gathered_unpermute(rows: Tensor, places: Tensor, scores: Tensor) -> Tensor:
    """The same as one sum over gathered rows, which a compiler makes one kernel of."""
    slots = rows[places].view(*scores.shape, rows.shape[1])
    return (slots.float() * scores.unsqueeze(-1)).sum(1).to(rows.dtype)


def permute(machine: Machine) -> Iterator[Row]:
    experts = choices(TOKENS, 64)
    x, dy = random(TOKENS, HIDDEN, grad=True), random(TOKENS * TOP_K, HIDDEN)
    some = choices(301, 5, 3)
    worst = compare(
        lambda x: npu.npu_moe_token_permute(x, some)[0], lambda x: small_permute(x, some), random(301, 1001)
    )
    ways: dict[str, Run] = {
        "small ops": lambda: small_permute(x, experts),
        "compiled": partial(compiled(small_permute), x, experts),
        "ours": lambda: npu.npu_moe_token_permute(x, experts)[0],
    }
    with torch.no_grad():
        forward = forward_ms(ways)
        host = host_us(ways["ours"])
    backward = backward_ms(ways, [x], dy)
    shape, moved = f"{TOKENS}×{HIDDEN}, top {TOP_K}", (x.numel() + dy.numel()) * 2
    yield row("permute forward", shape, forward, machine.limit_ms(bytes=moved), worst, host)
    yield row("permute backward", shape, backward, machine.limit_ms(bytes=moved), worst)

    places = npu.npu_moe_token_permute(x.detach(), experts)[1]
    order = experts.view(-1).argsort(stable=True)
    rows, dy = dy.requires_grad_(), x.detach()
    scores = torch.rand(TOKENS, TOP_K, device="cuda").requires_grad_()
    ways = {
        "small ops": lambda: small_unpermute(rows, order, scores),
        "compiled": partial(compiled(small_unpermute), rows, order, scores),
        "compiled gather": partial(compiled(gathered_unpermute), rows, places, scores),
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
        forward = forward_ms(ways)
        host = host_us(ways["ours"])
    backward = backward_ms(ways, [rows, scores], dy)
    yield row("unpermute forward", shape, forward, machine.limit_ms(bytes=moved), worst, host)
    moved = (dy.numel() + 2 * rows.numel()) * 2
    yield row("unpermute backward", shape, backward, machine.limit_ms(bytes=moved), worst)

    ways = {
        "small ops": lambda: small_unsort(rows, order),
        "compiled": partial(compiled(small_unsort), rows, order),
        "index_select": lambda: rows.index_select(0, places),
        "ours": lambda: npu.npu_moe_token_unpermute(rows, places),
    }
    worst = compare(
        lambda rows: npu.npu_moe_token_unpermute(rows, some_places), lambda rows: rows[some_places], random(903, 1001)
    )
    with torch.no_grad():
        forward = forward_ms(ways)
        host = host_us(ways["ours"])
    backward = backward_ms(ways, [rows], torch.randn_like(rows))
    shape, limit = f"{TOKENS * TOP_K}×{HIDDEN}", machine.limit_ms(bytes=2 * rows.numel() * 2)
    yield row("unpermute without scores forward", shape, forward, limit, worst, host)
    yield row("unpermute without scores backward", shape, backward, limit, worst)


def re_routing(machine: Machine) -> Iterator[Row]:
    """Tokens of 8 ranks for 8 experts each, which arrive rank by rank."""
    ranks, experts = 8, 8

    def small(x: Tensor, counts: Tensor) -> Tensor:
        of_expert = torch.arange(experts, device="cuda").repeat(ranks)
        of_row = of_expert.repeat_interleave(counts.flatten(), output_size=len(x))
        return x[of_row.argsort(stable=True)]

    for width in (1001, HIDDEN):
        counts = torch.randint(0, 2 * TOKENS // ranks, (ranks, experts), device="cuda")
        x = random(int(counts.sum()), width)
        if not torch.equal(npu.npu_moe_re_routing(x, counts)[0], small(x, counts)):
            raise SystemExit("wrong result: npu_moe_re_routing")
    ways: dict[str, Run] = {
        "small ops": lambda: small(x, counts),
        "ours": lambda: npu.npu_moe_re_routing(x, counts),
    }
    limit, shape = machine.limit_ms(bytes=2 * x.numel() * 2), f"{len(x)}×{HIDDEN}, {ranks} ranks, {experts} experts"
    yield row("re_routing forward", shape, forward_ms(ways), limit, 0.0, host_us(ways["ours"]))


def unequal(rows: int, experts: int) -> list[int]:
    """So many rows, of which the n-th expert has about 1 / n of what the first has, and the last none."""
    shares = [1 / (n + 1) for n in range(experts - 1)]
    sizes = [int(rows * share / sum(shares)) for share in shares]
    return [sizes[0] + rows - sum(sizes), *sizes[1:], 0]


def loop(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[2])
    for rows, matrix, result in zip(x.split(sizes), weight, out.split(sizes), strict=True):
        torch.mm(rows, matrix, out=result)
    return out


def loop_of_sums(x: Tensor, dy: Tensor, sizes: list[int]) -> Tensor:
    """``x`` (M, T), ``dy`` (T, N): the groups are among T."""
    out = x.new_empty(len(sizes), x.shape[0], dy.shape[1])
    for columns, rows, result in zip(x.split(sizes, 1), dy.split(sizes), out, strict=True):
        torch.mm(columns, rows, out=result)
    return out


def product(x: Tensor, weight: Tensor, counts: Tensor, group_type: int = 0) -> Tensor:
    keywords = {"group_list": counts, "split_item": 3, "group_type": group_type, "group_list_type": 1}
    return npu.npu_grouped_matmul([x], [weight], **keywords)[0]


def grouped_matmul(machine: Machine) -> Iterator[Row]:
    from torchtitan_npu.ops.grouped_matmul import triton as kernels
    from torchtitan_npu.ops.grouped_matmul.function import grouped_matmul as differentiable

    sizes = [513, 0, 1023, 7, 128, 0]
    counts = torch.tensor(sizes, device="cuda")
    ends = counts.cumsum(0).int()
    x, weight = random(sum(sizes), 512), random(len(sizes), 512, 384)

    def exact(x: Tensor, weight: Tensor) -> Tensor:
        return torch.cat([rows @ matrix for rows, matrix in zip(x.split(sizes), weight, strict=True)])

    worst = compare(lambda x, weight: differentiable(x, weight, counts), exact, x, weight)
    wide = exact(x.double(), weight.double())
    for given in (weight, weight.mT.contiguous().mT):
        worst = max(worst, error(kernels.rows_product(x, given, ends), wide))
    dy = random(sum(sizes), 384)
    sums = torch.stack([a.t() @ b for a, b in zip(x.double().split(sizes), dy.double().split(sizes), strict=True)])
    worst = max(worst, error(kernels.sums_product(x.t(), dy, ends), sums))
    total = torch.zeros(sums.shape, device="cuda")
    worst = max(worst, error(npu.npu_grouped_matmul_add_(total, x, dy, counts, group_list_type=1), sums))

    rows = TOKENS * TOP_K
    for experts, sizes in ((8, [rows // 8] * 8), (64, [rows // 64] * 64), (64, unequal(rows, 64))):
        counts = torch.tensor(sizes, device="cuda")
        ends = counts.cumsum(0).int()
        x, dy = random(rows, HIDDEN), random(rows, EXPERT_HIDDEN)
        weight = random(experts, EXPERT_HIDDEN, HIDDEN).mT  # as a checkpoint holds it
        flops, moved = 2 * rows * HIDDEN * EXPERT_HIDDEN, size(x, dy, weight)
        limit = machine.limit_ms(moved, flops)
        shape = f"{rows}×{HIDDEN}×{EXPERT_HIDDEN}, {experts} {'' if len({*sizes}) == 1 else 'unequal '}experts"
        for name, a, b, group_type in (
            ("forward", x, weight, 0),
            ("dX", dy, weight.mT, 0),
            ("dW", dy.t(), x, 2),  # in the weight's own layout
        ):
            ours = partial(product, a, b, counts, group_type)
            small = partial(loop_of_sums if group_type else loop, a, b, sizes)
            triton_kernel = kernels.sums_product if group_type else kernels.rows_product
            runs = {
                "small ops": small,
                "torch._grouped_mm": partial(torch._grouped_mm, a, b, offs=ends),
                "Triton": partial(triton_kernel, a, b, ends),
                "ours": ours,
            }
            times = forward_ms(runs, budget_ms=100)
            host = host_us(ours)
            yield row(f"grouped_matmul {name}", shape, times, limit, worst, host)
        # the sum is in float32, and read and written
        limit = machine.limit_ms(size(x, dy) + 2 * 4 * weight.numel(), flops)
        yield row("grouped_matmul_add", shape, added_ms(x, dy, counts, sizes), limit, worst)


def added_ms(x: Tensor, dy: Tensor, counts: Tensor, sizes: list[int]) -> dict[str, float]:
    """The weights' gradient, added to what is there in float32."""
    total, ends = torch.zeros(len(sizes), dy.shape[1], x.shape[1], device="cuda"), counts.cumsum(0).int()
    ways: dict[str, Run] = {
        "small ops": lambda: total.add_(loop_of_sums(dy.t(), x, sizes)),
        "torch._grouped_mm": lambda: total.add_(torch._grouped_mm(dy.t(), x, offs=ends)),
        "ours": lambda: npu.npu_grouped_matmul_add_(total, dy, x, counts, group_list_type=1),
    }
    return forward_ms(ways, budget_ms=100)
