"""Our operators are torch_npu's: the same schema, the same outputs, the same gradients, the same way to be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.ops.cases import Case
from tests.rehearsal.both_sides import (
    VALID,
    describe,
    has_meta_kernel,
    objection_of_the_checks,
    on_fake_tensors,
    real,
    stand_in,
)
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS, Op
from torchtitan_npu.ops.arguments import by_name
from torchtitan_npu.ops.sharding import register_sharding_rule
from torchtitan_npu.rehearsal import fake_ranks

each_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
each_case = pytest.mark.parametrize("case", VALID, ids=str)


def test_every_op_has_a_case() -> None:
    assert {case.op for case in VALID} == set(OPS)


@each_op
def test_the_op_is_torch_npu_s_own(op: Op) -> None:
    """Or the rest would compare the stand-in with itself."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{op.name}", "PrivateUse1")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"npu::{op.name}", "CPU")


@each_op
def test_schema(op: Op) -> None:
    assert op.schema == str(op.overload("npu")._schema)


def test_which_ops_have_no_meta_kernel() -> None:
    """Their outputs cannot be compared; whoever brings the kernel brings the comparison."""
    assert {case.op for case in VALID if not has_meta_kernel(case)} == {"npu_moe_gating_top_k_backward"}


@pytest.mark.parametrize("case", [case for case in VALID if has_meta_kernel(case)], ids=str)
def test_outputs(case: Case) -> None:
    assert on_fake_tensors(stand_in(case), case) == on_fake_tensors(real(case), case)


@each_case
def test_torch_npu_has_no_objection(case: Case) -> None:
    assert objection_of_the_checks(case) is None


@pytest.mark.parametrize("case", [case for case in VALID if has_meta_kernel(case) and not case.forward_only], ids=str)
def test_gradients(case: Case) -> None:
    ours, theirs = gradients(stand_in(case), case), gradients(real(case), case)
    assert ours["outputs"] == theirs["outputs"]
    if theirs["inputs"] == UNKNOWN:
        assert case.op == "npu_moe_gating_top_k"  # the only op whose gradient has no meta kernel
    else:
        assert ours["inputs"] == theirs["inputs"]


@pytest.mark.parametrize("case", [case for case in VALID if case.forward_only], ids=str)
def test_no_gradient_without_statistics(case: Case) -> None:
    """torch_npu hands its backward kernel what is not there; the stand-in says so."""
    assert any(isinstance(grad, tuple) for grad in gradients(real(case), case)["inputs"])
    with pytest.raises(UsageError):
        gradients(stand_in(case), case)


UNKNOWN = "no meta kernel"


def gradients(op: OpOverload, case: Case) -> dict[str, Any]:
    """Which outputs have a gradient function, and what it gives each input that can have a gradient."""
    with FakeTensorMode():
        args, kwargs = case.arguments("npu")
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_floating_point()]
        for tensor in inputs:
            tensor.requires_grad_()
        try:
            outputs = [y for y in tree_leaves(op(*args, **kwargs)) if isinstance(y, Tensor)]
        except RuntimeError:  # an input of a valid call must not require a gradient
            return {"outputs": "error", "inputs": "error"}
        roots = [y for y in outputs if y.requires_grad]
        found: list[Any] | str
        try:
            ones = [torch.ones_like(y) for y in roots]
            grads = torch.autograd.grad(roots, inputs, ones, allow_unused=True) if roots else ()
            found = [describe(grad) for grad in grads]
        except UnsupportedOperatorException:
            found = UNKNOWN
        except RuntimeError as error:  # "derivative for npu::... is not implemented"
            found = str(error)
        return {"outputs": [y.requires_grad for y in outputs], "inputs": found}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(2):
        yield init_device_mesh("npu", (2,))


def has_rule_of_its_own(op: OpOverload) -> bool:
    """Whether torch_npu tells DTensor how to shard ``op``; where it does not, the vocabulary does."""
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    return op not in strategies or strategies[op].__module__ != register_sharding_rule.__module__


BROKEN_RULES = {
    "npu_rotary_mul": "takes from 3 to 4 positional arguments but 5 were given",
    "npu_grouped_matmul_add_": "got an unexpected keyword argument 'group_list_type'",
}
"""Rules of torch_npu 2.13.0 that fail on arguments which their op takes: what they say then."""


@pytest.mark.parametrize("case", [case for case in VALID if has_rule_of_its_own(real(case))], ids=str)
def test_sharding(case: Case, mesh: DeviceMesh) -> None:
    """Where the inputs lie in a way that our rule offers, the outputs lie as torch_npu's own rule says."""
    for way in ways(case, mesh):
        with FakeTensorMode(allow_non_fake_inputs=True):
            ours, theirs = (placements(op, case, way, mesh) for op in (stand_in(case), real(case)))
        if isinstance(theirs, str) and case.op in BROKEN_RULES:
            assert BROKEN_RULES[case.op] in theirs
        else:
            assert describe_placements(ours) == describe_placements(theirs), f"with inputs {way or 'replicated'}"


def describe_placements(outcome: list[Any] | str) -> list[Any] | str:
    return "an error" if isinstance(outcome, str) else outcome


def ways(case: Case, mesh: DeviceMesh) -> list[dict[str, Placement]]:
    """The ways in which our rule takes the inputs on one mesh dimension, by argument, and all of them whole."""

    def spec(tensor: Tensor) -> DTensorSpec:
        return DTensorSpec(mesh, (Replicate(),), TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))

    with FakeTensorMode():
        specs = tree_map_only(Tensor, spec, by_name(real(case), *case.arguments("npu")))

    def fits(name: str, placement: Placement) -> bool:
        """DTensor does not take a way that leaves a rank without a share."""
        shapes = [x.shape for x in tree_leaves(specs[name]) if isinstance(x, DTensorSpec)]
        return not isinstance(placement, Shard) or all(shape[placement.dim] >= mesh.size() for shape in shapes)

    try:
        offered = [inputs for _, inputs in OPS[case.op].sharding(**specs)]
    except UsageError:
        offered = []  # the rule refuses such a call
    return [{}, *(dict(inputs) for inputs in offered if all(fits(*item) for item in inputs.items()))]


def placements(op: OpOverload, case: Case, way: dict[str, Placement], mesh: DeviceMesh) -> list[Any] | str:
    """How the outputs lie when the inputs lie in this ``way``, the others replicated; or why DTensor refuses."""

    def lay_out(name: str, value: Any) -> Any:
        return tree_map_only(Tensor, lambda x: distributed(x, way.get(name, Replicate()), mesh), value)

    args, kwargs = case.arguments("npu")
    names = [argument.name for argument in op._schema.arguments]
    args = tuple(lay_out(name, value) for name, value in zip(names, args, strict=False))
    try:
        outputs = op(*args, **{name: lay_out(name, value) for name, value in kwargs.items()})
    except (UsageError, NotImplementedError) as error:
        return str(error)
    except RuntimeError as error:
        assert "Sharding propagation failed" in str(error)
        return str(error)
    return [y.placements if isinstance(y, DTensor) else type(y) for y in tree_leaves(outputs)]


def distributed(whole: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    local = whole.chunk(mesh.size(), placement.dim)[0] if isinstance(placement, Shard) else whole
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
