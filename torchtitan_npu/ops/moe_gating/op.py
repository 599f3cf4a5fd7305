"""``npu_moe_gating_top_k`` and its gradient: the experts of each token, and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.autograd import Autograd, save_by_name, saved_by_name
from torchtitan_npu.ops.core.call_description import TensorDescription
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dim, check_dtype, check_shape
from torchtitan_npu.ops.core.op import Limit, Op, declare
from torchtitan_npu.ops.core.samples import EXPERTS, TOKENS, TOP_K, randn
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.core.triton_kernel import kernel
from torchtitan_npu.ops.moe_gating import reference

NPU_EXPERTS = range(2, 2049)


def checks(
    x: Tensor,
    k: int,
    bias: Tensor | None,
    input_ids: Tensor | None,
    tid2eid: Tensor | None,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    **_: Any,
) -> Iterator[str]:
    yield from check_dim("x", x, 2)
    yield from check_dtype("x", x, *FLOATS)
    tokens, experts = x.shape
    if bias is not None:
        yield from check_dtype("bias", bias, x.dtype)
        yield from check_shape("bias", bias, experts)
    for name, value in (("group_select_mode", group_select_mode), ("renorm", renorm), ("norm_type", norm_type)):
        if value not in (0, 1):
            yield f"{name} must be 0 or 1, not {value}"
    if group_count < 1 or experts % group_count:
        yield f"group_count must divide the {experts} experts of x, and {group_count} does not"
    if not 1 <= k_group <= group_count:
        yield f"k_group must be 1 to {group_count}, the group_count, not {k_group}"
    in_group = experts // group_count
    if group_count > 1 and group_select_mode == reference.SUM_OF_TWO_BEST and in_group < 2:
        yield f"group_count must leave 2 experts a group for group_select_mode 1, and {group_count} leaves {in_group}"
    if not 1 <= k <= in_group * k_group:
        yield f"k must be 1 to {in_group * k_group}, the experts in k_group groups, not {k}"
    if (input_ids is None) != (tid2eid is None):
        yield "input_ids and tid2eid must be given together"
    if input_ids is not None and tid2eid is not None:
        yield from check_dtype("input_ids", input_ids, torch.int32, torch.int64)
        yield from check_shape("input_ids", input_ids, tokens)
        yield from check_dtype("tid2eid", tid2eid, torch.int32, torch.int64)
        yield from check_dim("tid2eid", tid2eid, 2)
        yield from check_shape("tid2eid", tid2eid, tid2eid.shape[0], k)


def _norm_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def fake(x: Tensor, k: int, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
    shape = x.shape[0], k
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), x.new_empty(x.shape, dtype=_norm_dtype(x))


def sharding(input_ids: Any, **_: Any) -> Iterator[Strategy]:
    # the experts of a token do not depend on other tokens
    placements: dict[str, Placement] = {"x": Shard(0)}
    if input_ids is not None:
        placements["input_ids"] = Shard(0)
    yield [Shard(0), Shard(0), Shard(0)], placements


def save(
    ctx: Any, output: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, out_flag: bool, **arguments: Any
) -> None:
    if bias is not None and bias.requires_grad:
        raise RuntimeError("npu_moe_gating_top_k: bias must not require a gradient: the operator has none for it")
    _, expert_idx, x_norm = output
    ctx.mark_non_differentiable(expert_idx, x_norm)
    ctx.out_flag = out_flag
    options = {name: arguments[name] for name in ("renorm", "norm_type", "routed_scaling_factor", "eps")}
    save_by_name(ctx, x_norm=x_norm, expertIdx=expert_idx, **options)


fused = kernel(reference.npu_moe_gating_top_k)


def cuda(norm_type: int, input_ids: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Run the Triton kernel, or the reference for softmax and for a table, which no converter uses."""
    run = fused if norm_type == reference.SIGMOID and input_ids is None else reference.npu_moe_gating_top_k
    return run(norm_type=norm_type, input_ids=input_ids, **arguments)


def backward(npu: Any, ctx: Any, grad_y: Tensor, *_: None) -> dict[str, Tensor]:
    if not ctx.out_flag:
        raise UsageError("npu_moe_gating_top_k: out_flag must be True for a gradient, which needs that output")
    return {"x": npu.npu_moe_gating_top_k_backward(grad_y=grad_y, **saved_by_name(ctx))}


def sample(bias: TensorDescription | None = None, group_count: int = 1, **_: Any) -> dict[str, Any]:
    # scores far apart, so that rounding does not change which experts are best
    experts = max(EXPERTS, 4 * group_count)
    x = torch.stack([torch.randperm(experts) for _ in range(TOKENS)]).to(torch.bfloat16) * (4 / experts)
    call = {"x": x, "k": TOP_K, "norm_type": reference.SIGMOID, "out_flag": True}
    return call if bias is None else call | {"bias": 2 * (torch.arange(experts) % 2)}  # odd experts first


declare(
    Op(
        schema="npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
        "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, "
        "int norm_type=0, bool out_flag=False, float routed_scaling_factor=1., float eps=9.9999999999999995e-21) "
        "-> (Tensor, Tensor, Tensor)",
        reference=reference.npu_moe_gating_top_k,
        cuda=cuda,
        fake=fake,
        checks=checks,
        sharding=sharding,
        autograd=Autograd(save, backward),
        limits=(
            Limit("x.dtype", lambda x, **_: x.dtype, NPU_FLOATS),
            Limit("the number of experts", lambda x, **_: x.shape[1], NPU_EXPERTS),
            Limit(
                "the number of experts in a group",
                lambda x, group_count, **_: x.shape[1] // group_count,
                range(3, NPU_EXPERTS.stop),
            ),
            Limit(
                "the number of experts, each group rounded up to 32",
                lambda x, group_count, **_: -(-x.shape[1] // group_count // 32) * 32 * group_count,
                NPU_EXPERTS,
            ),
            Limit("renorm", lambda renorm, **_: renorm, (0,)),
        ),
        sample=sample,
    )
)


def backward_checks(
    x_norm: Tensor, grad_y: Tensor, expertIdx: Tensor, renorm: int, norm_type: int, **_: Any
) -> Iterator[str]:
    yield from check_dim("x_norm", x_norm, 2)
    yield from check_dtype("x_norm", x_norm, torch.float32, torch.float64)
    yield from check_dim("grad_y", grad_y, 2)
    yield from check_dtype("grad_y", grad_y, *FLOATS)
    yield from check_dtype("expertIdx", expertIdx, torch.int32)
    yield from check_shape("expertIdx", expertIdx, *grad_y.shape)
    if grad_y.shape[0] != x_norm.shape[0]:
        yield f"grad_y must have the {x_norm.shape[0]} rows of x_norm, not {grad_y.shape[0]}"
    if norm_type != reference.SIGMOID:
        yield f"norm_type must be 1 (sigmoid), the only one with a gradient on the NPU, not {norm_type}"
    if renorm not in (0, 1):
        yield f"renorm must be 0 or 1, not {renorm}"


def backward_fake(x_norm: Tensor, grad_y: Tensor, **_: Any) -> Tensor:
    return grad_y.new_empty(x_norm.shape)


def backward_sample(**_: Any) -> dict[str, Any]:
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    scores = torch.randn(TOKENS, EXPERTS).sigmoid()
    return {"x_norm": scores, "grad_y": randn(TOKENS, TOP_K), "expertIdx": experts, "norm_type": reference.SIGMOID}


declare(
    Op(
        schema="npu::npu_moe_gating_top_k_backward(Tensor x_norm, Tensor grad_y, Tensor expertIdx, *, int renorm=0, "
        "int norm_type=0, float routed_scaling_factor=1., float eps=9.9999999999999995e-21) -> Tensor",
        reference=reference.npu_moe_gating_top_k_backward,
        cuda=kernel(reference.npu_moe_gating_top_k_backward),
        fake=backward_fake,
        checks=backward_checks,
        sharding=lambda **_: [([Shard(0)], {"x_norm": Shard(0), "grad_y": Shard(0), "expertIdx": Shard(0)})],
        limits=(
            Limit("x_norm.dtype", lambda x_norm, **_: x_norm.dtype, (torch.float32,)),
            Limit("the number of experts", lambda x_norm, **_: x_norm.shape[1], NPU_EXPERTS),
        ),
        sample=backward_sample,
    )
)
