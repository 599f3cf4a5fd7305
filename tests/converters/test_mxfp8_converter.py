"""``npu_mxfp8``: which modules it quantizes, tensor parallel, and errors. Numbers: tests/ops/test_mxfp8_function.py."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchtitan.distributed import ParallelDims

from tests._helpers.converted_models import BATCH, LAYOUT, SEQUENCE, build, build_on_meta, job, step
from tests._helpers.deepseek_v32_models import start_batch
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.chips import CHIPS
from torchtitan_npu.config.sections import Mxfp8, Npu
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.gmm import NpuGroupedExperts
from torchtitan_npu.converters.mxfp8 import Mxfp8Converter, NpuMxLinear, linear_limit_errors
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.mxfp8.function import Recipe, mx_linear

SIZES = {"n_layers": 2, "dim": 64, "inter_dim": 96, "moe_inter_dim": 32}


def convert(model: nn.Module, *names: str, **options: Any) -> nn.Module:
    config: Any = job(names)
    config.npu = Npu(loss_chunk_tokens=options.pop("loss_chunk_tokens", 0))
    config.mxfp8 = Mxfp8(**options)
    for name in names:
        CONVERTERS[name](config, ParallelDims(**LAYOUT)).convert(model)
    return model


def quantized(model: nn.Module) -> set[str]:
    return {
        name.removeprefix("layers.")
        for name, module in model.named_modules()
        if isinstance(module, NpuMxLinear) or getattr(module, "mxfp8_recipe", None) is not None
    }


@pytest.mark.parametrize("names", [("npu_mxfp8", "npu_gmm"), ("npu_gmm", "npu_mxfp8")], ids="+".join)
def test_quantizes_linear_layers_and_experts(names: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = build_on_meta("deepseek_v32", **SIZES)
    parameters = {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()}
    convert(model, *names)
    assert {name: (id(parameter), parameter.shape) for name, parameter in model.named_parameters()} == parameters
    attention = {f"{layer}.attention.{name}" for layer in (0, 1) for name in ("wq_a", "wq_b", "wo")}
    dense = {f"0.feed_forward.w{i}" for i in (1, 2, 3)} | {f"1.moe.shared_experts.w{i}" for i in (1, 2, 3)}
    assert quantized(model) == attention | dense | {"1.moe.experts"}
    experts = model.get_submodule("layers.1.moe.experts")
    assert isinstance(experts, NpuGroupedExperts) and experts.mxfp8_recipe == Recipe()
    log = "\n".join(record.getMessage() for record in caplog.records)
    for line in (
        "not quantized: 2 Linear in layers 0-1 (wkv_a): 80 and 64 features are not both multiples of 32",
        "not quantized: 2 Linear in layers 0-1 (wkv_b): its weight is multiplied without a call of the module",
        "not quantized: 6 Linear in layers 0-1 (wq_b, wk, weights_proj): mxfp8.filter_fqns has 'indexer'",
        "not quantized: 1 Linear in layers 1 (gate): mxfp8.filter_fqns has 'router.gate'",
        "not quantized: 1 Linear in output (output): mxfp8.filter_fqns has 'output'",
        "-> npu_dynamic_mx_quant, npu_quant_matmul, npu_grouped_dynamic_mx_quant, npu_grouped_matmul",
        "npu_gmm: 1 GroupedExperts in layers 1 -> npu_grouped_matmul, npu_swiglu",
    ):
        assert line in log, log


def test_options() -> None:
    model = convert(
        build_on_meta("deepseek_v3", **SIZES),
        "npu_mxfp8",
        recipe_name="mxfp8_floor_wgrad_with_hp",
        experts=False,
        filter_fqns=["attention", "output", "gate"],
        gradient_dtype="float8_e5m2",
    )
    assert {name.rpartition(".")[0] for name in quantized(model)} == {"0.feed_forward", "1.moe.shared_experts"}
    recipe = Recipe(scale_alg=0, gradient_type=23, weight_gradient=False)
    assert model.get_submodule("layers.0.feed_forward.w1").recipe == recipe
    model = convert(build_on_meta("deepseek_v3", **SIZES), "npu_gmm", "npu_mxfp8", linear=False)
    assert quantized(model) == {"1.moe.experts"}


def test_a_size_that_is_no_multiple_of_32_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 40))
    convert(model, "npu_mxfp8")
    assert [type(module) for module in model] == [NpuMxLinear, nn.Linear]
    assert "40 and 32 features are not both multiples of 32" in caplog.text


def test_chunked_loss_multiplies_by_the_models_output_only() -> None:
    def model() -> nn.Module:
        return nn.ModuleDict({"output": nn.Linear(32, 64), "block": nn.ModuleDict({"output": nn.Linear(32, 64)})})

    assert quantized(convert(model(), "npu_mxfp8", filter_fqns=[])) == {"output", "block.output"}
    assert quantized(convert(model(), "npu_mxfp8", filter_fqns=[], loss_chunk_tokens=8)) == {"block.output"}


@pytest.mark.parametrize(
    ("sizes", "tp", "found"),
    [
        ((2048, 1024), 1, []),
        # dx sums over 129280 features of dy, and dW has them as the rows of dy, transposed
        ((2048, 129280), 1, ["npu_quant_matmul: the innermost dimension of x1 is 129280"]),
        ((2048, 129280), 2, []),
        ((131072, 32), 1, [f"npu_quant_matmul: the innermost dimension of x{i} is 131072" for i in (1, 2)]),
    ],
)
def test_limits_of_all_products(sizes: tuple[int, int], tp: int, found: list[str]) -> None:
    config: Any = job(("npu_mxfp8",))
    config.mxfp8 = Mxfp8()
    converter = CONVERTERS["npu_mxfp8"](config, ParallelDims(**{**LAYOUT, "tp": tp, "world_size": tp}))
    errors = converter.limit_errors("layer", nn.Linear(*sizes, device="meta"))
    assert [error.partition(";")[0] for error in errors] == found


def test_limits_of_quantizations() -> None:
    """float32 blocks have 32 values at least; a weight's gradient in float32 needs no quantization along the tokens."""
    few = "npu_dynamic_mx_quant: the size of a float32 input along axis is 8"
    for recipe, found in ((Recipe(), [few]), (Recipe(weight_gradient=False), [])):
        errors = linear_limit_errors(32, 64, [8, 64], torch.float32, recipe)
        assert [error.partition(";")[0] for error in errors] == found
    assert linear_limit_errors(32, 64, [8], torch.bfloat16, Recipe()) == []


def test_errors() -> None:
    with pytest.raises(UsageError, match="quantizes experts through npu_gmm: list npu_gmm too"):
        convert(build_on_meta("deepseek_v3", **SIZES), "npu_mxfp8")
    config = job(("npu_mxfp8", "quantize.linear.mx"))
    error = CONVERTERS["npu_mxfp8"](config, ParallelDims(**LAYOUT)).job_error()
    assert error == (
        "npu_mxfp8 and quantize.linear.mx cannot be combined: both quantize the same products; list one of them"
    )


def test_only_a_950_has_the_operators() -> None:
    assert {chip.series for name, chip in CHIPS.items() if Mxfp8Converter.chip_error(name) is None} == {"950"}
    assert Mxfp8Converter.chip_error("Ascend910B3") == (
        "MXFP8 needs a chip of the series 950 (Atlas A5), and the series of Ascend910B3 is 910B"
    )


def test_a_linear_layer_with_a_bias() -> None:
    layer = nn.Linear(64, 32)
    (converted,) = convert(nn.Sequential(layer), "npu_mxfp8")
    x = torch.randn(3, 5, 64)
    assert torch.equal(converted(x), mx_linear(x, layer.weight, Recipe()) + layer.bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert converted(x).dtype == torch.bfloat16


def tensor_parallel(shards: str) -> dict[str, Tensor]:
    """Return output and gradients of two layers, on one rank or on two of them."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"up": nn.Linear(64, 128, bias=False), "down": nn.Linear(128, 64)})
    model["latent"] = nn.Linear(64, 32, bias=False)
    x = torch.randn(2, 64, 64)
    convert(model, "npu_mxfp8")
    if shards:
        mesh = init_device_mesh("cpu", (2,))
        plan = {
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            "latent": ColwiseParallel(output_layouts=Replicate(), input_layouts=Shard(1)),
        }
        parallelize_module(model, mesh, plan)
        x = x.chunk(2, 1)[mesh.get_local_rank()]
    y = model["down"](model["up"](x).relu())
    y = y.to_local() if shards else y
    z = model["latent"](y)
    total = (z * torch.linspace(-1, 1, z.shape[-1])).sum()
    total.backward()
    grads = {name: p.grad.full_tensor() if shards else p.grad for name, p in model.named_parameters()}
    return {"z": z.detach(), **grads}


def test_tensor_parallel() -> None:
    """Shards that are multiples of 32 hold complete blocks: only the order of sums differs."""
    (expected,) = run_on_ranks(1, tensor_parallel, "")
    for found in run_on_ranks(2, tensor_parallel, "shards"):
        for name, value in expected.items():
            error = (found[name] - value).norm() / value.norm()
            assert error < 2e-2, f"{name}: {error}"  # one differently rounded element of 8 values


def test_every_product_of_sparse_attention_and_experts_is_quantized() -> None:
    """Gradients of quantized weights differ by the error of float8, about 2^-4, and every parameter has one."""
    names = ("npu_permute", "npu_gmm", "npu_dsa")
    models = [build("deepseek_v32", *names, *more, **SIZES) for more in ((), ("npu_mxfp8",))]
    for model in models:
        start_batch(model, BATCH * SEQUENCE, torch.float32)
    plain, converted = map(step, models)
    assert converted.grads.keys() == plain.grads.keys()
    assert abs(converted.loss / plain.loss - 1) < 1e-2
    for name, grad in plain.grads.items():
        error = (converted.grads[name] - grad).norm() / grad.norm()
        assert error < 0.25, f"{name}: {error}"
        if name.rpartition(".")[0].rpartition(".")[2] in ("wq_a", "wq_b", "wo", "experts", "w1", "w2", "w3"):
            assert "indexer" in name or error > 1e-3, f"{name}: {error}"
