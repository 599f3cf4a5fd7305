"""Adam and AdamW whose moments live in pinned host memory.

In the step they pass through the device slice by slice, on three streams: while slice i is updated, slice i+1 loads
and slice i-1 is stored. The device holds three slices in the step and none between steps.

The update is torch's own function, with the implementation that the group asks for (fused, foreach, for-loop), on
views of the parameters: it works element by element, so the result is that of the unsliced update bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchtitan_npu.components.swap_optimizer import host_memory
from torchtitan_npu.components.swap_optimizer.pipeline import Pipeline, Turn
from torchtitan_npu.components.swap_optimizer.plan import MIB, Bundle, Segment, local, plan
from torchtitan_npu.components.swap_optimizer.update import (
    elements,
    local_gradient,
    step_counts,
    step_dtype,
    update,
    uses_foreach,
)


class SwapStates(torch.optim.Adam):
    """What makes an Adam swap its states; a mixin, to stand before ``Adam`` or ``AdamW``.

    From outside it is that optimizer: ``state`` has the same names, shapes and placements, in host memory, and
    ``step`` is there too. Parameters beyond ``fraction``, and those of groups added later, keep their states on the
    device. ``state_dict`` waits for the stores under way; who reads ``state`` itself calls :meth:`synchronize` first.

    If an update raises, the states of each slice are those from before or those from after its update, never a mix,
    and ``step`` counts the complete updates of a parameter: a checkpoint saved then is whole. As with torch's own, what
    came before has been updated and the rest has not, and here that may be a part of a parameter.
    """

    def __init__(self, *args: Any, slice_mib: int = 64, fraction: float = 1.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in ("capturable", "differentiable"):
            if any(group[option] for group in self.param_groups):
                raise ValueError(f"states in host memory do not go with {option}=True")
        self._step_supports_amp_scaling = False  # it would count steps on the device
        self._bundles = plan(self.param_groups, slice_mib * MIB, fraction)
        self._swapped = {parameter: bundle for bundle in self._bundles for parameter in bundle.offsets}
        for parameter in self._swapped:
            if not local(parameter).is_contiguous():
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} cannot be sliced: it is not contiguous"
                )
        # without a parameter to swap there is nothing to place
        self._device = next((local(p).device for p in self._swapped), torch.device("cpu"))
        regions = iter(host_memory.allocate(host_regions(self._bundles), self._device, fraction))
        # (numel of the bundle,) in its dtype, for each state of each bundle
        self._host = {b: [next(regions).view(b.dtype) for _ in b.states] for b in self._bundles}
        self._counts: dict[torch.Tensor, int] = {}  # of ``step`` in the states: to be read without asking a tensor
        self._pipeline = Pipeline(self._device)
        self.host_bytes = sum(host_regions(self._bundles))
        """Bytes of states in host memory."""
        self.swapped_bytes = 0
        """Bytes that the last step moved, both directions together."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of Adam; see the class. It never waits for the device, except where a state is made."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = self._gradients()
        foreach = [uses_foreach(group) for group in self.param_groups]
        turns = [
            Turn(
                [state[part.begin : part.end] for state in self._host[bundle]],
                partial(self._update_slice, bundle.group, foreach[bundle.group], part.segments, gradients),
            )
            for bundle in self._bundles
            for part in bundle.slices
            if any(segment.parameter in gradients for segment in part.segments)
        ]
        self.swapped_bytes = sum(2 * tensor.nbytes for turn in turns for tensor in turn.tensors)
        self._pipeline.run(turns, partial(self._update_residents, foreach))
        return loss

    def synchronize(self) -> None:
        """Wait until the states in host memory are those of the last step."""
        self._pipeline.synchronize()

    def state_dict(self) -> dict[str, Any]:
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, except that what is swapped is copied to its place in host memory and never to the device."""
        self.synchronize()
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        swapped = {key: p for key, p in zip(saved, parameters, strict=False) if p in self._swapped}
        states = state_dict["state"]
        if any(
            a["amsgrad"] != b["amsgrad"] for a, b in zip(state_dict["param_groups"], self.param_groups, strict=False)
        ):
            raise ValueError("amsgrad is not the same in the state dict as it was when this optimizer was made")
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
                ours, theirs = local(made[name]), local(states[key][name])
                if ours.shape != theirs.shape:  # copy_ would broadcast
                    raise ValueError(
                        f"{name} of parameter {key} is {tuple(theirs.shape)} there, {tuple(ours.shape)} here"
                    )
                ours.copy_(theirs)
            self.state[parameter] = made

    def _gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """The local gradients of the swapped parameters that have one; their states are made where they are new."""
        gradients: dict[torch.Tensor, torch.Tensor] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in self._swapped:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("Adam does not support sparse gradients")
                if not self.state[parameter]:
                    self.synchronize()  # the last step may still store here: a bundle is stored as a whole
                    self.state[parameter] = self._new_state(parameter, group, zero=True)
                    self._counts[parameter] = 0
                gradients[parameter] = local_gradient(parameter)
        return gradients

    def _new_state(self, parameter: torch.Tensor, group: dict[str, Any], zero: bool) -> dict[str, Any]:
        """``step`` and the views of host memory that are this parameter's states, as DTensors if it is one."""
        bundle = self._swapped[parameter]
        shape, offset = local(parameter).shape, bundle.offsets[parameter]
        state: dict[str, Any] = {"step": torch.zeros((), dtype=step_dtype(group))}
        for name, host in zip(bundle.states, self._host[bundle], strict=True):
            view = _with_own_storage(host[offset : offset + shape.numel()].view(shape))
            if zero:
                view.zero_()
            if isinstance(parameter, DTensor):  # from_local would move it to the mesh's device
                view = DTensor(view, parameter._spec, requires_grad=False)  # type: ignore[call-arg,arg-type]
            state[name] = view
        return state

    def _update_residents(self, foreach: list[bool]) -> None:
        """torch's own step for the parameters that keep their states on the device."""
        for group, group_foreach in zip(self.param_groups, foreach, strict=True):
            residents = {**group, "params": [p for p in group["params"] if p not in self._swapped]}
            lists: list[list[torch.Tensor]] = [[] for _ in range(6)]
            self._init_group(residents, *lists)
            update(group, group_foreach, lists)

    def _update_slice(
        self,
        group_index: int,
        foreach: bool,
        segments: list[Segment],
        gradients: dict[torch.Tensor, torch.Tensor],
        states: list[torch.Tensor],
    ) -> None:
        """Update what the slice has of the parameters with a gradient; ``states`` are (numel of the slice,) each."""
        group = self.param_groups[group_index]
        by_step: dict[int, list[Segment]] = {}
        for segment in segments:
            if segment.parameter in gradients:
                by_step.setdefault(self._counts[segment.parameter], []).append(segment)
        for step, alike in by_step.items():
            filled = [s for s in alike if s.end > s.begin]  # a rank may have nothing of a parameter
            views = [[state[s.offset : s.offset + s.end - s.begin] for s in filled] for state in states]
            largest = views[2] if group["amsgrad"] else []
            lists = [
                [elements(local(s.parameter), s) for s in filled],
                [elements(gradients[s.parameter], s) for s in filled],
                views[0],
                views[1],
                largest,
                step_counts(group, step, len(filled), self._device),
            ]
            update(group, foreach, lists)
        for segment in (s for alike in by_step.values() for s in alike):
            if segment.end == local(segment.parameter).numel():
                self._counts[segment.parameter] += 1
                self.state[segment.parameter]["step"] += 1


class SwapAdam(SwapStates):
    """``torch.optim.Adam`` with its states in host memory."""


class SwapAdamW(SwapStates, torch.optim.AdamW):
    """``torch.optim.AdamW`` with its states in host memory."""


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """The same memory from the start of a storage: a DTensor's wrapper, which has no memory, takes over its local
    tensor's offset, and DCP's staging for asynchronous saves then looks for memory there."""
    begin = view.storage_offset() * view.itemsize
    return torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()[begin : begin + view.nbytes], 0, view.shape)  # type: ignore[call-overload]


def host_regions(bundles: list[Bundle]) -> list[int]:
    """The sizes in bytes of the regions of host memory that ``bundles`` take, one a state of a bundle."""
    return [bundle.state_bytes for bundle in bundles for _ in bundle.states]
