"""Inductor: its options without code generation, its hooks, and the compilation of a graph with them.

AOTAutograd's and Dynamo's part in it, too. Seen on torch 2.11 to 2.13. An option that another version lacks is an error
that names it. Inductor and Dynamo are imported when they are first needed, because that takes seconds.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import config
from torch._functorch._aot_autograd.descriptors import DifferentiableAOTInput

from torchtitan_npu.errors import UsageError

OPTIONS: dict[str, Any] = {
    # Inductor's mode "lite": each operator is called as it is
    "fallback_by_default": True,
    "selective_decompose": True,
    "reorder_for_peak_memory": False,
    "reorder_for_compute_comm_overlap": False,
    "triton.reorder_for_reducing_graph_partitions": False,
    "use_pre_grad_passes": False,
    "use_joint_graph_passes": False,
    "use_dce": False,
    "allow_buffer_reuse": False,
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
LOWERED = {"compile_with_inductor": "view"}
"""Mark of a node that mode ``lite`` lowers instead of calling it."""


def bypass_options(
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], rewrite: Callable[[fx.Graph], None]
) -> dict[str, Any]:
    """Return the options of ``torch.compile`` with which Inductor generates no kernels.

    ``partition`` cuts joint graphs, and ``rewrite`` gets each graph to be compiled.
    """
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partition(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            kwargs.pop("compiler", None)
            return partition(gm, joint_inputs, **kwargs)

        def uuid(self) -> None:
            return None

    return {**OPTIONS, "custom_partitioner_fn": Partition(), "post_grad_custom_pre_pass": rewrite}


def check_options() -> None:
    """Raise a :class:`UsageError` if this torch lacks an option of :func:`bypass_options`."""
    for name, value in {**OPTIONS, "custom_partitioner_fn": None, "post_grad_custom_pre_pass": None}.items():
        try:
            torch.compile(lambda: None, backend="inductor", options={name: value})
        except RuntimeError:
            raise UsageError(
                f'npu.bypass_codegen must be "off" with torch {torch.__version__}: Inductor has no option {name}'
            ) from None


def lower_as_view(node: fx.Node) -> None:
    """Have mode ``lite`` lower ``node``, which becomes an expression in its users' calls, instead of calling it."""
    node.meta["custom"] = LOWERED


def compile_graph(
    graph_module: fx.GraphModule,
    inputs: Sequence[Any],
    options: dict[str, Any],
    check: Callable[[str, Callable[[list[Any]], Any]], Callable[[list[Any]], Any]],
) -> Callable[..., Any]:
    """Compile a graph of Dynamo with Inductor under ``options``, and return a function of its inputs.

    ``check`` gets the source of each generated wrapper and its function, and returns the function to call instead.
    """
    from torch._inductor import compile_fx

    def compile_inner(graph_module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        # An input that is not static would be copied if it is not aligned. Only generated kernels need that.
        kwargs["static_input_idxs"] = range(len(inputs))
        with _wrapper_of_npu(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Torchinductor does not support code generation for complex operators")
            compiled: Any = compile_fx.compile_fx_inner(graph_module, inputs, **kwargs)
        if hasattr(compiled, "source_code"):  # else the graph has no calls, and its own function is returned
            compiled.current_callable = check(compiled.source_code, compiled.current_callable)
        return compiled

    # with an empty table of decompositions the joint graph need not be traced again
    compiled: Any = compile_fx.compile_fx(
        graph_module,
        list(inputs),
        inner_compile=compile_inner,
        config_patches={**options, "selective_decompose": False, "trace.provenance_tracking_level": 0},
        decompositions={},
    )
    return compiled


@contextmanager
def _wrapper_of_npu() -> Iterator[None]:
    """Have Inductor write its Python wrapper for the NPU, without kernels, in this context.

    Torch_npu's own part of Inductor generates kernels, and changes compilation in the whole process when it is loaded.
    It is not needed here. Where it is loaded, its entries are back after the context.
    """
    from torch._inductor.codegen import common
    from torch._inductor.scheduler import BaseScheduling

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

    class NpuCalls(common.DeviceOpOverrides):
        def import_get_raw_stream_as(self, name: str) -> str:
            return f"{name} = torch.npu.current_stream"

        def synchronize(self) -> str:
            return "torch.npu.synchronize()"

        def device_guard(self, device_idx: int) -> str:
            return f"torch.npu.device({device_idx})"

        def set_device(self, device_idx: int) -> str:
            return f"torch.npu.set_device({device_idx})"

    common.init_backend_registration()
    common.get_device_op_overrides("cpu")  # torch 2.11 loads those of all devices only as long as none is registered
    tables: tuple[dict[str, Any], ...] = (
        common.device_codegens,
        common.custom_backend_passes,
        common.custom_backend_codegen_configs,
        common.device_op_overrides_dict,
    )
    entries = [table.get("npu") for table in tables]
    python_wrapper: Any = common.get_wrapper_codegen_for_device("cpu")
    common.register_backend_for_device("npu", NoKernels, python_wrapper)
    common.register_device_op_overrides("npu", NpuCalls())
    try:
        yield
    finally:
        for table, entry in zip(tables, entries, strict=True):
            if entry is None:
                del table["npu"]
            else:
                table["npu"] = entry


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


@contextmanager
def compile_callbacks(start: Callable[[Any], None], end: Callable[[Any], None]) -> Iterator[None]:
    """Call ``start`` and ``end`` around everything that torch compiles in this context, lazy backward graphs too."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(end)
