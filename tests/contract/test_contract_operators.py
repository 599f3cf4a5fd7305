"""Our operators against torch_npu's: schema, outputs, gradients, sharding, and the calls that they reject."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

from tests._helpers.op_cases import Case, all_cases
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS, Op, define
from torchtitan_npu.ops.core.arguments import Call, by_name
from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals import dtensor
from torchtitan_npu.torch_internals.dispatch import has_kernel

define("npu_contract")

VALID = [case for case in all_cases() if case.rejected_by is None]
REJECTED = [case for case in all_cases() if case.rejected_by is not None]

OPERATOR_ERROR = re.compile(r"call aclnn\w+ failed")
"""Part of the error of a call that passed every check of torch_npu and reached CANN, here the emulator."""

each_op = pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
each_case = pytest.mark.parametrize("case", VALID, ids=str)


def torch_npu_s(case: Case) -> OpOverload:
    return OPS[case.op].overload("npu")


def ours(case: Case) -> OpOverload:
    return OPS[case.op].overload("npu_contract")


def describe(value: Any) -> Any:
    """Return what a fake kernel determines of a value."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.stride(), value.device
    return type(value)


def on_fake_tensors(op: OpOverload, case: Case) -> list[Any]:
    """Return the descriptions of the outputs."""
    with FakeTensorMode():
        args, kwargs = case.arguments("npu")
        return [describe(value) for value in tree_leaves(op(*args, **kwargs))]


def has_meta_kernel(case: Case) -> bool:
    """Return whether torch_npu has a meta kernel for the operator. ``define`` registers ours as a fake kernel."""
    name = torch_npu_s(case)._schema.name
    ours = torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta") and not ours


def meta_kernel_error(case: Case) -> str | None:
    """Return the error of torch_npu's meta kernel, if it rejects the call."""
    return _error_of(lambda: on_fake_tensors(torch_npu_s(case), case)) if has_meta_kernel(case) else None


def check_error(case: Case) -> str | None:
    """Return the error of torch_npu's C++ checks, if they reject the call, on real npu tensors.

    The tensors are zero: torch_npu reads group sizes. A call that reaches CANN has passed the checks, also if the
    emulator refuses its sizes (the limits of the NPU's kernels are another test) or has no kernel.
    """

    def real_tensor(fake: Tensor) -> Tensor:
        tensor = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device="npu")
        ctypes.memset(tensor.data_ptr(), 0, tensor.untyped_storage().nbytes())
        return tensor

    with FakeTensorMode():
        arguments = case.arguments("npu")
    args, kwargs = tree_map_only(Tensor, real_tensor, arguments)
    error = _error_of(lambda: torch_npu_s(case)(*args, **kwargs))
    return None if error is None or OPERATOR_ERROR.search(error) else error


def _error_of(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return str(error)
    return None


def test_every_op_has_a_case() -> None:
    assert {case.op for case in VALID} == set(OPS)


@each_op
def test_the_operator_is_torch_npu_s(op: Op) -> None:
    """Otherwise the other tests would compare our operator with itself."""
    assert has_kernel(op.overload(), "PrivateUse1")
    assert not has_kernel(op.overload(), "CPU")


@each_op
def test_schema(op: Op) -> None:
    assert op.schema == str(op.overload("npu")._schema)


def test_operators_without_a_meta_kernel() -> None:
    """They have ours, and their outputs cannot be compared. A new meta kernel fails this test, so that it is."""
    without = [case for case in VALID if not has_meta_kernel(case)]
    assert {case.op for case in without} == {"npu_moe_gating_top_k_backward"}
    assert all(has_kernel(torch_npu_s(case), "Meta") for case in without)


def test_our_meta_kernel_describes_the_gradient_of_gating() -> None:
    """On fake tensors the gradient is that of the NPU, on the emulator: contiguous, in the dtype of ``grad_y``."""
    backward = torch.ops.npu.npu_moe_gating_top_k_backward
    scores, grad = torch.rand(16, 6, device="npu").t(), torch.randn(6, 2, device="npu").bfloat16()
    call = scores, grad, torch.tensor([[1, 5]], device="npu").int().repeat(6, 1)
    real = backward(*call, norm_type=1)
    with FakeTensorMode() as mode:
        fake = backward(*map(mode.from_tensor, call), norm_type=1)
    assert describe(fake) == describe(real) == ((6, 16), torch.bfloat16, (16, 1), real.device)


@pytest.mark.parametrize("case", [case for case in VALID if has_meta_kernel(case)], ids=str)
def test_outputs(case: Case) -> None:
    assert on_fake_tensors(ours(case), case) == on_fake_tensors(torch_npu_s(case), case)


@each_case
def test_torch_npu_accepts_the_call(case: Case) -> None:
    assert check_error(case) is None


@pytest.mark.parametrize("case", REJECTED, ids=str)
def test_rejected_calls(case: Case) -> None:
    """We reject what torch_npu rejects. If it now rejects one of those that only we reject, change ``rejected_by``."""
    with pytest.raises(UsageError, match=f"^{case.op}: "):
        on_fake_tensors(ours(case), case)
    error = meta_kernel_error(case) or check_error(case)
    assert bool(error) == (case.rejected_by == "torch_npu"), error


@pytest.mark.parametrize("case", [case for case in VALID if has_meta_kernel(case) and not case.forward_only], ids=str)
def test_gradients(case: Case) -> None:
    assert gradients(ours(case), case) == gradients(torch_npu_s(case), case)


@pytest.mark.parametrize("case", [case for case in VALID if case.forward_only], ids=str)
def test_no_gradient_without_statistics(case: Case) -> None:
    """torch_npu passes missing statistics to its backward kernel; our checks reject them."""
    if "softmax" in str(case):  # reaches the gradient of gating, which has our meta kernel, and with it our checks
        with pytest.raises(UsageError, match="npu_moe_gating_top_k_backward: norm_type must be 1"):
            gradients(torch_npu_s(case), case)
    else:
        assert any(isinstance(grad, tuple) for grad in gradients(torch_npu_s(case), case)["inputs"])
    with pytest.raises(UsageError):
        gradients(ours(case), case)


def gradients(op: OpOverload, case: Case) -> dict[str, Any]:
    """Return which outputs have a gradient function, and a description of each input's gradient."""
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
        except RuntimeError as error:  # "derivative for npu::... is not implemented"
            found = str(error)
        return {"outputs": [y.requires_grad for y in outputs], "inputs": found}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with fake_ranks(2):
        yield init_device_mesh("npu", (2,))


def has_rule_of_its_own(op: OpOverload) -> bool:
    """Return whether torch_npu registers a DTensor rule for ``op``. This package registers the missing ones."""
    strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
    return op not in strategies or strategies[op].__module__ != dtensor.__name__


BROKEN_RULES = {
    "npu_rotary_mul": "takes from 3 to 4 positional arguments but 5 were given",
    "npu_grouped_matmul_add_": "got an unexpected keyword argument 'group_list_type'",
}
"""Errors of torch_npu 2.13.0's rules for arguments that their operators accept."""

LED_BY = {"npu_rms_norm": "input", "npu_rms_norm_backward": "input", "npu_add_rms_norm": "x1"}
"""Rules of torch_npu 2.13.0 that follow the placement of this argument, and replicate it if it is a partial sum. Ours
weigh the placements of all arguments, and reduce-scatter a partial sum."""

ONE_PRODUCT = "npu_grouped_matmul: no groups, one product"
UNLIKE_PRODUCTS = "npu_grouped_matmul: no groups, more and fewer dimensions"
WRONG_RULES: dict[str, list[Any]] = {
    ONE_PRODUCT: [(Partial(),)],  # mistaken for groups: (T, K) @ (E, K, N), which sums dimension 1
    UNLIKE_PRODUCTS: [(Shard(1),), (Shard(1),)],  # treated like the first; the second sums dimension 1
}
"""Wrong placements by torch_npu 2.13.0's rule for an ``x`` sharded by dimension 1, by case."""
COMMUNICATING = ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base")
"""torch_npu's rules describe the local tensors between which these operators communicate. Ours have no strategies: a
graph pass calls them on local tensors."""
SCALED = ("npu_grouped_matmul: MXFP8 by rows", "npu_grouped_matmul: MXFP8 by the summed dimension")
"""torch_npu's rule replicates the scales of sharded factors. Ours rejects DTensors: experts multiply local tensors."""
RULED = [
    case
    for case in VALID
    if has_rule_of_its_own(torch_npu_s(case)) and case.op not in COMMUNICATING and str(case) not in SCALED
]


UNEVEN = (
    "npu_rms_norm_backward: gamma of two dimensions",
    "npu_swiglu: along the first dimension",
    "npu_swiglu_backward: along the first dimension",
    "npu_grouped_matmul: no groups, bias",
)
"""Cases in which torch_npu's rule redistributes into unequal shards. Ours gathers instead."""


def slow_if_repeated(cases: list[Case]) -> list[Any]:
    """Mark a case slow if an earlier one differs only by dtypes and strides, which no rule reads."""
    known: set[str] = set()
    marked = []
    for case in cases:
        with FakeTensorMode():
            shapes = tree_map_only(Tensor, lambda tensor: tuple(tensor.shape), case.arguments("npu"))
        call = f"{case.op} {shapes}"
        marked.append(pytest.param(case, marks=[pytest.mark.slow] if call in known else []))
        known.add(call)
    return marked


@pytest.mark.parametrize("case", slow_if_repeated([case for case in RULED if str(case) not in WRONG_RULES]), ids=str)
def test_sharding(case: Case, mesh: DeviceMesh) -> None:
    """For any placements of the inputs, the outputs have the placements of torch_npu's own rule."""
    for layout in layouts(case, mesh):
        found, theirs = (placements(op, case, layout, mesh) for op in (ours(case), torch_npu_s(case)))
        if isinstance(theirs, str) and case.op in BROKEN_RULES and BROKEN_RULES[case.op] in theirs:
            continue
        if str(case) in UNEVEN and isinstance(found, list) and all(one == (Replicate(),) for one in found):
            continue
        assert describe_placements(found) == describe_placements(theirs), f"with inputs {layout or 'replicated'}"


@pytest.mark.parametrize("case", [case for case in RULED if str(case) in WRONG_RULES], ids=str)
def test_a_wrong_rule_is_still_wrong(case: Case, mesh: DeviceMesh) -> None:
    """If this fails, the rule is correct now: compare it."""
    assert placements(torch_npu_s(case), case, {"x": Shard(1)}, mesh) == WRONG_RULES[str(case)]


def describe_placements(outcome: list[Any] | str) -> list[Any] | str:
    return "an error" if isinstance(outcome, str) else outcome


def layouts(case: Case, mesh: DeviceMesh) -> list[dict[str, Placement]]:
    """Return placements of the inputs over one mesh dimension, by argument. Other arguments are replicated.

    They are the strategies of our rule, and every placement of each argument alone. DTensor shards a replicated tensor
    at no cost, so a rule then selects any strategy it has for that placement, also one that only torch_npu's rule has.
    """

    def spec(tensor: Tensor) -> DTensorSpec:
        return DTensorSpec(mesh, (Replicate(),), TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))

    with FakeTensorMode():
        specs = tree_map_only(Tensor, spec, by_name(torch_npu_s(case), *case.arguments("npu")))
    tensors = {name: [x for x in tree_leaves(value) if isinstance(x, DTensorSpec)] for name, value in specs.items()}

    def fits(name: str, placement: Placement) -> bool:
        """DTensor does not select a strategy that leaves a rank without elements."""
        return not isinstance(placement, Shard) or all(x.shape[placement.dim] >= mesh.size() for x in tensors[name])

    try:
        offered = [dict(inputs) for _, inputs in OPS[case.op].sharding(Call(**specs))]
    except UsageError:
        offered = []  # the rule rejects such a call
    alone = [
        {name: placement}
        for name, values in tensors.items()
        if values and LED_BY.get(case.op, name) == name
        for placement in (*map(Shard, range(values[0].ndim)), *([] if case.op in LED_BY else [Partial()]))
    ]
    return [{}, *(layout for layout in (*offered, *alone) if all(fits(*item) for item in layout.items()))]


def placements(op: OpOverload, case: Case, layout: dict[str, Placement], mesh: DeviceMesh) -> list[Any] | str:
    """Return the placements of the outputs for inputs in this ``layout``, or DTensor's error."""

    def lay_out(name: str, value: Any) -> Any:
        return tree_map_only(Tensor, lambda x: distributed(x, layout.get(name, Replicate()), mesh), value)

    names = [argument.name for argument in op._schema.arguments]
    with FakeTensorMode(allow_non_fake_inputs=True):
        args, kwargs = case.arguments("npu")
        args = tuple(lay_out(name, value) for name, value in zip(names, args, strict=False))
        try:
            outputs = op(*args, **{name: lay_out(name, value) for name, value in kwargs.items()})
        except (UsageError, NotImplementedError) as error:
            return str(error)
        except RuntimeError as error:
            assert "Sharding propagation failed" in str(error) or "no valid strategy preserves" in str(error)
            return str(error)
    return [y.placements if isinstance(y, DTensor) else type(y) for y in tree_leaves(outputs)]


def distributed(full: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    local = full.chunk(mesh.size(), placement.dim)[0] if isinstance(placement, Shard) else full
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=full.shape, stride=full.stride())
