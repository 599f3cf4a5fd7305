"""Autograd for a stand-in, by argument name.

``torch.library.register_autograd`` takes no op with keyword-only tensors, and the indexer and sparse attention have
them; so this is a kernel of our own for the Autograd key, built the same way: an ``autograd.Function`` around the call
below autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.torch_internals.dispatch import OpOverload

Call = tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]
"""How an op was called, ``(args, kwargs)``, and its arguments by name."""


@dataclass(frozen=True)
class Autograd:
    """How gradients flow through an op whose tensor arguments are single tensors, not lists."""

    save: Callable[..., None]
    """``save(ctx, output, **arguments)``: keep what the backward needs, mark the outputs that have no gradient."""
    backward: Callable[..., Mapping[str, Tensor | None]]
    """``backward(npu, ctx, *output_grads)``: the gradients by argument name. ``npu`` is the namespace to call ops in;
    the gradient of an output that nothing used is ``None``."""


def not_implemented(name: str) -> Autograd:
    """For an op that torch_npu registers for autograd without a gradient: its outputs require one, and it raises."""

    def backward(npu: Any, ctx: Any, *output_grads: Tensor | None) -> Mapping[str, Tensor | None]:
        raise RuntimeError(f"derivative for npu::{name} is not implemented")

    return Autograd(save=lambda ctx, output, **arguments: None, backward=backward)


@dataclass(frozen=True)
class Through:
    """Autograd of an op that torch_npu builds on another one: that one is what autograd and all below it see."""

    op: str
    """The name of the other op, which takes the same arguments; its first output is this op's output."""


def through_kernel(op: OpOverload, through: Through, check: Callable[..., None]) -> Callable[..., Any]:
    """The kernel of ``op`` for the Autograd dispatch key; ``check`` is ``op``'s own, so errors name what was called."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        check(**by_name(op, args, kwargs))
        return getattr(getattr(torch.ops, op.namespace), through.op).default(*args, **kwargs)[0]

    return kernel


def autograd_kernel(op: OpOverload, autograd: Autograd) -> Callable[..., Any]:
    """The kernel of ``op`` for the Autograd dispatch key (``with_keyset=True``)."""
    npu = getattr(torch.ops, op.namespace)

    def below_autograd(keyset: torch._C.DispatchKeySet, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    def forward(ctx: Any, keyset: torch._C.DispatchKeySet, call: Call, *tensors: Tensor) -> Any:
        # autograd sees ``tensors``; ``call`` holds the same ones, among everything else
        args, kwargs, arguments = call
        output = below_autograd(keyset, args, kwargs)
        ctx.names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        ctx.set_materialize_grads(False)
        autograd.save(ctx, output, **arguments)
        return output

    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = any(grad is not None for grad in output_grads)
        grads = autograd.backward(npu, ctx, *output_grads) if used else {}
        return None, None, *(grads.get(name) for name in ctx.names)

    # the class's name is what ``tensor.grad_fn`` shows
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(op._schema.name.partition("::")[2], (torch.autograd.Function,), methods)

    def kernel(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            arguments = by_name(op, args, kwargs)
            tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
            if any(tensor.requires_grad for tensor in tensors):
                return function.apply(keyset, (args, kwargs, arguments), *tensors)
        return below_autograd(keyset, args, kwargs)

    return kernel
