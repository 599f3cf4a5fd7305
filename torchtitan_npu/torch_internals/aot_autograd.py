"""AOTAutograd: the metadata of a traced region, its graphs' inputs, and its convention for compiled graphs.

Seen on torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx
from torch._functorch._aot_autograd.descriptors import DifferentiableAOTInput
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext

__all__ = [
    "accept_any_gradient_strides",
    "eliminate_common_subexpressions",
    "graphs_match_region",
    "is_input_of_region",
    "is_tensor_subclass",
    "region_metadata",
    "takes_list",
]

UNSUPPORTED = (
    "num_mutated_inp_runtime_indices",
    "num_intermediate_bases",
    "num_tensors_saved_with_no_vc_check",
    "num_opaque_objects_saved_for_bw",
    "num_symints_saved_for_bw",
    "num_backward_tokens",
    "num_graphsafe_rng_states",
    "tokens",
    "is_rng_op_functionalized",
)
"""Metadata fields of features that need AOTAutograd's runtime."""
PLAIN_OUTPUTS = ("non_alias", "unsafe_view_alias")


def eliminate_common_subexpressions(graph: fx.Graph) -> fx.Graph:
    """Return ``graph`` with equal calls merged."""
    return fx_graph_cse(graph)


def takes_list(launch: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark ``launch`` as taking one list of inputs, which it may empty, and return it."""
    launch._boxed_call = True  # type: ignore[attr-defined]
    return launch


def is_tensor_subclass(value: Any) -> bool:
    """Return whether ``value``, a tensor or its type, is unwrapped by AOTAutograd, as a DTensor is."""
    return hasattr(value, "__tensor_flatten__")


def is_input_of_region(placeholder: fx.Node) -> bool:
    """Return whether a placeholder is a tensor that the region's caller passes, or the gradient of an output.

    The local tensor of a DTensor is not, nor is an activation that the forward graph saved.
    """
    passed = isinstance(placeholder.meta.get("desc"), DifferentiableAOTInput)
    return passed and isinstance(placeholder.meta.get("val"), Tensor)


def region_metadata() -> Any:
    """Return AOTAutograd's metadata for the region being compiled. To be called from a graph compiler.

    If the region has tensor subclasses, the metadata describes their local tensors.
    """
    return TracingContext.get().fw_metadata  # type: ignore[union-attr]


class _Any:
    """Compares equal to everything."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class _AnyStrides:
    """A memory format that matches every gradient. AOTAutograd copies a gradient that does not match its format."""

    memory_format = None
    size = stride = _Any()


def accept_any_gradient_strides(metadata: Any) -> None:
    """Have AOTAutograd pass gradients to this region's backward graph with the strides that they have.

    No option turns off the copy into the strides seen in tracing. This sets the expected format in the region's own
    ``metadata``. It has no effect on regions with tensor subclasses, where the runtime uses other metadata.
    """
    for tangent in metadata.subclass_tangent_meta:
        tangent.memory_format = _AnyStrides()


def graphs_match_region(metadata: Any, inputs: Sequence[Any], graph_inputs: int) -> bool:
    """Return whether a region's graphs can be called without AOTAutograd's runtime.

    The inputs and outputs of the graphs must be those of the region: tensors that do not alias each other. ``inputs``
    are example inputs of the region, and ``graph_inputs`` is the number of inputs of its forward graph.
    """
    if any(getattr(metadata, name) for name in UNSUPPORTED) or metadata.grad_enabled_mutation is not None:
        return False
    if getattr(metadata, "act_input_indices", None):  # not in torch 2.11
        return False
    if graph_inputs != len(inputs):
        return False
    if not all(isinstance(value, Tensor) and not is_tensor_subclass(value) for value in inputs):
        return False
    if any(info.mutates_data or info.mutates_metadata for info in metadata.input_info):
        return False
    return all(
        info.output_type.name in PLAIN_OUTPUTS
        and issubclass(info.raw_type, Tensor)
        and not is_tensor_subclass(info.raw_type)
        for info in metadata.output_info
    )
