"""torch_npu's fused operators on the emulator compute what the reference kernels compute on the CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from tests._helpers.op_cases import Case, all_cases
from torchtitan_npu.cli.doctor.call_description import TensorDescription
from torchtitan_npu.cli.doctor.operator_samples import SAMPLES
from torchtitan_npu.cli.doctor.operators import NOT_CALLED
from torchtitan_npu.compile import backend
from torchtitan_npu.compile.backend import bypass_codegen
from torchtitan_npu.emulator import workspaces
from torchtitan_npu.emulator.kernels.fused import FUSED
from torchtitan_npu.emulator.kernels.registry import CHECKS
from torchtitan_npu.ops import OPS, Op, define
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.ops.moe_permute import unpermute
from torchtitan_npu.torch_internals.inductor import lower_as_view

define("npu_on_cpu")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PROBS = {"probs": TensorDescription(torch.bfloat16, 2)}
DESCRIBED = {"_npu_moe_token_unpermute": PROBS, "npu_moe_token_unpermute_grad_v2": PROBS}
"""Descriptions of a sample's arguments. Without probs, CANN 9.1 and later return no second output."""
EXPLICIT = {"npu_lightning_indexer": {"return_value": True, "sparse_count": 2048}}
"""Arguments to add to a sample. The gradient of the indexer needs the values, of 2048 keys."""


def sample(op: Op, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    arguments = {**SAMPLES[op.name](**DESCRIBED.get(op.name, {})), **EXPLICIT.get(op.name, {})}
    cast = lambda t: t.to(dtype) if t.dtype == torch.bfloat16 else t  # noqa: E731
    arguments = tree_map_only(Tensor, cast, arguments)
    return {name: dtype if value is torch.bfloat16 else value for name, value in arguments.items()}


CALLS = [
    pytest.param(op, dtype, id=f"{op.name}-{str(dtype).removeprefix('torch.')}")
    for op in OPS.values()
    if op.name in SAMPLES
    for dtype in DTYPES
    if not op.limit_errors(**op.complete(**sample(op, dtype)))
]


def call(op: Op, namespace: str, arguments: dict[str, Any]) -> list[Tensor]:
    """Return the outputs and, if the operator has autograd, the gradients of its arguments."""
    device = "cpu" if namespace == "npu_on_cpu" else "npu"
    trained: list[Tensor] = []

    def move(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        value = value.clone().to(device)
        # torch_npu computes the gradients of cosines and sines only if they require one
        if value.is_floating_point() and (op.autograd is not None or op.name == "npu_rotary_mul_backward"):
            trained.append(value.requires_grad_())
        return value

    outputs = op.overload(namespace)(**tree_map(move, arguments))
    outputs = [value for value in tree_leaves(outputs) if isinstance(value, Tensor)]
    differentiable = [value for value in outputs if value.requires_grad]
    grads: list[Tensor] = []
    if differentiable and op.name != "npu_add_rms_norm":  # torch_npu has no gradient for it
        torch.manual_seed(1)
        output_grads = [torch.randn(value.shape).to(value.dtype).to(device) for value in differentiable]
        grads = [
            grad
            for grad in torch.autograd.grad(differentiable, trained, output_grads, allow_unused=True)
            if grad is not None
        ]
    return [value.detach().cpu() for value in (*outputs, *grads)]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for got, reference in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("op", "dtype"), CALLS)
def test_equal_to_the_reference_kernel(op: Op, dtype: torch.dtype) -> None:
    arguments = sample(op, dtype)
    assert_equal(call(op, "npu", arguments), call(op, "npu_on_cpu", arguments))


ATTENTION = [
    case
    for case in all_cases()
    if case.op == "npu_fusion_attention" and case.rejected_by is None and case.what != "empty batch"
]
"""The arguments of the other operators' cases are for fake tensors only."""


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_layouts_and_masks_of_attention(case: Case) -> None:
    torch.manual_seed(0)
    op = OPS[case.op]
    args, kwargs = case.arguments("cpu")
    arguments = by_name(op.overload(), args, kwargs)
    assert_equal(call(op, "npu", arguments), call(op, "npu_on_cpu", arguments))


TAKEN_BY_CANN = {
    "npu_fusion_attention: lower case",  # torch_npu converts the layout to upper case
    "npu_fusion_attention: causal without a mask",  # an NPU masks nothing
    "npu_fusion_attention: band",
    "npu_fusion_attention: dropout",
    "npu_grouped_matmul: activation",
    "npu_grouped_matmul: MXFP8 without the dtype of its scales",  # this chip refuses float8 before
    "npu_moe_token_unpermute: restore_shape",  # ignored without padded_mode
    "_npu_moe_token_unpermute: restore_shape",
    "npu_rotary_mul_backward: grad of another shape",  # torch_npu does not pass input if only its gradient is needed
}
"""Calls that this package rejects, and CANN not, or not for that reason."""
REFUSED = [
    case for case in all_cases() if case.rejected_by == "us" and case.op in SAMPLES and str(case) not in TAKEN_BY_CANN
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused_as_cann_refuses(case: Case) -> None:
    args, kwargs = tree_map_only(Tensor, lambda t: t.npu(), case.arguments("cpu"))
    with pytest.raises(RuntimeError, match=r"call aclnn\w+ failed, error code is 161002"):
        OPS[case.op].overload("npu")(*args, **kwargs)


def test_the_user_sees_why_a_call_was_refused() -> None:
    with pytest.raises(RuntimeError, match=r"gamma must have the trailing shape of input \(2, 64\), not \(63,\)"):
        torch.ops.npu.npu_rms_norm(torch.ones(2, 64, device="npu"), torch.ones(63, device="npu"))


def test_the_limits_of_every_operator_are_checked() -> None:
    """A translation checks the limits before each call. An operator with an underscore is the same kernel."""
    limited = {name.removeprefix("_") for name, op in OPS.items() if op.limits}
    assert limited - set(FUSED.values()) == set(NOT_CALLED) - set(FUSED.values())
    assert FUSED.keys() <= CHECKS.keys()


def test_a_limit_of_the_device_is_refused() -> None:
    arguments = sample(OPS["npu_sparse_flash_attention"], torch.float32)
    arguments = tree_map_only(Tensor, lambda t: t.npu(), arguments)
    with pytest.raises(RuntimeError, match=r"query is float32; CANN 9.\d.0 on Ascend910B3 takes float16, bfloat16"):
        torch.ops.npu.npu_sparse_flash_attention(**arguments)


def test_what_the_emulator_lacks_is_no_refusal_of_cann() -> None:
    arguments = tree_map_only(Tensor, lambda t: t.npu(), sample(OPS["npu_fusion_attention"], torch.float32))
    with pytest.raises(
        RuntimeError, match=r"error code is 561000[\s\S]*the emulator's kernel does not have the argument drop_mask"
    ):
        torch.ops.npu.npu_fusion_attention(**arguments, keep_prob=0.5)


def test_workspaces_are_allocated() -> None:
    op = OPS["npu_sparse_flash_attention_grad"]
    arguments = tree_map_only(Tensor, lambda t: t.npu(), sample(op, torch.bfloat16))
    torch.npu.synchronize()
    torch.npu.empty_cache()
    before = torch.npu.memory_reserved()
    op.overload("npu")(**arguments)
    size = workspaces.sparse_attention_grad(**op.complete(**arguments))
    assert size <= torch.npu.memory_reserved() - before < size + (32 << 20)


def test_a_compiled_region_with_an_undefined_output() -> None:
    """From CANN 9.1, torch_npu's unpermute without scores returns an undefined tensor for its backward."""
    slots = torch.randperm(8, generator=torch.Generator().manual_seed(0)).int().npu()
    rows = torch.arange(32.0, device="npu").view(8, 4).requires_grad_()
    assert torch.ops.npu._npu_moe_token_unpermute(rows, slots)[1] is None
    weights = torch.arange(32.0, device="npu").view(8, 4)
    region = torch.compile(lambda x: unpermute(2 * x, slots) * weights, backend=bypass_codegen)
    region(rows).sum().backward()
    assert torch.equal(rows.grad, torch.zeros_like(weights).index_copy(0, slots, 2 * weights))


def test_a_generated_kernel_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pointwise operator that Inductor may lower, as an option or a new version of torch might have it."""

    def let_one_through(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default):
            lower_as_view(node)

    monkeypatch.setattr(backend, "fold_views", let_one_through)
    region = torch.compile(lambda x: x.sin().cos(), backend=bypass_codegen, fullgraph=True)
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match='must be "off": Inductor would generate a kernel'):
        region(torch.ones(4, device="npu"))
    assert "torch_npu._inductor" not in sys.modules  # it changes compilation in the whole process
