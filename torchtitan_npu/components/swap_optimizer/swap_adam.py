"""Adam and AdamW with their moments in pinned host memory.

In a step the moments pass through the device slice by slice, on three streams: while slice i is updated, slice i+1
loads and slice i-1 is stored. The device holds three slices during a step and none between steps.

The update is torch's function on views of the parameters, with the group's implementation (fused, foreach or for-loop).
It is elementwise, so the result is bit-identical to an update without slices.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adam import adam

from torchtitan_npu.components.swap_optimizer import host_memory
from torchtitan_npu.components.swap_optimizer.slices import (
    MIB,
    Bucket,
    Segment,
    SlicePipeline,
    SliceUpdate,
    local_shard_no_grad,
    plan,
)
from torchtitan_npu.torch_internals.dtensor import host_dtensor


def update(group: dict[str, Any], lists: list[list[torch.Tensor]]) -> None:
    """Run Adam with the options and the implementation of ``group``.

    ``lists`` are torch's: parameters, gradients, first and second moments, maximum second moments (empty without
    ``amsgrad``), step counts before the update.
    """
    beta1, beta2 = group["betas"]
    foreach = group["foreach"]
    if foreach is None and group["fused"] is None and any(isinstance(p, DTensor) for p in group["params"]):
        foreach = False  # torch never chooses foreach for DTensors; a slice has only their local tensors
    parameters, gradients, first, second, largest, steps = lists
    adam(
        parameters,
        gradients,
        first,
        second,
        largest,
        steps,
        foreach=foreach,
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


class SwapStates(torch.optim.Adam):
    """Mixin, listed before ``Adam`` or ``AdamW``, that keeps the optimizer's states in host memory.

    ``state`` has the same names, shapes and placements as torch's. Parameters beyond ``fraction``, and those of groups
    added later, keep their states on the device. ``state_dict`` waits for pending stores; call :meth:`synchronize`
    before reading ``state`` itself.

    If an update raises, each slice's states are those before or after its update, never a mix, and ``step`` counts the
    complete updates of a parameter, so that a checkpoint saved then is consistent. As with torch's optimizers, some
    parameters have been updated, not all; here a parameter may be updated in part.
    """

    def __init__(
        self, *args: Any, slice_mib: int = 64, fraction: float = 1.0, owns_storage: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._owns_storage = owns_storage
        for option in ("capturable", "differentiable"):
            if any(group[option] for group in self.param_groups):
                raise ValueError(f"states in host memory cannot be combined with {option}=True")
        self._step_supports_amp_scaling = False  # it keeps step counts on the device
        self._buckets = plan(self.param_groups, slice_mib * MIB, fraction)
        self._swapped = {parameter: bucket for bucket in self._buckets for parameter in bucket.offsets}
        for parameter in self._swapped:
            if not local_shard_no_grad(parameter).is_contiguous():
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} cannot be sliced: it is not contiguous"
                )
        self._device = next((local_shard_no_grad(p).device for p in self._swapped), torch.device("cpu"))
        regions = iter(host_memory.allocate(host_regions(self._buckets), self._device, fraction))
        # (numel of the bucket,) in its dtype, for each state of each bucket
        self._host = {b: [next(regions).view(b.dtype) for _ in b.states] for b in self._buckets}
        self._counts: dict[torch.Tensor, int] = {}  # values of the states' ``step``, read without a tensor access
        self._pipeline = SlicePipeline(self._device)
        self.host_bytes = sum(host_regions(self._buckets))
        """Bytes of states in host memory."""
        self.swapped_bytes = 0
        """Bytes that the last step copied, in both directions together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run one step of Adam. The host waits for the device only when a state is created."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        updates = [
            SliceUpdate(
                [state[part.begin : part.end] for state in self._host[bucket]],
                partial(self._update_slice, bucket.group, part.segments, gradients),
            )
            for bucket in self._buckets
            for part in bucket.slices
            if any(segment.parameter in gradients for segment in part.segments)
        ]
        self.swapped_bytes = sum(2 * tensor.nbytes for update in updates for tensor in update.tensors)
        self._pipeline.run(updates, self._update_residents)
        return loss

    def is_swapped(self, parameter: torch.Tensor) -> bool:
        """Return whether the states of ``parameter`` are in host memory."""
        return parameter in self._swapped

    def host_tensors(self) -> list[torch.Tensor]:
        """Return the tensors in host memory that hold the swapped states."""
        return [state for states in self._host.values() for state in states]

    def synchronize(self) -> None:
        """Block until the states in host memory are those of the last step."""
        self._pipeline.synchronize()

    def state_dict(self) -> dict[str, Any]:
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load like torch's optimizer, but copy swapped states to host memory and never to the device."""
        self.synchronize()
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        swapped = {key: p for key, p in zip(saved, parameters, strict=False) if p in self._swapped}
        states = state_dict["state"]
        if any(
            a["amsgrad"] != b["amsgrad"] for a, b in zip(state_dict["param_groups"], self.param_groups, strict=False)
        ):
            raise ValueError("amsgrad in the state dict differs from this optimizer's")
        super().load_state_dict(
            {**state_dict, "state": {key: state for key, state in states.items() if key not in swapped}}
        )
        for key, parameter in swapped.items():
            if key not in states:
                continue
            group = self.param_groups[self._swapped[parameter].group]
            made = self._new_state(parameter, group, zero=False)
            self._counts[parameter] = int(states[key]["step"])
            made["step"].fill_(self._counts[parameter])
            for name in self._swapped[parameter].states:
                target, saved_state = local_shard_no_grad(made[name]), local_shard_no_grad(states[key][name])
                if target.shape != saved_state.shape:  # copy_ would broadcast
                    raise ValueError(
                        f"{name} of parameter {key} has shape {tuple(saved_state.shape)} in the state dict, "
                        f"{tuple(target.shape)} in this optimizer"
                    )
                target.copy_(saved_state)
            self.state[parameter] = made

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the local gradients of the swapped parameters that have one, and create their missing states."""
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in self._swapped:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("Adam does not support sparse gradients")
                if not self.state[parameter]:
                    self.synchronize()  # the last step may still be storing the bucket
                    self.state[parameter] = self._new_state(parameter, group, zero=True)
                    self._counts[parameter] = 0
                gradients[parameter] = local_gradient(parameter)
        return gradients

    def _new_state(self, parameter: torch.Tensor, group: dict[str, Any], zero: bool) -> dict[str, Any]:
        """Return ``step`` and views of host memory as this parameter's states; DTensors if the parameter is one."""
        bucket = self._swapped[parameter]
        shape, offset = local_shard_no_grad(parameter).shape, bucket.offsets[parameter]
        state: dict[str, Any] = {"step": torch.zeros((), dtype=step_dtype(group))}
        for name, host in zip(bucket.states, self._host[bucket], strict=True):
            view = host[offset : offset + shape.numel()].view(shape)
            if self._owns_storage:  # the storage of a fake tensor cannot be cut
                # A DTensor takes over the storage offset of its local tensor but not the storage. DCP's staging for
                # asynchronous saves would read beyond it. So the view begins at the start of its storage.
                begin = view.storage_offset() * view.itemsize
                storage = view.untyped_storage()[begin : begin + view.nbytes]
                view = torch.empty(0, dtype=view.dtype).set_(storage, 0, view.shape)  # type: ignore[call-overload]
            if zero:
                view.zero_()
            state[name] = host_dtensor(view, parameter) if isinstance(parameter, DTensor) else view
        return state

    def _update_residents(self) -> None:
        """Update the parameters that keep their states on the device."""
        for group in self.param_groups:
            residents = {**group, "params": [p for p in group["params"] if p not in self._swapped]}
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            self._init_group(residents, *lists)
            update(group, lists)

    def _update_slice(
        self,
        group_index: int,
        segments: list[Segment],
        gradients: dict[torch.Tensor, torch.Tensor],
        states: list[torch.Tensor],
    ) -> None:
        """Update the slice's parameters that have a gradient; each of ``states`` is (numel of the slice,)."""
        group = self.param_groups[group_index]
        by_step: dict[int, list[Segment]] = {}
        for segment in segments:
            if segment.parameter in gradients:
                by_step.setdefault(self._counts[segment.parameter], []).append(segment)
        for step, alike in by_step.items():
            filled = [s for s in alike if s.end > s.begin]  # a rank's shard may be empty
            views = [[state[s.offset : s.offset + s.end - s.begin] for s in filled] for state in states]
            largest = views[2] if group["amsgrad"] else []
            lists = [
                [elements(local_shard_no_grad(s.parameter), s) for s in filled],
                [elements(gradients[s.parameter], s) for s in filled],
                views[0],
                views[1],
                largest,
                step_counts(group, step, len(filled), self._device),
            ]
            update(group, lists)
        for segment in (s for alike in by_step.values() for s in alike):
            if segment.end == local_shard_no_grad(segment.parameter).numel():
                self._counts[segment.parameter] += 1
                self.state[segment.parameter]["step"] += 1


class SwapAdam(SwapStates):
    """``torch.optim.Adam`` with its states in host memory."""


class SwapAdamW(SwapStates, torch.optim.AdamW):
    """``torch.optim.AdamW`` with its states in host memory."""


def host_regions(buckets: list[Bucket]) -> list[int]:
    """Return the sizes in bytes of the host memory regions for ``buckets``: one for each state of a bucket."""
    return [bucket.state_bytes for bucket in buckets for _ in bucket.states]
