"""AOTAutograd's metadata has the fields that this package reads, and no new ones that it would ignore."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import schemas
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.torch_internals.aot_autograd import (
    accept_any_gradient_strides,
    eliminate_common_subexpressions,
    graphs_match_region,
    is_input_of_region,
    is_tensor_subclass,
    region_metadata,
    takes_list,
)
from torchtitan_npu.torch_internals.dynamo import aot_autograd

METADATA = """
    input_info output_info num_intermediate_bases keep_input_mutations traced_tangents traced_tangents_descs
    subclass_inp_meta subclass_fw_graph_out_meta subclass_tangent_meta traced_tangent_metas num_symints_saved_for_bw
    num_tensors_saved_with_no_vc_check num_opaque_objects_saved_for_bw grad_enabled_mutation deterministic
    static_input_indices tokens indices_of_inputs_that_requires_grad_with_mutations_in_bw bw_donated_idxs
    num_backward_tokens num_graphsafe_rng_states graphsafe_rng_state_index mutated_inp_stream_indices
"""
IN_SOME_VERSIONS = "is_train act_input_indices graphsafe_rng_device compile_id_str tangent_source_stack_traces"
"""``is_train`` is in torch 2.11, the others in 2.13."""
OUTPUTS = """
    non_alias alias_of_input is_input alias_of_intermediate_save_as_output alias_of_intermediate
    alias_of_intermediate_base_is_user_output unsafe_view_alias custom_function_view
"""


def test_all_metadata_is_known() -> None:
    """A new field may be a feature that needs AOTAutograd's runtime: see ``graphs_match_region``."""
    fields = {field.name for field in dataclasses.fields(schemas.ViewAndMutationMeta)}
    assert fields >= {*METADATA.split()}
    assert fields <= {*METADATA.split(), *IN_SOME_VERSIONS.split()}
    assert set(schemas.OutputType.__members__) == set(OUTPUTS.split())


class Recorder:
    """A backend that runs graphs as they are and records what its graph compiler can see."""

    def __init__(self, any_strides: bool = False) -> None:
        self.any_strides = any_strides
        self.matches: list[bool] = []
        self.placeholders: list[fx.Node] = []
        self.gradients: list[Tensor] = []

    def __call__(self, graph_module: fx.GraphModule, inputs: Any) -> Any:
        def compile_graph(graph_module: fx.GraphModule, graph_inputs: Any) -> Any:
            metadata = region_metadata()
            placeholders = graph_module.graph.find_nodes(op="placeholder")
            is_backward = any("tangents" in node.name for node in placeholders)
            if not is_backward:
                self.matches.append(graphs_match_region(metadata, inputs, len(placeholders)))
            self.placeholders += placeholders
            if self.any_strides:
                accept_any_gradient_strides(metadata)

            def launch(given: list[Any]) -> Any:
                if is_backward:
                    self.gradients.append(given[-1])
                return graph_module(*given)

            return takes_list(launch)

        return aot_autograd(fw_compiler=compile_graph)(graph_module, inputs)


def test_gradient_strides() -> None:
    """AOTAutograd copies a gradient into the strides seen in tracing, unless told otherwise."""
    x, gradient = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3).t()
    for any_strides in (False, True):
        torch.compiler.reset()
        recorder = Recorder(any_strides)
        output = torch.compile(lambda x: x.sin(), backend=recorder)(x)
        (result,) = torch.autograd.grad(output, x, gradient)
        assert recorder.gradients[0].stride() == ((1, 3) if any_strides else (4, 1))
        torch.testing.assert_close(result, gradient * x.detach().cos())


def test_regions_that_need_the_runtime() -> None:
    def update(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    for function, matches in {
        (lambda x: x.sin()): True,
        (lambda x: (x.sin(), x.detach())): False,  # an alias of the input
        update: False,  # an in-place update
    }.items():
        torch.compiler.reset()
        recorder = Recorder()
        torch.compile(function, backend=recorder)(torch.randn(3))
        assert recorder.matches == [matches]


def dtensor_inputs() -> tuple[bool, list[bool]]:
    mesh = init_device_mesh("cpu", (1,))
    x = DTensor.from_local(torch.randn(3, 4), mesh, [Shard(0)])
    recorder = Recorder()
    torch.compile(lambda x, y: x.to_local() + y, backend=recorder)(x, torch.randn(3, 4))
    return is_tensor_subclass(x), [
        is_input_of_region(node) for node in recorder.placeholders if isinstance(node.meta["val"], Tensor)
    ]


def test_inputs_of_a_region() -> None:
    """The local tensor of a DTensor is an input of the graph, not of the region."""
    assert not is_tensor_subclass(torch.ones(1))
    assert run_on_ranks(1, dtensor_inputs) == [(True, [False, True])]


def test_common_subexpressions() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    two = [graph.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(2)]
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, tuple(two)))
    assert len(eliminate_common_subexpressions(graph).find_nodes(op="call_function", target=two[0].target)) == 1
