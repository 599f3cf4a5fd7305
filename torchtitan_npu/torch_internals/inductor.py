"""Inductor: its options without code generation, its hooks, and the compilation of a graph with them.

Written for torch 2.13. An option that another version lacks is an error that names it. Inductor is imported when it is
first needed, because that takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from torchtitan_npu.errors import UsageError

__all__ = ["bypass_options", "compile_graph", "graph_hook", "is_lowered_as_view", "lower_as_view", "partition_hook"]

OPTIONS: dict[str, Any] = {
    # the hooks of this stage run; Inductor's own patterns and reordering do not
    "use_post_grad_passes": True,
    "pattern_matcher": False,
    "reorder_for_locality": False,
    "graph_partition": False,
    "alignment_asserts": False,
    # the joint graph is traced twice; this keeps the marks of activation checkpointing and of forward nodes
    "trace.provenance_tracking_level": 1,
    # compiling without kernels takes less time than the look-up is worth
    "fx_graph_cache": False,
}
"""Options in addition to those of Inductor's mode ``lite``, in which each operator is called as it is."""
LOWERED = {"compile_with_inductor": "view"}
"""Mark of a node that mode ``lite`` lowers instead of calling it."""


def bypass_options(partition: Any, rewrite: Any) -> dict[str, Any]:
    """Return the options of ``torch.compile`` with which Inductor generates no kernels.

    ``partition`` is a :func:`partition_hook` and ``rewrite`` a :func:`graph_hook`.
    """
    from torch._inductor import list_mode_options, list_options

    options: dict[str, Any] = {
        **list_mode_options().get("lite", {"fallback_by_default": True}),
        **OPTIONS,
        "custom_partitioner_fn": partition,
        "post_grad_custom_pre_pass": rewrite,
    }
    known = list_options()
    for name in options:
        if name not in known:
            raise UsageError(
                f'npu.bypass_codegen must be "off" with torch {torch.__version__}: Inductor has no option {name}'
            )
    return options


def partition_hook(partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]) -> Any:
    """Return ``partition`` for Inductor's option ``custom_partitioner_fn``."""
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Hook(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            kwargs.pop("compiler", None)
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None

    return Hook()


def graph_hook(rewrite: Callable[[fx.Graph, bool], None]) -> Any:
    """Return ``rewrite`` for Inductor's options ``post_grad_custom_*_pass``.

    It gets a graph, and whether that is the graph of a region without gradients.
    """
    from torch._inductor.custom_graph_pass import CustomInferenceAwareGraphPass

    class Hook(CustomInferenceAwareGraphPass):
        def __call__(self, graph: fx.Graph, is_inference: bool) -> None:  # type: ignore[override]
            rewrite(graph, is_inference)

        def uuid(self) -> None:
            return None

    return Hook()


def lower_as_view(node: fx.Node) -> None:
    """Have mode ``lite`` lower ``node``, which becomes an expression in its users' calls, instead of calling it."""
    node.meta["custom"] = LOWERED


def is_lowered_as_view(node: fx.Node) -> bool:
    """Return whether ``node`` was given to :func:`lower_as_view`."""
    return node.meta.get("custom") == LOWERED


def compile_graph(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    options: dict[str, Any],
    change: Callable[[str, Callable[[list[Any]], Any]], Callable[[list[Any]], Any]],
) -> Callable[..., Any]:
    """Compile a graph of Dynamo with Inductor under ``options``, and return a function of its inputs.

    ``change`` gets the source of each generated wrapper and its function, and returns the function to call instead.
    Torch_npu's part of Inductor is not loaded: it changes compilation in the whole process.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    for device in {value.device.type for value in inputs if isinstance(value, torch.Tensor)}:
        _register_wrapper(device)

    def compile_inner(graph_module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        compiled: Any = compile_fx_inner(graph_module, inputs, **kwargs)
        compiled.current_callable = change(compiled.source_code, compiled.current_callable)
        return compiled

    # with an empty table of decompositions the joint graph need not be traced again
    compiled: Any = compile_fx(
        graph_module,
        list(inputs),
        inner_compile=compile_inner,
        config_patches={**options, "selective_decompose": False, "trace.provenance_tracking_level": 0},
        decompositions={},
    )
    return compiled


def _register_wrapper(device: str) -> None:
    """Register Inductor's Python wrapper for a device that has none. Existing entries stay."""
    from torch._inductor.codegen import common
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.scheduler import BaseScheduling

    common.init_backend_registration()
    if common.get_scheduling_for_device(device) is not None:
        return

    class NoKernels(BaseScheduling):
        """A scheduling without kernels. An operator that is not called as it is fails."""

        def get_backend_features(self, device: Any) -> Any:
            return set()

        def can_fuse_vertical(self, node1: Any, node2: Any) -> bool:
            return False

        def can_fuse_horizontal(self, node1: Any, node2: Any) -> bool:
            return False

        def group_fn(self, sizes: Any) -> Any:  # called for each loop that would become a kernel
            raise UsageError(f'npu.bypass_codegen must be "off": Inductor would generate a kernel, with loops {sizes}')

        def flush(self) -> None:
            pass

        def ready_to_flush(self) -> bool:
            return False

    common.register_backend_for_device(device, NoKernels, PythonWrapperCodegen)
    try:
        common.get_device_op_overrides(device)
    except KeyError:

        class Calls(common.DeviceOpOverrides):
            def import_get_raw_stream_as(self, name: str) -> str:
                return f"{name} = torch.{device}.current_stream"

            def synchronize(self) -> str:
                return f"torch.{device}.synchronize()"

            def device_guard(self, device_idx: int) -> str:
                return f"torch.{device}.device({device_idx})"

            def set_device(self, device_idx: int) -> str:
                return f"torch.{device}.set_device({device_idx})"

        common.register_device_op_overrides(device, Calls())
