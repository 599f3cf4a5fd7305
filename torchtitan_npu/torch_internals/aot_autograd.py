"""AOTAutograd: the inputs of a traced region. Seen on torch 2.11 to 2.13."""

from __future__ import annotations

from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import DifferentiableAOTInput

__all__ = ["is_input_of_region"]


def is_input_of_region(placeholder: fx.Node) -> bool:
    """Return whether a placeholder is a tensor that the region's caller passes, or the gradient of an output.

    The local tensor of a DTensor is not, nor is an activation that the forward graph saved.
    """
    passed = isinstance(placeholder.meta.get("desc"), DifferentiableAOTInput)
    return passed and isinstance(placeholder.meta.get("val"), Tensor)
