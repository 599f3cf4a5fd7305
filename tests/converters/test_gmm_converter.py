"""``npu_gmm``: experts on the fused operators have the same results and gradients, also with sharded weights."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.expert_parallel import TensorParallel
from torchtitan.models.gpt_oss.infra.expert_parallel import GptossTensorParallel
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.moe.moe import GroupedExperts

from tests._helpers.converted_models import LAYOUT, assert_limit, assert_no_further, build_on_meta, convert, job
from tests._helpers.moe_layers import (
    ROUNDINGS,
    build_moe,
    call_experts,
    call_experts_exact,
    in_dtype,
    output_gradient,
    rows,
)
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.gmm import NpuGroupedExperts
from torchtitan_npu.distributed.expert_parallel import NpuGptOssGroupedExperts
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner import Calls
from torchtitan_npu.titan_internals.converter_registry import known_converters

CLASSES = {False: (GroupedExperts, NpuGroupedExperts), True: (GptOssGroupedExperts, NpuGptOssGroupedExperts)}


def experts(biased: bool, number: int) -> tuple[nn.Module, nn.Module]:
    """Return experts with weights, and a converted copy."""
    model = build_moe(biased, num_experts=number, top_k=1)
    return model[0].experts, convert(copy.deepcopy(model), "npu_gmm")[0].experts


def assert_same_experts(plain: nn.Module, converted: nn.Module, counts: list[int], dtype: torch.dtype) -> None:
    plain, converted = in_dtype(plain, dtype), in_dtype(converted, dtype)
    x, numbers = rows(counts, dtype)
    theirs, ours = (call_experts(module, x, numbers) for module in (plain, converted))
    exact = call_experts_exact(plain, x, numbers)
    assert ours.keys() == theirs.keys() == exact.keys()
    for name in exact:
        assert_no_further(name, ours[name], theirs[name], exact[name], ROUNDINGS)


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_computes_the_same(counts: list[int], biased: bool, dtype: torch.dtype) -> None:
    assert_same_experts(*experts(biased, len(counts)), counts, dtype)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("counts", [[0, 0, 0], [0, 4, 0], [5, 0, 0]], ids=str)
def test_experts_without_tokens_have_zero_gradients(biased: bool, counts: list[int]) -> None:
    plain, converted = experts(biased, 3)
    assert_same_experts(plain, converted, counts, torch.float32)
    results = call_experts(converted, *rows(counts))
    for name, _ in converted.named_parameters():
        assert results[name].shape == getattr(converted, name).shape
        for expert, count in enumerate(counts):
            assert bool(results[name][expert].count_nonzero()) == (count > 0)


@pytest.mark.parametrize(("biased", "products"), [(False, 3), (True, 2)])
def test_calls_the_fused_operators_whatever_the_number_of_experts(biased: bool, products: int) -> None:
    for number in (2, 8):
        _, converted = experts(biased, number)
        with Calls() as calls:
            call_experts(converted, *rows([1] * number))
        assert calls.count("npu")["npu_grouped_matmul"] == 3 * products  # forward, gradients of rows and weights
        assert calls.count("npu")["npu_swiglu"] == calls.count("npu")["npu_swiglu_backward"] == int(not biased)
        assert not {"mm", "bmm", "addmm", "_grouped_mm"} & set(calls.count("aten"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_autocast_computes_in_bfloat16(biased: bool, dtype: torch.dtype) -> None:
    plain, converted = experts(biased, 3)
    x, counts = rows([2, 0, 5], dtype)
    exact = call_experts_exact(plain, x, counts)
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = (call_experts(module, x, counts) for module in (plain, converted))
    assert {name: t.dtype for name, t in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    # float32 biases widen the sums they are added to
    assert ours["output"].dtype == (torch.float32 if biased else torch.bfloat16)
    for name in exact:
        # float32 results have been through bfloat16
        assert_no_further(name, ours[name].bfloat16(), theirs[name].bfloat16(), exact[name], ROUNDINGS)


def test_under_autocast_the_gradients_of_float32_rows_are_added_in_float32() -> None:
    """Eager adds the gradients through ``w1`` and ``w3`` in float32. A sum in bfloat16 would be less exact."""
    plain, converted = experts(False, 3)
    x, counts = rows([200, 0, 300])
    exact = call_experts_exact(plain, x, counts)["x"]
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = (call_experts(module, x, counts)["x"] for module in (plain, converted))
    assert ours.dtype == torch.float32 and (ours.bfloat16() != ours).any()
    # all other roundings are equally frequent in both, and 6,000 gradients average them out
    assert (ours.double() - exact).norm() <= 1.01 * (theirs.double() - exact).norm()


@pytest.mark.parametrize(("name", "biased", "number"), [("deepseek_v3", False, 5), ("gpt_oss", True, 4)])
def test_replaces_every_expert_and_keeps_its_state(
    name: str, biased: bool, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_on_meta(name)
    theirs, ours = CLASSES[biased]
    state = model.state_dict(keep_vars=True)
    assert sum(type(module) is theirs for module in model.modules()) == number
    with caplog.at_level(logging.INFO):
        convert(model, "npu_gmm")
    assert sum(type(module) is ours for module in model.modules()) == number
    assert not any(type(module) is theirs for module in model.modules())
    after = model.state_dict(keep_vars=True)
    assert list(after) == list(state) and all(after[key] is state[key] for key in state)
    message = next(text for text in caplog.messages if text.startswith("npu_gmm"))
    assert f"{number} {theirs.__name__} in layers" in message and "npu_grouped_matmul" in message


@pytest.mark.parametrize("biased", [False, True])
def test_converts_subclasses_with_the_same_forward(biased: bool) -> None:
    theirs, ours = CLASSES[biased]

    class FromZero(theirs):  # type: ignore[misc,valid-type]
        def init_weights(self, init_std: float) -> None:
            for parameter in self.parameters():
                parameter.zero_()

    class Doubled(theirs):  # type: ignore[misc,valid-type]
        def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
            return 2 * super().forward(x, num_tokens_per_expert)

    model = nn.ModuleList([build_moe(biased, num_experts=3)[0].experts for _ in range(2)])
    model[0].__class__, model[1].__class__ = FromZero, Doubled
    converted = convert(copy.deepcopy(model), "npu_gmm")
    assert isinstance(converted[0], ours) and isinstance(converted[0], FromZero) and type(converted[1]) is Doubled
    assert str(converted).count("NpuFromZero(") == 1
    assert_same_experts(model[0], converted[0], [2, 0, 3], torch.float32)
    with torch.no_grad():
        converted[0].init_weights(0.1)
    assert not any(parameter.any() for parameter in converted[0].parameters())


@pytest.mark.parametrize("other", ["quantize.grouped_mm.float8", "quantize.grouped_mm.mx"])
def test_cannot_be_combined_with_quantization_of_the_same_product(other: str) -> None:
    model, config = build_moe(), job(("npu_gmm", other))
    assert other in known_converters()
    with pytest.raises(UsageError, match=rf"model\.converters: npu_gmm and {other} cannot be combined: .*_grouped_mm"):
        CONVERTERS["npu_gmm"](config, ParallelDims(**LAYOUT)).convert(model)
    assert type(model[0].experts) is GroupedExperts


def test_reports_exceeded_npu_limits(caplog: pytest.LogCaptureFixture) -> None:
    def model(experts: int) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(GroupedExperts(8, 8, experts, use_grouped_mm=False))

    limit = "the number of groups is 2000; the NPU kernel supports 1 to 1024 (and 2 more)"
    assert_limit(model(2000), "npu_gmm", f"0: npu_grouped_matmul: {limit}", caplog)
    config = job()
    config.npu = type("Npu", (), {"strict_limits": True})
    for ep, experts in ((2, 2000), (1, 1)):  # a rank has 1000 experts, or one
        dims = ParallelDims(**LAYOUT | {"ep": ep, "dp_shard": ep, "world_size": ep})
        CONVERTERS["npu_gmm"](config, dims).convert(fits := model(experts))
        assert type(fits[0]) is NpuGroupedExperts


COUNTS = [2, 0, 5, 1]


def on_ranks(biased: bool, layout: str) -> list[dict[str, Tensor]]:
    """Run plain and converted experts with FSDP or tensor parallel; return full gradients and reduced outputs."""
    results = []
    for module in experts(biased, len(COUNTS)):
        x, counts = rows(COUNTS)
        x.requires_grad_()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        if layout == "fsdp":
            fully_shard(module, mesh=mesh)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        else:
            (GptossTensorParallel() if biased else TensorParallel())._apply(module, mesh)
        output = module(x, counts)
        output.backward(output_gradient(output))
        whole = output.detach().clone()
        if layout == "tp":
            torch.distributed.all_reduce(whole)
        grads = {name: parameter.grad.full_tensor() for name, parameter in module.named_parameters()}
        results.append({"output": whole, "x": x.grad} | grads)
    return results


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_parallel_is_equal(biased: bool, layout: str) -> None:
    """FSDP's ranks have the same rows, so the mean of their gradients is one rank's gradient."""
    exact = call_experts_exact(experts(biased, len(COUNTS))[0], *rows(COUNTS))
    for theirs, ours in run_on_ranks(2, on_ranks, biased, layout):
        for name in exact:
            assert_no_further(name, ours[name], theirs[name], exact[name], ROUNDINGS)
