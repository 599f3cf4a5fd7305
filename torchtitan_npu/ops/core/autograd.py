"""Autograd for the operators that this package defines, by argument name.

``torch.library.register_autograd`` does not accept an operator with keyword-only tensors, and the lightning indexer
and sparse attention have them. This module builds the kernel for the Autograd dispatch key the same way: an
``autograd.Function`` around the call below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.arguments import Call, by_name
from torchtitan_npu.torch_internals.dispatch import OpOverload, below_autograd, op_schema


@dataclass(frozen=True)
class Autograd:
    """Gradients of an operator whose tensor arguments are single tensors, not lists."""

    save: Callable[..., None]
    """``save(ctx, output, call)``: save what the backward needs and mark the outputs without a gradient."""
    backward: Callable[..., Mapping[str, Tensor | None]]
    """``backward(npu, ctx, *output_grads)``: return the gradients by argument name. ``npu`` is the namespace in which
    to call operators. The gradient of an unused output is ``None``."""


def save_by_name(ctx: Any, **values: Any) -> None:
    """Save ``values``, tensors by ``ctx.save_for_backward``, so that :func:`saved_by_name` returns them."""
    ctx.saved_names = [name for name, value in values.items() if isinstance(value, Tensor)]
    ctx.save_for_backward(*(values[name] for name in ctx.saved_names))
    ctx.saved_options = {name: value for name, value in values.items() if not isinstance(value, Tensor)}


def saved_by_name(ctx: Any) -> dict[str, Any]:
    """Return what :func:`save_by_name` saved."""
    return ctx.saved_options | dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))


def not_implemented(name: str) -> Autograd:
    """Return the autograd of an operator that torch_npu registers for autograd without a gradient.

    Its outputs require a gradient, and the backward raises.
    """

    def backward(npu: Any, ctx: Any, *output_grads: Tensor | None) -> Mapping[str, Tensor | None]:
        raise RuntimeError(f"derivative for npu::{name} is not implemented")

    return Autograd(save=lambda ctx, output, call: None, backward=backward)


@dataclass(frozen=True)
class Through:
    """Autograd of an operator that torch_npu implements as a call of another one, which autograd then records."""

    op: str
    """The name of the other operator. It takes the same arguments, and its first output is the result."""


def through_kernel(op: OpOverload, through: Through, check: Callable[..., None]) -> Callable[..., Any]:
    """Return the kernel of ``op`` for the Autograd dispatch key. ``check`` belongs to ``op``: errors name it."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        check(**by_name(op, args, kwargs))
        return getattr(getattr(torch.ops, op.namespace), through.op).default(*args, **kwargs)[0]

    return kernel


def autograd_kernel(op: OpOverload, autograd: Autograd) -> Callable[..., Any]:
    """Return the kernel of ``op`` for the Autograd dispatch key."""
    npu = getattr(torch.ops, op.namespace)

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with below_autograd():
            return op(*args, **kwargs)

    def forward(ctx: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Call, *tensors: Tensor) -> Any:
        # ``tensors`` are those of ``call``; they are passed again so that autograd tracks them
        output = run(args, kwargs)
        ctx.names = [name for name, value in vars(call).items() if isinstance(value, Tensor)]
        ctx.set_materialize_grads(False)
        autograd.save(ctx, output, call)
        return output

    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = any(grad is not None for grad in output_grads)
        grads = autograd.backward(npu, ctx, *output_grads) if used else {}
        return None, None, None, *(grads.get(name) for name in ctx.names)

    # the name of the class is what ``tensor.grad_fn`` shows
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(op_schema(op).name.partition("::")[2], (torch.autograd.Function,), methods)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(value, Tensor) and value.requires_grad for value in (*args, *kwargs.values())
        ):
            arguments = by_name(op, args, kwargs)
            tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
            return function.apply(args, kwargs, Call(**arguments), *tensors)
        return run(args, kwargs)

    return kernel
