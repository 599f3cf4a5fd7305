"""``npu_permute``: an MoE layer on the fused operators has the same results, gradients and token counts."""

from __future__ import annotations

import copy
import logging
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.config.job_config import ActivationCheckpoint, Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.gpt_oss.model.moe import GptOssMoE
from torchtitan.models.llama4.infra.parallelize import _op_sac_save_list
from torchtitan.models.moe.moe import MoE, TokenReorderer
from torchtitan.protocols.train_spec import get_train_spec

from tests._helpers.converted_models import (
    LAYOUT,
    assert_limit,
    assert_no_further,
    build_on_meta,
    convert,
    job,
)
from tests._helpers.moe_layers import DIM, ROUNDINGS, build_moe, call, call_exact, in_dtype, output_gradient, tokens
from torchtitan_npu.config.sections import Npu
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.permute import NpuMoE, NpuTokenReorderer
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner import Calls

BOTH = ("npu_permute", "npu_gmm")
ORDERS = [("npu_permute",), ("npu_gmm",), BOTH, BOTH[::-1]]
MOE_LAYERS = {"deepseek_v3": 5, "llama4": 3, "gpt_oss": 4}


def moes(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]


def assert_same_layer(plain: nn.Module, converted: nn.Module, x: Tensor) -> None:
    """Check equal counts, and output and gradients as near to the float64 formula as the plain layer's."""
    exact, theirs, ours = call_exact(plain, x), call(plain, x), call(converted, x)
    assert exact.keys() == theirs.keys() == ours.keys()
    for name in exact:
        assert_no_further(name, ours[name], theirs[name], exact[name], ROUNDINGS)
    assert torch.equal(moes(converted)[0].tokens_per_expert, moes(plain)[0].tokens_per_expert)


@st.composite
def layers(draw: st.DrawFn) -> tuple[dict[str, Any], int, int, bool]:
    """Draw arguments of a layer, batch, sequence, and whether every token selects the same experts."""
    groups = draw(st.sampled_from([None, (4, 2), (2, 1)]))
    args = {
        "num_experts": 8 if groups else draw(st.sampled_from([4, 5, 8])),
        "num_expert_groups": groups and groups[0],
        "num_limited_groups": groups and groups[1],
        "top_k": draw(st.sampled_from([1, 2, 4])),
        "num_shared_experts": draw(st.integers(0, 2)),
        "score_before_experts": draw(st.booleans()),
        "score_func": draw(st.sampled_from(["sigmoid", "softmax"])),
        "route_norm": draw(st.booleans()),
        "route_scale": draw(st.sampled_from([1.0, 2.5])),
        "gate_bias": draw(st.booleans()),
        "load_balance_coeff": draw(st.sampled_from([None, 1e-3])),
        "biased": draw(st.booleans()),
    }
    # a score divided by itself has no gradient
    assume(not (args["route_norm"] and args["top_k"] == 1))
    return args, draw(st.integers(1, 3)), draw(st.integers(1, 7)), draw(st.booleans())


@settings(max_examples=40)
@given(layers(), st.sampled_from(ORDERS))
def test_computes_the_same(layer: tuple[dict[str, Any], int, int, bool], converters: tuple[str, ...]) -> None:
    args, batch, sequence, crowded = layer
    plain = build_moe(**args)
    if crowded and plain[0].expert_bias is not None:
        # the first experts get all tokens: a full group, because groups are ranked by two experts
        plain[0].expert_bias[: max(2, args["top_k"])] += 100
    converted = convert(copy.deepcopy(plain), *converters)
    assert_same_layer(plain, converted, tokens(batch, sequence))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_half_precision_is_as_exact(before: bool, top_k: int, biased: bool) -> None:
    plain = build_moe(biased, score_before_experts=before, top_k=top_k, num_shared_experts=1)
    plain = in_dtype(plain, torch.bfloat16)
    for converters in ORDERS:
        plain[0].tokens_per_expert.zero_()
        converted = convert(copy.deepcopy(plain), *converters)
        assert_same_layer(plain, converted, tokens(2, 16, dtype=torch.bfloat16))


def scored(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the experts' input and output and the router's output of a call, scores with gradient."""
    seen: dict[str, Tensor] = {}

    def of_router(module: nn.Module, args: Any, outputs: tuple[Tensor, ...]) -> None:
        seen["scores"], seen["choices"], _ = outputs
        seen["scores"].retain_grad()

    def of_experts(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        seen["rows_in"], seen["rows_out"] = args[0].detach(), output.detach()
        output.register_hook(lambda grad: seen.update(rows_out_grad=grad))

    hooks = [model[0].router.register_forward_hook(of_router), model[0].experts.register_forward_hook(of_experts)]
    output = model(x)
    output.backward(output_gradient(output))
    for hook in hooks:
        hook.remove()
    return seen | {"output": output.detach()}


def test_scores_before_the_experts_in_float32() -> None:
    """bfloat16 rows times float32 scores, rounded once: the experts' input is bit-identical to upstream's."""
    plain = in_dtype(build_moe(top_k=4, score_before_experts=True), torch.bfloat16)
    x = tokens(2, 16, dtype=torch.bfloat16)
    theirs, ours = (scored(model, x) for model in (plain, convert(copy.deepcopy(plain), "npu_permute")))
    assert ours["scores"].dtype == torch.float32
    assert torch.equal(ours["rows_in"], theirs["rows_in"])
    assert torch.equal(ours["rows_out_grad"], theirs["rows_out_grad"])
    # a float32 sum of DIM products, in any order
    budget = DIM * torch.finfo(torch.float32).eps * theirs["scores"].grad.abs().max()
    assert (ours["scores"].grad - theirs["scores"].grad).abs().max() <= budget


@pytest.mark.parametrize("combine_dtype", ["scores", "rows"])
def test_scores_after_the_experts(combine_dtype: str) -> None:
    """Rows times float32 scores, or scores rounded to bfloat16, summed in float32 and rounded once."""
    top_k, float32, bfloat16 = 4, torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps
    plain = in_dtype(build_moe(top_k=top_k, score_before_experts=False), torch.bfloat16)
    seen = scored(convert(plain, "npu_permute", moe_combine_dtype=combine_dtype), tokens(2, 16, dtype=torch.bfloat16))
    order = seen["choices"].flatten().argsort(stable=True)
    rows = torch.empty_like(seen["rows_out"]).index_copy(0, order, seen["rows_out"]).double().view(-1, top_k, DIM)
    scores, rounded = seen["scores"].detach(), seen["scores"].detach().bfloat16()
    terms = rows * (scores if combine_dtype == "scores" else rounded).double().unsqueeze(-1)  # (tokens, top_k, dim)
    exact = terms.sum(1)
    budget = bfloat16 / 2 * exact.abs() + 2 * top_k * float32 * terms.abs().sum(1)
    assert ((seen["output"].flatten(0, 1) - exact).abs() <= budget).all()
    if combine_dtype == "scores":  # a score rounded to bfloat16 would exceed it
        coarse = (rows * rounded.double().unsqueeze(-1)).sum(1).bfloat16()
        assert not ((coarse - exact).abs() <= budget).all()

    products = rows * output_gradient(seen["output"]).flatten(0, 1).double().unsqueeze(1)
    assert seen["scores"].grad.dtype == torch.float32
    budget = DIM * float32 * products.abs().sum(2)
    if combine_dtype == "rows":
        budget = budget + bfloat16 / 2 * products.sum(2).abs()
    assert ((seen["scores"].grad - products.sum(2)).abs() <= budget).all()


class CombineDtypes(TorchDispatchMode):
    """Record the dtypes of the floating-point tensors of each call of unpermute and its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "unpermute" in str(op):
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            self.calls.append({tensor.dtype for tensor in tensors if tensor.is_floating_point()})
        return op(*args, **kwargs)


@pytest.mark.parametrize(("combine_dtype", "dtype"), [("scores", torch.float32), ("rows", torch.bfloat16)])
def test_the_combine_has_one_dtype(combine_dtype: str, dtype: torch.dtype) -> None:
    """On an NPU the gradient of a call with different dtypes is NaN. Saved rows stay bfloat16."""
    model = in_dtype(build_moe(top_k=4, score_before_experts=False), torch.bfloat16)
    model = convert(model, "npu_permute", moe_combine_dtype=combine_dtype)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with CombineDtypes() as mode, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(model, tokens(2, 16, dtype=torch.bfloat16))
    assert mode.calls == [{dtype}, {dtype}]
    assert {tensor.dtype for tensor in saved if tensor.shape == (2 * 16 * 4, DIM)} == {torch.bfloat16}


def full_ac(layer: nn.Module) -> nn.Module:
    """Wrap a layer as TorchTitan's full activation checkpointing does."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": layer})
    apply_ac(model, ActivationCheckpoint(mode="full"))
    return model.layers["0"]


class ByTorch(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("wrap", [ByTorch, full_ac])
def test_checkpointing_counts_tokens_once(wrap: Any) -> None:
    """Once if the optimizer that balances the experts unsets ``count_in_recomputation``, else twice as upstream."""
    plain, x = build_moe(top_k=2), tokens(2, 7)
    converted = convert(copy.deepcopy(plain), *BOTH)
    twice = copy.deepcopy(converted)
    converted[0].count_in_recomputation = False
    expected = call(converted, x)
    counts = converted[0].tokens_per_expert.clone()
    assert counts.sum() == 2 * 14
    converted[0].tokens_per_expert.zero_()
    actual = call(wrap(converted), x)
    assert torch.equal(converted[0].tokens_per_expert, counts)
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual.values(), expected.values(), strict=True))
    for model in (plain, twice):
        call(wrap(model), x)
        assert torch.equal(model[0].tokens_per_expert, 2 * counts)


def test_counts_add_up_over_batches_and_without_gradients() -> None:
    plain, x = build_moe(), tokens(2, 5)
    converted = convert(copy.deepcopy(plain), *BOTH)
    for model in (plain, converted):
        model(x)
        with torch.no_grad():
            model(2 * x)
    assert torch.equal(plain[0].tokens_per_expert, converted[0].tokens_per_expert)
    assert converted[0].tokens_per_expert.sum() == 2 * 2 * 10


class Block(nn.Module):
    moe_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.moe = build_moe(top_k=2)[0]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


class Blocks(nn.Module):
    """The parts of a transformer that TorchTitan's optimizer and checkpointing use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x)
        return x


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("converters", [(), BOTH], ids=["plain", "converted"])
@pytest.mark.parametrize("adapted", [True, False], ids=["adapted", "upstream"])
def test_experts_are_balanced_as_without_checkpointing(adapted: bool, converters: tuple[str, ...], mode: str) -> None:
    """TorchTitan's optimizer halves the counts of checkpointed layers, because its own layers count twice."""
    build_optimizers = build_optimizers_with_moe_load_balancing
    if adapted:
        build_optimizers = get_train_spec("deepseek_v3").build_optimizers_fn
    dims = ParallelDims(**LAYOUT)
    dims.get_optional_mesh = lambda name: None  # one process without a group
    biases = []
    for names, chosen in (((), "none"), (converters, mode)):
        model = convert(Blocks(), *names) if names else Blocks()
        if chosen != "none":
            config = ActivationCheckpoint(mode=chosen, selective_ac_option="op")
            apply_ac(model, config, op_sac_save_list=_op_sac_save_list)
        optimizers = build_optimizers([model], Optimizer(implementation="for-loop"), dims)
        call(model, tokens(2, 8))  # the mean is 4 tokens per expert: halved counts would misjudge an expert with 4 or 5
        optimizers.step()
        biases.append([moe.expert_bias for moe in moes(model)])
        assert all(moe.tokens_per_expert.sum() == 0 for moe in moes(model))
    assert all(torch.equal(a, b) for a, b in zip(*biases, strict=True))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("before", [True, False])
def test_reads_nothing_back_to_the_host(biased: bool, before: bool) -> None:
    """Reading the value of a fake tensor raises, as the plain layer's loop over the experts shows."""
    with FakeTensorMode():
        plain = build_moe(biased, num_shared_experts=1, score_before_experts=before)
        x = torch.empty(2, 7, DIM)
        with pytest.raises(DataDependentOutputException):
            call(plain, x)
        results = call(convert(plain, *BOTH), x)
    assert results["output"].shape == (2, 7, DIM)


def test_calls_the_fused_operators_once() -> None:
    with Calls() as calls:
        call(convert(build_moe(top_k=2), *BOTH), tokens(2, 5))
    counts = calls.count("npu") + calls.count("aten")
    assert counts["npu_moe_token_permute"] == counts["npu_moe_token_permute_grad_v2"] == 1
    assert counts["_npu_moe_token_unpermute"] == counts["npu_moe_token_unpermute_grad_v2"] == 1
    assert not {"sort", "argsort", "index_put", "index_put_"} & counts.keys()


@pytest.mark.parametrize("converters", ORDERS)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_autocast_gives_the_same_dtypes(before: bool, shared: int, converters: tuple[str, ...]) -> None:
    plain = build_moe(score_before_experts=before, num_shared_experts=shared)
    converted = convert(copy.deepcopy(plain), *converters)
    exact = call_exact(plain, tokens(2, 9))
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = (call(model, tokens(2, 9)) for model in (plain, converted))
    dtype = theirs["output"].dtype
    assert dtype == (torch.bfloat16 if before else torch.float32)
    assert {name: tensor.dtype for name, tensor in ours.items()} == {name: t.dtype for name, t in theirs.items()}
    for name in exact:
        # float32 results have been through bfloat16
        assert_no_further(name, ours[name].bfloat16(), theirs[name].bfloat16(), exact[name], ROUNDINGS)


@pytest.mark.parametrize("name", MOE_LAYERS)
def test_replaces_every_layer_and_keeps_its_state(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = build_on_meta(name)
    types, state = [type(moe) for moe in moes(plain)], plain.state_dict(keep_vars=True)
    buffers = dict(plain.named_buffers())
    with caplog.at_level(logging.INFO):
        model = convert(copy.deepcopy(plain), "npu_permute")
        convert(plain, "npu_permute")
    assert len(moes(model)) == MOE_LAYERS[name] == len(types)
    assert all(isinstance(moe, NpuMoE) and isinstance(moe, cls) for moe, cls in zip(moes(model), types, strict=True))
    assert all(type(moe.reorderer) is NpuTokenReorderer for moe in moes(model))
    after = plain.state_dict(keep_vars=True)
    assert list(after) == list(state) and all(after[key] is state[key] for key in state)
    assert {key: id(buffer) for key, buffer in plain.named_buffers()} == {key: id(b) for key, b in buffers.items()}
    message = next(text for text in caplog.messages if text.startswith("npu_permute"))
    assert f"{MOE_LAYERS[name]} {types[0].__name__} in layers" in message
    assert "npu_moe_token_permute, npu_moe_token_unpermute" in message


def test_leaves_other_models_alone() -> None:
    shared = build_moe(num_shared_experts=1)
    neighbour, x = nn.Sequential(shared[0]), tokens(2, 5)
    before = call(neighbour, x)
    convert(shared, *BOTH)  # even if it shares the layer
    after = call(neighbour, x)
    assert type(neighbour[0]) is MoE and type(neighbour[0].reorderer) is TokenReorderer
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_leaves_layers_with_their_own_forward_alone() -> None:
    class Doubled(MoE):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = nn.ModuleList([build_moe(), build_moe()])
    model[1][0].__class__ = Doubled
    convert(model, "npu_permute")
    assert type(model[0][0]) is NpuMoE and type(model[1][0]) is Doubled


class Named(TokenReorderer):
    """A subclass with the same forward."""


class Backwards(TokenReorderer):
    def forward(self, top_scores: Tensor, selected_experts_indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().forward(top_scores, selected_experts_indices)


def test_a_users_reorderer() -> None:
    plain = build_moe()
    plain[0].reorderer.__class__ = Named
    converted = convert(copy.deepcopy(plain), "npu_permute")
    assert isinstance(converted[0].reorderer, NpuTokenReorderer) and isinstance(converted[0].reorderer, Named)
    assert_same_layer(plain, converted, tokens(2, 5))
    plain[0].reorderer.__class__ = Backwards
    expected = r"model\.converters: npu_permute .* but 0\.reorderer is a Backwards with its own forward"
    with pytest.raises(UsageError, match=expected):
        convert(plain, "npu_permute")
    assert type(plain[0]) is MoE


def test_a_copy_is_converted_too() -> None:
    """Pipeline parallel copies models for its stages; gpt_oss's derived class can be copied too."""
    model = convert(build_moe(biased=True), *BOTH)
    twin = copy.deepcopy(model)
    assert isinstance(twin[0], NpuMoE) and isinstance(twin[0], GptOssMoE)
    assert torch.equal(twin(tokens(1, 3)), model(tokens(1, 3)))
    assert twin[0].experts is not model[0].experts


def test_reports_exceeded_npu_limits(caplog: pytest.LogCaptureFixture) -> None:
    limit = "the top-k of indices is 600; the NPU kernel supports 0 to 512"
    assert_limit(build_moe(num_experts=700, top_k=600), "npu_permute", f"0: npu_moe_token_permute: {limit}", caplog)


TOKENS = 2**23  # with two experts per token, two pairs more than the NPU limit
ALL_PAIRS = "the number of indices is 16777216; the NPU kernel supports 0 to 16777214"


@pytest.mark.parametrize(
    ("layout", "refused"),
    [
        ({}, True),
        ({"tp": 2}, True),
        ({"dp_shard": 2, "ep": 2}, True),
        ({"tp": 2, "dp_shard": 2, "ep": 2, "etp": 2}, True),
        ({"tp": 2, "ep": 2}, False),
        ({"cp": 2}, False),
        ({"pp": 2}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("section", ["training", "validation"])
def test_limits_apply_to_one_ranks_tokens(section: str, layout: dict[str, int], refused: bool) -> None:
    """A rank has all tokens if tensor parallel gathers them, else its part of each sequence, or a microbatch."""
    config = job()
    config.npu = Npu(strict_limits=True)
    config.model.name = "deepseek_v3"
    config.training.local_batch_size = config.validation.local_batch_size = 8
    config.validation.enable = section == "validation"
    getattr(config, section).seq_len = TOKENS // 8
    ranks = math.prod(degree for name, degree in layout.items() if name not in ("ep", "etp"))
    converter = CONVERTERS["npu_permute"](config, ParallelDims(**LAYOUT | layout | {"world_size": ranks}))
    with pytest.raises(UsageError, match=ALL_PAIRS) if refused else nullcontext():
        converter.convert(build_moe(top_k=2))
