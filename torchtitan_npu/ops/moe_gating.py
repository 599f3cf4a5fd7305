"""``npu_moe_gating_top_k`` and its gradient: the experts of each token, and their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd, save_by_name, saved_by_name
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dim, check_dtype, check_shape
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import shard_alike

SIGMOID = 1
"""The ``norm_type`` other than softmax, 0."""
SUM_OF_TWO_BEST = 1
"""The ``group_select_mode`` other than that of the best expert, 0."""


def npu_moe_gating_top_k(
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
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Score the experts, select ``k`` of them for each token, and weight them by their scores.

    .. math:: s = \mathrm{sigmoid}(x) \text{ or } \mathrm{softmax}(x), \quad
              E = \mathrm{top\_k}(s + bias), \quad y = c \, \frac{s_E}{\sum s_E + \epsilon}

    ``x`` (tokens, experts). ``bias`` (experts,) affects the selection, not the weights. The experts form
    ``group_count`` groups, of which only the ``k_group`` best take part. The score of a group is that of its best
    expert or, in mode 1, the sum of its two best. Softmax with ``renorm`` 0 omits the division. With ``tid2eid``
    (ids, k), :math:`E` is ``tid2eid[input_ids]``.

    Returns ``y`` (tokens, k) in the dtype of ``x``, the best expert first, the lower number first among equals;
    ``expert_idx`` (tokens, k) in int32; :math:`s` (tokens, experts) in float32, or zeros without ``out_flag``. Computes
    in float32, or in float64 for float64 input.
    """
    logits = x if x.dtype == torch.float64 else x.float()
    scores = logits.sigmoid() if norm_type == SIGMOID else logits.softmax(-1)
    if input_ids is not None and tid2eid is not None:
        expert_idx = tid2eid[input_ids].long()
    else:
        choice = scores if bias is None else scores + bias
        if group_count > 1:
            choice = _best_groups_only(choice.unflatten(1, (group_count, -1)), k_group, group_select_mode).flatten(1)
        expert_idx = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = scores.gather(1, expert_idx)
    if norm_type == SIGMOID or renorm:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    y = (weights * routed_scaling_factor).to(x.dtype)
    scores = scores.contiguous() if out_flag else torch.zeros_like(scores, memory_format=torch.contiguous_format)
    return y.contiguous(), expert_idx.int().contiguous(), scores


def _best_groups_only(groups: Tensor, k_group: int, group_select_mode: int) -> Tensor:
    """Return ``groups`` (tokens, groups, experts of a group) with minus infinity outside the ``k_group`` best."""
    best = 2 if group_select_mode == SUM_OF_TWO_BEST else 1
    merit = groups.topk(best, dim=-1).values.sum(-1)
    selected = merit.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
    dropped = torch.ones_like(merit, dtype=torch.bool).scatter_(1, selected, False)
    return groups.masked_fill(dropped.unsqueeze(-1), -torch.inf)


def npu_moe_gating_top_k_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,
    renorm: int,
    norm_type: int,
    routed_scaling_factor: float,
    eps: float,
) -> Tensor:
    r"""Return the gradient of :func:`npu_moe_gating_top_k`'s ``y`` with respect to ``x``, for sigmoid.

    With :math:`D = \sum s_E + \epsilon` and :math:`g = c \, dy`:

    .. math:: ds_E = \frac{g - \sum g \, s_E / D}{D}, \qquad dx = s (1 - s) \, ds

    ``x_norm`` (tokens, experts): the scores; ``grad_y`` and ``expertIdx`` (tokens, k). Returns (tokens, experts) in the
    dtype of ``grad_y``.
    """
    chosen = expertIdx.long()
    scores = x_norm.gather(1, chosen)
    total = scores.sum(-1, keepdim=True) + eps
    grad = grad_y.to(x_norm.dtype) * routed_scaling_factor
    grad_scores = (grad - (grad * scores / total).sum(-1, keepdim=True)) / total
    grad_norm = torch.zeros_like(x_norm).scatter_add_(1, chosen, grad_scores)
    return (grad_norm * x_norm * (1 - x_norm)).to(grad_y.dtype).contiguous()


NPU_EXPERTS = range(2, 2049)


def checks(call: Call) -> Iterator[str]:
    yield from check_dim("x", call.x, 2)
    yield from check_dtype("x", call.x, *FLOATS)
    tokens, experts = call.x.shape
    if call.bias is not None:
        yield from check_dtype("bias", call.bias, call.x.dtype)
        yield from check_shape("bias", call.bias, experts)
    for name, value in call.pick("group_select_mode", "renorm", "norm_type").items():
        if value not in (0, 1):
            yield f"{name} must be 0 or 1, not {value}"
    groups = call.group_count
    if groups < 1 or experts % groups:
        yield f"group_count must divide the {experts} experts of x, and {groups} does not"
    if not 1 <= call.k_group <= groups:
        yield f"k_group must be 1 to {groups}, the group_count, not {call.k_group}"
    in_group = experts // groups
    if groups > 1 and call.group_select_mode == SUM_OF_TWO_BEST and in_group < 2:
        yield f"group_count must leave 2 experts a group for group_select_mode 1, and {groups} leaves {in_group}"
    if not 1 <= call.k <= in_group * call.k_group:
        yield f"k must be 1 to {in_group * call.k_group}, the experts in k_group groups, not {call.k}"
    if (call.input_ids is None) != (call.tid2eid is None):
        yield "input_ids and tid2eid must be given together"
    if call.input_ids is not None and call.tid2eid is not None:
        yield from check_dtype("input_ids", call.input_ids, torch.int32, torch.int64)
        yield from check_shape("input_ids", call.input_ids, tokens)
        yield from check_dtype("tid2eid", call.tid2eid, torch.int32, torch.int64)
        yield from check_dim("tid2eid", call.tid2eid, 2)
        yield from check_shape("tid2eid", call.tid2eid, call.tid2eid.shape[0], call.k)


def fake(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    x, shape = call.x, (call.x.shape[0], call.k)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32), x.new_empty(x.shape, dtype=compute_dtype(x))


def save(ctx: Any, output: tuple[Tensor, Tensor, Tensor], call: Call) -> None:
    if call.bias is not None and call.bias.requires_grad:
        raise RuntimeError("npu_moe_gating_top_k: bias must not require a gradient: the operator has none for it")
    _, expert_idx, x_norm = output
    ctx.mark_non_differentiable(expert_idx, x_norm)
    ctx.out_flag = call.out_flag
    options = call.pick("renorm", "norm_type", "routed_scaling_factor", "eps")
    save_by_name(ctx, x_norm=x_norm, expertIdx=expert_idx, **options)


def backward(npu: Any, ctx: Any, grad_y: Tensor, *_: None) -> dict[str, Tensor]:
    if not ctx.out_flag:
        raise UsageError("npu_moe_gating_top_k: out_flag must be True for a gradient, which needs that output")
    return {"x": npu.npu_moe_gating_top_k_backward(grad_y=grad_y, **saved_by_name(ctx))}


declare(
    schema="npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, "
    "Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, "
    "int norm_type=0, bool out_flag=False, float routed_scaling_factor=1., float eps=9.9999999999999995e-21) "
    "-> (Tensor, Tensor, Tensor)",
    reference=npu_moe_gating_top_k,
    fake=fake,
    checks=checks,
    # the experts of a token do not depend on other tokens
    sharding=lambda call: shard_alike([0], 3, *(("x",) if call.input_ids is None else ("x", "input_ids"))),
    autograd=Autograd(save, backward),
    limits=(
        Limit("x.dtype", lambda call: call.x.dtype, NPU_FLOATS),
        Limit("the number of experts", lambda call: call.x.shape[1], NPU_EXPERTS),
        Limit(
            "the number of experts in a group",
            lambda call: call.x.shape[1] // call.group_count,
            range(3, NPU_EXPERTS.stop),
        ),
        Limit(
            "the number of experts, each group rounded up to 32",
            lambda call: -(-call.x.shape[1] // call.group_count // 32) * 32 * call.group_count,
            NPU_EXPERTS,
        ),
        Limit("renorm", lambda call: call.renorm, (0,)),
    ),
)


def backward_checks(call: Call) -> Iterator[str]:
    yield from check_dim("x_norm", call.x_norm, 2)
    yield from check_dtype("x_norm", call.x_norm, torch.float32, torch.float64)
    yield from check_dim("grad_y", call.grad_y, 2)
    yield from check_dtype("grad_y", call.grad_y, *FLOATS)
    yield from check_dtype("expertIdx", call.expertIdx, torch.int32)
    yield from check_shape("expertIdx", call.expertIdx, *call.grad_y.shape)
    if call.grad_y.shape[0] != call.x_norm.shape[0]:
        yield f"grad_y must have the {call.x_norm.shape[0]} rows of x_norm, not {call.grad_y.shape[0]}"
    if call.norm_type != SIGMOID:
        yield f"norm_type must be 1 (sigmoid), the only one with a gradient on the NPU, not {call.norm_type}"
    if call.renorm not in (0, 1):
        yield f"renorm must be 0 or 1, not {call.renorm}"


declare(
    schema="npu::npu_moe_gating_top_k_backward(Tensor x_norm, Tensor grad_y, Tensor expertIdx, *, int renorm=0, "
    "int norm_type=0, float routed_scaling_factor=1., float eps=9.9999999999999995e-21) -> Tensor",
    reference=npu_moe_gating_top_k_backward,
    fake=lambda call: call.grad_y.new_empty(call.x_norm.shape),
    checks=backward_checks,
    sharding=lambda call: shard_alike([0], 1, "x_norm", "grad_y", "expertIdx"),
    limits=(
        Limit("x_norm.dtype", lambda call: call.x_norm.dtype, (torch.float32,)),
        Limit("the number of experts", lambda call: call.x_norm.shape[1], NPU_EXPERTS),
    ),
)
