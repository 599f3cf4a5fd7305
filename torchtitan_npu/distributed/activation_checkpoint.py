"""Workaround: selective activation checkpointing by operator fails with FSDP inside a block, and knows only CUDA.

Faults:

- torch 2.13 requires that the recomputation of a block calls the same operators as its forward, each as often
  (torch/utils/checkpoint.py). Under expert parallel, FSDP's hooks on the experts run inside a block. They mark other
  ranges for the profiler in the backward pass than in the forward pass, and in a pipeline they gather the parameters in
  one of both only: torch raises an error.
- TorchTitan 0.2.2 saves by lists of CUDA's operators (``_op_sac_save_list`` of a plan). On an NPU a linear layer calls
  ``aten.matmul`` instead of ``aten.mm``, attention is ``npu_fusion_attention_v3``, and a copy to the host is one from
  "npu". Without :func:`with_npu_operators` nearly everything would be recomputed there.

Delete the first part when torch ignores the operators of the profiler and of FSDP's hooks, the second when TorchTitan
takes a policy.

A block may also name operators whose results every mode saves (``saved_operators``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torchtitan_npu.ops.core.op import OPS
from torchtitan_npu.torch_internals.activation_checkpoint import checkpoint_wrapper, hide_fsdp, with_policy

Policy = Callable[..., CheckpointPolicy]
"""Called with a context, an operator and its arguments."""


def _checkpoint_wrapper(module: nn.Module, *, context_fn: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    saved = getattr(module, "saved_operators", ())
    if context_fn is not None:
        kwargs["context_fn"] = _contexts(module, context_fn, lambda policy: saving(saved, with_npu_operators(policy)))
    elif saved and not kwargs.get("debug"):  # torch supports one of both
        full = functools.partial(create_selective_checkpoint_contexts, recompute)
        kwargs["context_fn"] = _contexts(module, full, functools.partial(saving, saved))
    return checkpoint_wrapper(module, **kwargs)


CHECKPOINTING = {checkpoint_wrapper: _checkpoint_wrapper}
"""Replacement of torch's wrapper in a parallel plan."""


def _contexts(
    module: nn.Module, context_fn: Callable[[], tuple[Any, Any]], change: Callable[[Policy], Policy]
) -> Callable[[], tuple[Any, Any]]:
    """Return a function that ``module`` calls at the beginning of each forward pass."""

    def contexts() -> tuple[Any, Any]:
        hide_fsdp(module)  # here, because FSDP comes after activation checkpointing
        return with_policy(context_fn(), change)

    return contexts


def recompute(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of mode ``full``: save nothing."""
    return CheckpointPolicy.PREFER_RECOMPUTE


def saving(operators: tuple[str, ...], policy: Policy) -> Policy:
    """Return ``policy``, extended to save the results of ``operators``."""

    def extended(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func.name().partition(".")[0] in operators:
            return CheckpointPolicy.MUST_SAVE
        return policy(context, func, *args, **kwargs)

    return extended


def with_npu_operators(policy: Policy) -> Policy:
    """Return TorchTitan's ``policy``, extended to the operators of an NPU and of this package.

    - A product of an activation and a matrix counts as ``aten.mm``, and so do a grouped and a quantized one: ``policy``
      saves every second, the first included.
    - Attention, and every other operator of this package that computes products, is saved.
    - A copy from the device to the host is saved, because its repetition would synchronize again.
    """
    aten = torch.ops.aten

    def extended(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func == aten.matmul.default and args[1].dim() == 2:  # else batched, as aten.bmm
            return policy(context, aten.mm.default, *args)
        name = func.name().partition(".")[0]
        if name == "npu::npu_grouped_matmul":
            (x, *_), (weight, *_) = args[:2]
            return policy(context, aten.mm.default, x, weight)
        if name == "npu::npu_quant_matmul":
            return policy(context, aten.mm.default, *args[:2])
        copies = func == aten._to_copy.default and args[0].device.type == "npu" and kwargs.get("device") is not None
        if name in _saved_operators() or (copies and torch.device(kwargs["device"]).type == "cpu"):
            return CheckpointPolicy.MUST_SAVE
        return policy(context, func, *args, **kwargs)

    return extended


@functools.cache
def _saved_operators() -> frozenset[str]:
    of_this_package = {f"npu::{op.name.partition('.')[0]}" for op in OPS.values() if op.flops is not None}
    # torch's scaled dot-product attention, in torch_npu 2.13 and before
    return frozenset(of_this_package | {"npu::npu_fusion_attention_v2", "npu::npu_fusion_attention_v3"})
