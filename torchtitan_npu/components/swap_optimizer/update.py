"""torch's own Adam update on parts of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam
from torch.optim.optimizer import _default_to_fused_or_foreach, _get_scalar_dtype

from torchtitan_npu.components.swap_optimizer.plan import Segment


def update(group: dict[str, Any], foreach: bool, lists: list[list[torch.Tensor]]) -> None:
    """Adam with the group's options and implementation.

    ``lists`` are torch's: parameters, gradients, first and second moments, largest second moments (empty without
    ``amsgrad``), step counts before the update.
    """
    parameters, gradients, first, second, largest, steps = lists
    beta1, beta2 = group["betas"]
    adam(
        parameters,
        gradients,
        first,
        second,
        largest,
        steps,
        foreach=foreach,
        fused=bool(group["fused"]),
        has_complex=any(p.is_complex() for p in parameters),
        decoupled_weight_decay=group["decoupled_weight_decay"],
        amsgrad=group["amsgrad"],
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
    )


def uses_foreach(group: dict[str, Any]) -> bool:
    """The group's choice, or torch's where the group makes none: it depends on all parameters and their type."""
    if group["foreach"] is not None or group["fused"] is not None:
        return bool(group["foreach"])
    with_gradient = [p for p in group["params"] if p.grad is not None]
    _, foreach = _default_to_fused_or_foreach(with_gradient, differentiable=False, use_fused=False)
    return foreach and not isinstance(group["lr"], torch.Tensor)


def step_counts(group: dict[str, Any], count: float, number: int, device: torch.device) -> list[torch.Tensor]:
    """``number`` step counts where the implementation reads them: on the device filled in, not copied there."""
    if group["fused"]:
        return list(torch.full((number,), count, dtype=step_dtype(group), device=device).unbind())
    return [torch.full((), count, dtype=step_dtype(group)) for _ in range(number)]


def step_dtype(group: dict[str, Any]) -> torch.dtype:
    return _get_scalar_dtype(is_fused=group["fused"])


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """The gradient on this rank, placed as the parameter is; tensor parallel leaves sums of replicas to be made."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
        return grad.to_local()
    return grad


def elements(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """The segment's elements of ``tensor``, (end - begin,): a view, or of a gradient laid out otherwise a copy."""
    if tensor.is_contiguous():
        return tensor.view(-1)[segment.begin : segment.end]
    row = tensor[0].numel()
    first = segment.begin // row
    rows = tensor[first : -(-segment.end // row)]  # no more than needed: the device may have no room for all of it
    return rows.reshape(-1)[segment.begin - first * row : segment.end - first * row]
