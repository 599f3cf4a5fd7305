"""``npu_mrope``: eager, training and evaluation rotate alike, in both orders of the axes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.distributed import ParallelDims

from tests._helpers.converted_models import LAYOUT, assert_no_further
from tests._helpers.converted_models import build_on_meta as build_titan_model
from tests._helpers.multirank import run_on_ranks
from tests._helpers.qwen3_vl_models import build, make_batch, model_args
from tests._helpers.rope_models import Operators
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.rotary import MRoPERotation, MRoPETables

BATCH, SEQUENCE, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 2, 7, 4, 2, 48, 64


class Rotations(nn.Module):
    """The rotating parts of a model: the tables, and two layers."""

    def __init__(self, section: tuple[int, ...], interleaved: bool, rotary_dim: int) -> None:
        super().__init__()
        self.tables = MRoPETables(section, interleaved)
        self.first, self.second = (
            MRoPERotation(section, interleaved, HEADS, KV_HEADS, HEAD_DIM, rotary_dim) for _ in range(2)
        )
        frequencies = 100.0 ** -(torch.arange(rotary_dim // 2, dtype=torch.float64) * 2 / rotary_dim)
        angles = (torch.arange(POSITIONS)[:, None] * frequencies).tile(2)
        self.register_buffer("rope_cache", torch.cat((angles.cos(), angles.sin()), dim=-1).float())

    def forward(self, xq: Tensor, xk: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        table, positions = self.tables(self.rope_cache, positions, xq.shape[:2], xq.dtype)
        xq, xk = self.first(xq, xk, table, positions)
        return self.second(xq, xk, table, positions)


LAYOUTS = {
    "interleaved": ((8, 8, 8), True, 48),
    "interleaved, time has the rest": ((12, 6, 6), True, 48),
    "interleaved, partial": ((6, 5, 5), True, 32),
    "blocked": ((8, 6, 10), False, 48),
    "blocked, partial": ((4, 6, 6), False, 32),
    "blocked, four axes": ((4, 5, 6, 9), False, 48),
}


def scattered(axes: int) -> Tensor:
    """Return positions that differ on every axis for every token."""
    generator = torch.Generator().manual_seed(5)
    return torch.rand(BATCH, SEQUENCE, POSITIONS, generator=generator).argsort(-1)[..., :axes].movedim(-1, 0)


def queries_and_keys(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(6)
    shapes = ((BATCH, SEQUENCE, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS))
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)  # type: ignore[return-value]


def exact(model: Rotations, x: Tensor, positions: Tensor, back: bool) -> Tensor:
    """Rotate ``x`` twice in float64 by the definition, angle by angle; gradients in the opposite direction."""
    section, pairs = model.tables.section, model.first.rotary_dim // 2
    result = x.detach().double().clone()
    for pair in range(pairs):
        if model.tables.interleaved:
            axis = pair % 3 if pair < 3 * section[pair % 3] else 0
        else:
            axis = next(axis for axis in range(len(section)) if pair < sum(section[: axis + 1]))
        frequency = 100.0 ** -(pair * 2 / model.first.rotary_dim)
        angle = 2 * positions[axis].double()[..., None] * frequency * (-1 if back else 1)
        a, b = x[..., pair].detach().double(), x[..., pair + pairs].detach().double()
        result[..., pair] = a * angle.cos() - b * angle.sin()
        result[..., pair + pairs] = b * angle.cos() + a * angle.sin()
    return result


def converted(model: nn.Module, in_training: bool = False, *converters: str) -> nn.Module:
    config = JobConfig()
    config.model.converters = list(converters or ("npu_mrope",))
    config.npu.mrope_in_training = in_training
    for name in config.model.converters:
        CONVERTERS[name](config, ParallelDims(**LAYOUT)).convert(model)
    return model


def rotate(model: nn.Module, dtype: torch.dtype, positions: Tensor, grad: bool) -> list[Tensor]:
    """Return rotated queries and keys, and their gradients for output gradients equal to queries and keys."""
    inputs = queries_and_keys(dtype)
    with torch.set_grad_enabled(grad):
        outputs = model(*inputs, positions)
    if grad:
        torch.autograd.backward(outputs, [x.detach() for x in inputs])
    results = [*outputs, *(x.grad for x in inputs if grad)]
    assert all(result.dtype == dtype for result in results)
    return [result.detach() for result in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_all_implementations_rotate_alike(layout: tuple[Any, ...], dtype: torch.dtype) -> None:
    positions, (xq, xk) = scattered(len(layout[0])), queries_and_keys(dtype)
    ways = {
        "eager": rotate(Rotations(*layout), dtype, positions, grad=True),
        "training": rotate(converted(Rotations(*layout)), dtype, positions, grad=True),
        "training in one call": rotate(converted(Rotations(*layout), in_training=True), dtype, positions, grad=True),
        "evaluation": rotate(converted(Rotations(*layout)), dtype, positions, grad=False),
    }
    oracle = [exact(Rotations(*layout), x, positions, back) for back in (False, True) for x in (xq, xk)]
    for name, results in ways.items():
        for result, expected in zip(results, oracle, strict=False):
            # two rotations round a cosine, a sine, two products and their sum each; either
            # product is at most the longest pair
            budget = 2 * 5 * torch.finfo(dtype).eps / 2 * expected.abs().max().item()
            distance = (result.double() - expected).abs().max().item()
            assert distance <= budget, f"{name}: {distance:.1e}, budget {budget:.1e}"


def test_orders_of_axes_differ() -> None:
    positions = scattered(3)
    text = positions[:1].expand(3, -1, -1)
    for layout in (((12, 6, 6), True, 48), ((12, 6, 6), False, 48)):
        other = (layout[0], not layout[1], layout[2])
        for way in (Rotations, lambda *layout: converted(Rotations(*layout))):
            on_axes = [rotate(way(*x), torch.float32, positions, grad=False)[0] for x in (layout, other)]
            on_text = [rotate(way(*x), torch.float32, text, grad=False)[0] for x in (layout, other)]
            assert (on_axes[0] - on_axes[1]).abs().max() > 1
            assert (on_text[0] - on_text[1]).abs().max() <= 1e-6 * on_text[0].abs().max()


def test_packed_positions_give_the_same_result() -> None:
    positions, layout = scattered(3), LAYOUTS["interleaved"]
    for model in (Rotations(*layout), converted(Rotations(*layout))):
        for grad in (False, True):
            expected = rotate(model, torch.float32, positions, grad)
            for one, other in zip(expected, rotate(model, torch.float32, positions.flatten(1), grad), strict=True):
                assert torch.equal(one, other)


def rotation_dtypes() -> list[set[torch.dtype]]:
    """On a rank: the dtypes of tables and of attention's outputs in a forward with FSDP in bfloat16."""
    model = converted(build(model_args()), False, "npu_mrope", "npu_rope")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model.vision.layers.values(), model.vision, *model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    outputs: set[torch.dtype] = set()
    for block in (model.vision.layers["1"], model.layers["1"]):
        block.attention.wo.register_forward_hook(lambda module, args, output: outputs.add(output.dtype))
    with Operators() as record:
        model(**make_batch(1, ("i",)).ours())
    return [{rotation["r1"].dtype for rotation in record.rotations()}, outputs]


def test_fsdp_in_bfloat16_does_not_cast_the_tables() -> None:
    assert run_on_ranks(1, rotation_dtypes) == [[{torch.float32}, {torch.bfloat16}]]


def operators(model: nn.Module, grad: bool, **batch: Any) -> Counter[str]:
    with torch.set_grad_enabled(grad), Operators() as record:
        model(**batch)
    return Counter(name for name, _ in record.calls)


def test_angles_are_looked_up_once_per_forward() -> None:
    args, batch = model_args(), make_batch(1, ("iv", "i")).ours()
    layers, tower = args.n_layers, args.vision.n_layers
    plain = build(args)
    model = converted(build(args), False, "npu_mrope", "npu_rope")
    for grad in (False, True):
        calls = operators(model, grad, **batch)
        assert calls["npu::npu_rotary_mul"] == 2 * tower + (2 * layers if grad else 0)
        assert calls["npu::npu_mrope"] == (0 if grad else layers)
        # twice as many layers do not look up more often
        deeper = model_args(n_layers=2 * layers)
        more = operators(converted(build(deeper), False, "npu_mrope", "npu_rope"), grad, **batch)
        assert more["aten::index"] == calls["aten::index"] <= operators(plain, grad, **batch)["aten::index"]


def test_the_operators_arguments() -> None:
    model, batch = converted(build(model_args())), make_batch(1, ("iv", "i"))
    with torch.no_grad(), Operators() as record:
        model(**batch.ours())
    calls = [arguments for name, arguments in record.calls if name == "npu::npu_mrope"]
    tokens = batch.tokens.numel()
    for call in calls:
        assert call["positions"].shape == (3, tokens) and call["positions"].is_contiguous()
        assert call["query"].shape == (tokens, 4 * 32) and call["key"].shape == (tokens, 2 * 32)
        assert call["cos_sin_cache"].shape == (256, 32) and call["cos_sin_cache"].dtype == call["query"].dtype
        assert list(call["mrope_section"]) == [8, 4, 4] and call["head_size"] == 32
        assert call["cache_mode"] == "interleave" and call["rotary_mode"] == "half"


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("converters", [("npu_mrope",), ("npu_rope", "npu_mrope"), ("npu_mrope", "npu_rope")], ids=str)
def test_the_model_computes_the_same(converters: tuple[str, ...], moe: bool) -> None:
    """Logits and gradients are as near to the float64 model as the eager ones."""
    batch = make_batch(3, ("iv", "", "vi"))
    states = build(model_args(moe)).state_dict()

    def logits_and_gradients(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        model.load_state_dict(states)
        model.to(dtype)
        inputs = batch.ours() | {"patches": batch.patches.to(dtype)}
        logits = model(**inputs)
        logits[batch.mask].square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        with torch.no_grad():
            return {"logits": logits.detach(), "evaluated": model(**inputs), **grads}  # type: ignore[dict-item]

    oracle = logits_and_gradients(build(model_args(moe)), torch.float64)
    plain = logits_and_gradients(build(model_args(moe)), torch.float32)
    ours = logits_and_gradients(converted(build(model_args(moe)), False, *converters), torch.float32)
    assert ours.keys() == plain.keys()
    for name, value in ours.items():
        # a rotation rounds a few times in each of three layers
        assert_no_further(name, value, plain[name], oracle[name], roundings=20)


ROUNDINGS = 6 * 13 + 4
"""The number of roundings: three tower and three decoder layers of 13 operators each, and the rest."""


@pytest.mark.parametrize("cast_angles", [False, True], ids=["float32 angles", "bfloat16 angles"])
def test_a_model_in_bfloat16_computes_the_same_within_its_rounding(cast_angles: bool) -> None:
    """A model entirely in bfloat16. ``training.dtype`` keeps the angles in float32, ``model.to`` casts them too."""
    batch = make_batch(3, ("iv", "", "vi"))
    states = {name: value.bfloat16() for name, value in build(model_args()).state_dict().items()}
    pixels = batch.patches.bfloat16()

    def logits_and_gradients(model: nn.Module, dtype: torch.dtype, *converters: str, **how: Any) -> dict[str, Tensor]:
        model.load_state_dict(states)
        angles = model.rope_cache
        model.to(dtype)
        if not cast_angles:
            model.rope_cache = angles
        if converters:
            converted(model, how["in_training"], *converters)
        inputs = batch.ours() | {"patches": pixels.float()}  # as a data loader provides them
        logits = model(**inputs)
        logits[batch.mask].square().sum().backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        with torch.no_grad():
            return {"logits": logits.detach(), "evaluated": model(**inputs), **grads}  # type: ignore[dict-item]

    oracle = logits_and_gradients(build(model_args()), torch.float64)
    eager = logits_and_gradients(build(model_args()), torch.bfloat16)
    unit = torch.finfo(torch.bfloat16).eps / 2
    for name, exact in oracle.items():
        # errors add up like a random walk; in a gradient, whose terms cancel, at most linearly, and the backward pass
        # has as many
        roundings = ROUNDINGS**0.5 if name in ("logits", "evaluated") else 2 * ROUNDINGS
        assert (eager[name].double() - exact).norm() <= roundings * unit * exact.norm(), name
    for in_training in (False, True):
        both = ("npu_mrope", "npu_rope")
        ours = logits_and_gradients(build(model_args()), torch.bfloat16, *both, in_training=in_training)
        for name, value in ours.items():
            assert_no_further(name, value, eager[name], oracle[name])


def test_under_autocast_angles_are_cast_once_for_all_layers() -> None:
    model, batch = converted(build(model_args())), make_batch(1, ("iv", "i"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Operators() as record:
        model(**batch.ours())
    calls = [arguments for name, arguments in record.calls if name == "npu::npu_mrope"]
    assert len(calls) == 3 and all(call["query"].dtype == torch.bfloat16 for call in calls)
    assert len({call["cos_sin_cache"].data_ptr() for call in calls}) == 1


def of_two_layouts() -> nn.Module:
    model = Rotations(*LAYOUTS["blocked"])
    model.second.interleaved = True
    return model


FOUR = "mrope_section of 4 sizes: set mrope_interleaved = false"


@pytest.mark.parametrize(
    ("build_model", "converter", "message"),
    [
        (
            lambda: Rotations((8, 8, 7), False, 48),
            "npu_mrope",
            r"first: mrope_section must be 3 or 4 sizes that sum to half of .*24, not \[8, 8, 7\], whose sum is 23",
        ),
        (lambda: model_args(mrope_section=(24, 20, 20)), "", r"16, not \[24, 20, 20\], whose sum is 64"),
        (lambda: Rotations((6, 6, 6, 6), True, 48), "npu_mrope", FOUR),
        (lambda: model_args(mrope_section=(4, 4, 4, 4)), "", FOUR),
        (lambda: Rotations((8, 10, 6), True, 48), "npu_mrope", "height and width as many channels"),
        (lambda: build(model_args()), "npu_rope", r"rotation of Qwen3VLModel by several \(MRoPE\): list npu_mrope"),
        (lambda: build_titan_model("qwen3"), "npu_mrope", "found no MRoPE in Qwen3Model.* list npu_rope instead"),
        (of_two_layouts, "npu_mrope", "with the same mrope_section and layout"),
    ],
)
def test_wrong_sections_and_models_are_an_error(build_model: Any, converter: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        converted(build_model(), False, converter)


@pytest.mark.parametrize("shape", [(BATCH, SEQUENCE), (1, BATCH, SEQUENCE), (3, SEQUENCE), (3, BATCH, SEQUENCE + 1)])
@pytest.mark.parametrize("convert", [lambda model: model, converted], ids=["eager", "npu_mrope"])
def test_positions_of_another_shape_are_an_error(convert: Any, shape: tuple[int, ...]) -> None:
    rotations, model = convert(Rotations(*LAYOUTS["interleaved"])), convert(build(model_args()))
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    for positions in (torch.ones(shape, dtype=torch.int64), torch.ones(3, BATCH, SEQUENCE)):
        message = rf"must be integers of the shape \(3, 2, 7\), or packed \(3, 14\).* not {positions.dtype}"
        with pytest.raises(UsageError, match=message):
            rotations(*queries_and_keys(torch.float32), positions)
        with pytest.raises(UsageError, match=message):
            model(tokens, positions=positions)


def test_exceeded_npu_limits_are_an_error_on_an_npu() -> None:
    config = JobConfig()
    config.npu.strict_limits, config.training.mixed_precision_param = True, "float32"
    for section, interleaved, rotary_dim, text in (
        ((8, 8, 8), True, 48, "mrope_section is [8, 8, 8]"),
        ((7, 7, 6), False, 40, "the remainder of rotary_dim by 32 (by 16 in float32) is 8"),
    ):
        with pytest.raises(UsageError) as error:
            CONVERTERS["npu_mrope"](config, ParallelDims(**LAYOUT)).convert(Rotations(section, interleaved, rotary_dim))
        assert "not supported by the NPU kernel: first" in str(error.value) and text in str(error.value)


def test_limits_apply_to_one_ranks_heads() -> None:
    config = JobConfig()
    config.npu.strict_limits, config.training.local_batch_size = True, 2000  # batch rows are rotated as one sequence
    model = nn.ModuleDict(
        {"tables": MRoPETables((24, 20, 20), True), "layer": MRoPERotation((24, 20, 20), True, 1024, 8, 128)}
    )
    two_ranks = {**LAYOUT, "tp": 2, "world_size": 2}
    converter = CONVERTERS["npu_mrope"](config, ParallelDims(**two_ranks))
    assert converter.check_limits(converter.found_targets(model)) is None
    with pytest.raises(UsageError, match=r"NPU kernel: layer: npu_rotary_mul: the larger of B and N .* is 1024"):
        CONVERTERS["npu_mrope"](config, ParallelDims(**LAYOUT)).convert(model)
