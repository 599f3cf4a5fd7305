"""torch's AdamW with a Triton kernel of this package. States and checkpoints are torch's."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.components.swap_optimizer.swap_adam import local_gradient
from torchtitan_npu.dist_utils import local
from torchtitan_npu.errors import UsageError


class TritonAdamW(torch.optim.AdamW):
    """AdamW whose kernel runs near the rate of a copy, also for bfloat16, and multiplies the gradients by a factor.

    It takes the options of ``torch.optim.AdamW(..., fused=True)``, without ``amsgrad`` and ``maximize``.
    """

    gradient_factor: Tensor | None = None
    """A float32 scalar for the next step: clipping then needs no pass over the gradients. They are not changed."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_dtype: dict[Any, list[list[Tensor]]] = defaultdict(lambda: [[], [], [], [], []])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._state_of(parameter)
                own, gradient = local(parameter), local_gradient(parameter)
                if gradient.stride() != own.stride():
                    gradient = torch.empty_like(own).copy_(gradient)
                tensors = (own, gradient, local(state["exp_avg"]), local(state["exp_avg_sq"]))
                _check(*tensors)
                for tensor, of_kind in zip((*tensors, state["step"]), by_dtype[own.dtype], strict=True):
                    of_kind.append(tensor)
            for lists in by_dtype.values():
                _kernel().update(*lists, **_options(group), gradient_factor=self.gradient_factor)
        self.gradient_factor = None
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.gradient_factor = None  # of gradients that no step has used, because they were not finite

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of ``parameter``, which begins as torch's fused AdamW begins it."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _check(parameter: Tensor, *others: Tensor) -> None:
    """Raise if the kernel, which counts elements in the order of memory, would mix them up."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
    alike = all(x.stride() == parameter.stride() and x.dtype == parameter.dtype for x in others)
    if not alike or (parameter.numel() and extent != parameter.numel()):
        described = [(x.dtype, tuple(x.shape), x.stride()) for x in (parameter, *others)]
        raise UsageError(
            "optimizer.triton needs a parameter without gaps in memory, and its gradient and moments with the same "
            f"dtype and strides, not {described}; set optimizer.triton to false"
        )


def _options(group: dict[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    return {"beta1": beta1, "beta2": beta2, **{name: float(group[name]) for name in ("lr", "eps", "weight_decay")}}


def _kernel() -> Any:
    """Import Triton only where the kernel runs."""
    return importlib.import_module("torchtitan_npu.gpu_kernels.adamw")


def clip_in_step(optimizers: Iterable[TritonAdamW], max_norm: float, norm: Tensor) -> None:
    """Let the next step of ``optimizers`` scale gradients of the total ``norm`` down to ``max_norm``."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
    for optimizer in optimizers:
        optimizer.gradient_factor = factor
