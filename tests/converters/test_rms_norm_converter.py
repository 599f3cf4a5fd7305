"""``npu_rms_norm``: replaces every ``nn.RMSNorm`` and nothing else; training is the same."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list

from tests._helpers.converted_models import (
    Step,
    assert_as_exact,
    assert_limit,
    assert_no_further,
    build,
    build_on_meta,
    convert,
    step,
)
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.converters.rms_norm import NpuRMSNorm

COUNTS = {"llama3": 13, "llama4": 13, "qwen3": 33, "deepseek_v3": 19, "gpt_oss": 9}


def norms(model: nn.Module, cls: type[nn.Module]) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module) is cls}


def signature(model: nn.Module) -> dict[str, tuple[object, ...]]:
    return {
        name: (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


@pytest.mark.parametrize("name", COUNTS)
def test_replaces_every_norm_of_torchtitans_models(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = build_on_meta(name)
    expected = set(norms(plain, nn.RMSNorm))
    parameters = dict(plain.named_parameters())
    before = signature(plain)
    with caplog.at_level(logging.INFO):
        model = convert(plain, "npu_rms_norm")
    assert any(text.startswith(f"npu_rms_norm: {COUNTS[name]} RMSNorm in layers 0-") for text in caplog.messages)
    assert set(norms(model, NpuRMSNorm)) == expected and len(expected) == COUNTS[name]
    assert not norms(model, nn.RMSNorm)
    assert signature(model) == before and list(model.state_dict()) == list(before)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v3"])
def test_trains_the_same(name: str) -> None:
    plain = build(name, n_layers=2)
    converted = build(name, "npu_rms_norm", n_layers=2)
    for (plain_name, a), (converted_name, b) in zip(
        plain.named_parameters(), converted.named_parameters(), strict=True
    ):
        assert plain_name == converted_name and torch.equal(a, b)  # initial values
    assert_as_exact(step(converted), step(plain), step(build(name, n_layers=2, dtype=torch.float64)))


def test_keeps_parameters_hooks_and_attributes() -> None:
    model = nn.Sequential(nn.RMSNorm(8, eps=1e-3, dtype=torch.bfloat16), nn.RMSNorm(4, elementwise_affine=False)).eval()
    model[0].weight.requires_grad_(False)
    model[0].note = "kept"
    calls: list[torch.Size] = []
    model[0].register_forward_hook(lambda module, args, output: calls.append(output.shape))
    weight = model[0].weight
    convert(model, "npu_rms_norm")
    norm = model[0]
    assert norm.weight is weight and not norm.weight.requires_grad
    assert (norm.eps, norm.normalized_shape, norm.training, norm.note) == (1e-3, (8,), False, "kept")
    assert model[1].weight is None and list(model.state_dict()) == ["0.weight"]
    norm(torch.randn(2, 8, dtype=torch.bfloat16))
    assert calls == [(2, 8)]
    with torch.no_grad():
        norm.weight.zero_()
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.ones(8, dtype=torch.bfloat16))


def test_leaves_subclasses_alone() -> None:
    """A subclass may compute something else."""

    class Shifted(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    model = nn.Sequential(nn.RMSNorm(8), Shifted(8))
    convert(model, "npu_rms_norm")
    assert [type(module) for module in model] == [NpuRMSNorm, Shifted]


def test_converting_twice_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="npu_rms_norm has already converted this model"):
        convert(nn.Sequential(nn.RMSNorm(8)), "npu_rms_norm", "npu_rms_norm")
    stage = copy.deepcopy(convert(nn.Sequential(nn.RMSNorm(8)), "npu_rms_norm"))  # as pipeline parallel copies models
    with pytest.raises(RuntimeError, match="already converted"):
        convert(stage, "npu_rms_norm")


def test_reports_exceeded_npu_limits(caplog: pytest.LogCaptureFixture) -> None:
    limit = "input.dtype is float64; the NPU kernel supports float16, bfloat16, float32 (and 1 more)"
    model = nn.Sequential(nn.RMSNorm(8, dtype=torch.float64), nn.RMSNorm(8, dtype=torch.float64))
    assert_limit(model, "npu_rms_norm", f"0: npu_rms_norm: {limit}", caplog)


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def pair(eps: float | None, affine: bool, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Return an ``nn.RMSNorm`` with random weights, and a converted copy."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.RMSNorm(16, eps=eps, elementwise_affine=affine, dtype=dtype))
    if affine:
        nn.init.uniform_(plain[0].weight, 0.5, 1.5)
    return plain, convert(copy.deepcopy(plain), "npu_rms_norm")


def call(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output for ``x``, and the gradients for a ``dy`` that is exact in every dtype."""
    x = x.clone().requires_grad_()
    y = module(x)
    dy = torch.randint(-4, 5, y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, *module.parameters()), dy)]


def assert_same_call(plain: nn.Module, converted: nn.Module, x: Tensor) -> None:
    """Check equal dtypes, and values as near to the float64 result."""
    exact = copy.deepcopy(plain).double()
    if exact[0].eps is None:  # its meaning for half precision and float32
        exact[0].eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
    with torch.autocast("cpu", enabled=False):
        oracle = call(exact, x.double())
    names = ["y", "dx", "dgamma"][: len(oracle)]
    # in float64 the plain norm is the oracle: allow for a sum over features, one over tokens, and about ten steps
    roundings = sum(x.shape) + 10 if x.dtype == torch.float64 else 2
    for name, ours, theirs, expected in zip(names, call(converted, x), call(plain, x), oracle, strict=True):
        assert_no_further(name, ours, theirs, expected, roundings)


@pytest.mark.parametrize("weight_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mixed_dtypes_match_nn_rms_norm(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    plain, converted = pair(1e-5, True, weight_dtype)
    x = torch.randn(5, 16, dtype=dtype)
    assert_same_call(plain, converted, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_call(plain, converted, x)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_no_epsilon_matches_nn_rms_norm(dtype: torch.dtype, affine: bool) -> None:
    """The inputs are so small that a wrong epsilon changes the result by an order of magnitude."""
    plain, converted = pair(None, affine, dtype)
    assert_same_call(plain, converted, torch.randn(5, 16, dtype=torch.float64).mul(1e-4).to(dtype))


@pytest.fixture(scope="module")
def llama3() -> tuple[Step, Step]:
    """Run the plain llama3 in float32 and in float64."""
    return step(build("llama3", n_layers=2)), step(build("llama3", n_layers=2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("mode", "compiled"),
    [
        ("selective", False),
        ("full", False),
        ("full", True),
        pytest.param("none", True, marks=pytest.mark.slow),
        pytest.param("selective", True, marks=pytest.mark.slow),
    ],
)
def test_with_checkpointing_and_compile(mode: str, compiled: bool, llama3: tuple[Step, Step]) -> None:
    model = build("llama3", "npu_rms_norm", n_layers=2)
    if mode != "none":
        config = ActivationCheckpoint(mode=mode, selective_ac_option="op")
        apply_ac(model, config, model_compile_enabled=compiled, op_sac_save_list=_op_sac_save_list)
    if compiled:
        torch._dynamo.reset()
        for block in model.layers.values():
            block.compile(backend="aot_eager", fullgraph=True)
    assert_as_exact(step(model), *llama3)


def fsdp_half_precision() -> list[list[Tensor]]:
    """Return output and gradients of the plain and the converted model on one rank, with FSDP2 in bfloat16."""
    results = []
    for converters in ((), ("npu_rms_norm",)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16), nn.Linear(16, 4))
        model = convert(model, *converters) if converters else model
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        output = model(torch.randn(8, 16))
        output.float().square().sum().backward()
        results.append([output.detach(), *(parameter.grad.full_tensor() for parameter in model.parameters())])
    return results


def test_fsdp_in_half_precision() -> None:
    for plain, converted in run_on_ranks(2, fsdp_half_precision):
        for theirs, ours in zip(plain, converted, strict=True):
            assert ours.dtype == theirs.dtype
            # activations are bfloat16: a few roundings in each of three layers
            assert (ours - theirs).float().norm() <= 6 * torch.finfo(torch.bfloat16).eps * theirs.float().norm()
