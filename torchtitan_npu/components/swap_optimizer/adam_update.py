"""torch's own Adam update on parts of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from torchtitan_npu.components.swap_optimizer.slices import Segment


def update(group: dict[str, Any], lists: list[list[torch.Tensor]]) -> None:
    """Run Adam with the options and the implementation of ``group``.

    ``lists`` are torch's: parameters, gradients, first and second moments, maximum second moments (empty without
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
        foreach=_foreach(group),
        fused=group["fused"],
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


def _foreach(group: dict[str, Any]) -> bool | None:
    """Return the group's option ``foreach``; ``None`` lets torch choose.

    torch chooses by the type of all parameters, and never foreach for DTensors. A slice has only their local tensors.
    """
    if group["foreach"] is None and group["fused"] is None and any(isinstance(p, DTensor) for p in group["params"]):
        return False
    return group["foreach"]


def step_counts(group: dict[str, Any], count: float, number: int, device: torch.device) -> list[torch.Tensor]:
    """Return ``number`` step counts on the device that the implementation reads them from, without a copy to it."""
    if group["fused"]:
        return list(torch.full((number,), count, dtype=step_dtype(group), device=device).unbind())
    return [torch.full((), count, dtype=step_dtype(group)) for _ in range(number)]


def step_dtype(group: dict[str, Any]) -> torch.dtype:
    """Return the dtype that torch's optimizers give the step count."""
    float64 = torch.get_default_dtype() == torch.float64 and not group["fused"]
    return torch.float64 if float64 else torch.float32


def local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's gradient with the parameter's placements; tensor parallelism can leave it partial."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(parameter, DTensor) and isinstance(grad, DTensor):
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
        return grad.to_local()
    return grad


def elements(tensor: torch.Tensor, segment: Segment) -> torch.Tensor:
    """Return the elements of ``segment`` in ``tensor``, (end - begin,): a view, or a copy if it is not contiguous."""
    if tensor.is_contiguous():
        return tensor.view(-1)[segment.begin : segment.end]
    row = tensor[0].numel()
    first = segment.begin // row
    rows = tensor[first : -(-segment.end // row)]  # only the rows needed: the device may have no room for all
    return rows.reshape(-1)[segment.begin - first * row : segment.end - first * row]
