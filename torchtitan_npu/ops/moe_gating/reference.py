"""Top-k selection of experts for each token, and its gradient, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

SOFTMAX, SIGMOID = 0, 1
BEST, SUM_OF_TWO_BEST = 0, 1


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
    return y, expert_idx.int(), scores if out_flag else torch.zeros_like(scores)


def _best_groups_only(groups: Tensor, k_group: int, group_select_mode: int) -> Tensor:
    """Return ``groups`` (tokens, groups, experts of a group) with minus infinity outside the ``k_group`` best."""
    best = 2 if group_select_mode == SUM_OF_TWO_BEST else 1
    merit = groups.topk(best, dim=-1).values.sum(-1)
    kept = merit.sort(dim=-1, descending=True, stable=True).indices[:, :k_group]
    dropped = torch.ones_like(merit, dtype=torch.bool).scatter_(1, kept, False)
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
