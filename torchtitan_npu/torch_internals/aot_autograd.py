"""AOTAutograd: the inputs of a traced region, and its check for operators that alias. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor, fx
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import DifferentiableAOTInput

__all__ = ["aliasing_operators_allowed", "is_input_of_region"]


def is_input_of_region(placeholder: fx.Node) -> bool:
    """Return whether a placeholder is a tensor that the region's caller passes, or the gradient of an output.

    The local tensor of a DTensor is not, nor is an activation that the forward graph saved.
    """
    passed = isinstance(placeholder.meta.get("desc"), DifferentiableAOTInput)
    return passed and isinstance(placeholder.meta.get("val"), Tensor)


def aliasing_operators_allowed() -> AbstractContextManager[None]:
    """Have operators that return their own argument, against their schema, cause a warning instead of an error."""
    option = "error_on_custom_op_aliasing"  # not in torch 2.11
    return config.patch({option: False} if hasattr(config, option) else {})
