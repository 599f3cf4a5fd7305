"""Converters compose: any subset in any order, with float8 and compile, in a user's own model."""

from __future__ import annotations

import itertools
import logging
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Attention, precompute_freqs_cis
from torchtitan.models.moe.moe import MoE, MoEArgs
from torchtitan.protocols.model_converter import build_model_converters

from tests._helpers.converted_models import (
    BATCH,
    LAYOUT,
    SEQUENCE,
    Step,
    assert_as_exact,
    build,
    build_on_meta,
    convert,
    initialise,
    job,
    step,
)
from tests._helpers.deepseek_v32_models import start_batch
from tests._helpers.layouts import FUSED, train
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.errors import UsageError

NAMES = ("npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm")
DENSE = (*NAMES, "npu_attention")
SPARSE_NAMES = (*NAMES, "npu_gating", "npu_dsa")
SUBSETS = [subset for size in range(1, 6) for subset in itertools.combinations(DENSE, size)]
SMALL = {"n_layers": 2, "dim": 64, "inter_dim": 64, "moe_inter_dim": 32}
SPARSE = {**SMALL, "index_topk": 5}
"""Sizes of deepseek_v32, with targets of all ``SPARSE_NAMES``, and fewer selected keys than tokens."""


def classes(model: nn.Module) -> dict[str, type]:
    return {name: type(module) for name, module in model.named_modules()}


def test_these_are_all_converters() -> None:
    assert {*DENSE, *SPARSE_NAMES, "npu_mrope", "npu_mxfp8"} == set(CONVERTERS)


@pytest.mark.parametrize("subset", SUBSETS, ids="+".join)
def test_any_order_gives_the_same_model(subset: tuple[str, ...]) -> None:
    models = [build_on_meta("deepseek_v3", *order, **SMALL) for order in itertools.permutations(subset)]
    assert all(classes(model) == classes(models[0]) for model in models)
    assert classes(models[0]) != classes(build_on_meta("deepseek_v3", **SMALL))
    hooks = [len(model._forward_pre_hooks) for model in models]
    assert set(hooks) == {len({"npu_rope", "npu_attention"} & set(subset))}


def test_any_subset_computes_the_same() -> None:
    plain, oracle = step(build("deepseek_v3", **SMALL)), step(build("deepseek_v3", dtype=torch.float64, **SMALL))
    for subset in SUBSETS:
        assert_as_exact(step(build("deepseek_v3", *subset, **SMALL)), plain, oracle)


ORDERS = [SPARSE_NAMES[place:] + SPARSE_NAMES[:place] for place in range(6)]
ORDERS += [tuple(reversed(order)) for order in ORDERS]


def test_sparse_attention_in_any_order_gives_the_same_model() -> None:
    models = [build_on_meta("deepseek_v32", *order, **SPARSE) for order in ORDERS]
    assert all(classes(model) == classes(models[0]) for model in models)
    for name in ORDERS[0]:
        without = build_on_meta("deepseek_v32", *(other for other in ORDERS[0] if other != name), **SPARSE)
        assert classes(without) != classes(models[0])


def sparse_step(*converters: str, dtype: torch.dtype = torch.float32) -> Step:
    model = build("deepseek_v32", *converters, dtype=dtype, **SPARSE)
    start_batch(model, BATCH * SEQUENCE, dtype)
    return step(model)


def test_sparse_attention_with_others_computes_the_same() -> None:
    plain, oracle = sparse_step(), sparse_step(dtype=torch.float64)
    others = SPARSE_NAMES[:-1]
    for subset in [(), *((name,) for name in others), others]:
        assert_as_exact(sparse_step(*subset, "npu_dsa"), plain, oracle)


def test_float8_in_any_order_gives_the_same_model() -> None:
    """torchao replaces linear layers, also inside of modules that our converters replace."""
    ours, float8 = FUSED["deepseek_v3"], "quantize.linear.float8"
    models = []
    for names in ([float8, *ours], [*ours, float8], ours):
        config = job(tuple(names))
        config.quantize.linear.float8.emulate = True
        config.model.print_after_conversion = False
        model = build_on_meta("deepseek_v3", **SMALL)
        build_model_converters(config, ParallelDims(**LAYOUT)).convert(model)
        models.append(classes(model))
    before, after, without = models
    assert before == after != without


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama3", "deepseek_v3"])
def test_with_float8(model: str) -> None:
    """torchao's float8 linears, emulated on the CPU, combine with our converters in either order."""
    float8 = "quantize.linear.float8"
    options = {"quantize.linear.float8.emulate": True, "model.print_after_conversion": False}
    ours = FUSED[model]
    runs = [([float8], 0), ([float8, *ours], 0), ([*ours, float8], 0), *(([float8], seed) for seed in SEEDS)]
    alone, before, after, *perturbed = [
        run_on_ranks(1, train_perturbed, model, {**options, "model.converters": names}, seed, process_group=False)[0]
        for names, seed in runs
    ]
    assert before.losses == after.losses
    # a difference in the last place of float32 may round to another float8
    for apart in (losses_apart, gradients_apart):
        assert apart(before, alone) <= 2 * max(apart(run, alone) for run in perturbed)


SEEDS = (1, 2, 3)


def train_perturbed(model: str, options: dict[str, Any], seed: int) -> Record:
    """Train from weights that are perturbed by one unit in the last place, unless ``seed`` is 0."""
    import torchtitan_npu.trainer as trainer_module

    class Trainer(trainer_module.Trainer):
        def __init__(self, config: JobConfig) -> None:
            super().__init__(config)
            generator = torch.Generator().manual_seed(seed)
            for parameter in self.model_parts[0].parameters() if seed else ():
                units = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.data.mul_(1 + units * torch.finfo(torch.float32).eps)

    with patch.object(trainer_module, "Trainer", Trainer):
        return train(model, {}, options)


def losses_apart(one: Record, other: Record) -> float:
    """Return the largest difference."""
    return max(abs(a - b) for a, b in zip(one.losses, other.losses, strict=True))


def gradients_apart(one: Record, other: Record) -> float:
    """Return the norm of the difference of the first step's gradients."""
    return sum(float((one.gradients[name] - grad).square().sum()) for name, grad in other.gradients.items()) ** 0.5


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama3", "qwen3_moe")]


@pytest.mark.parametrize("model", [*SLOW, "deepseek_v3"])
def test_compiled(model: str) -> None:
    options = {"model.converters": FUSED[model]}
    compiled = {**options, "compile.enable": True, "compile.backend": "aot_eager", "compile.components": ["model"]}
    (eager,) = run_on_ranks(1, train, model, {}, options, process_group=False)
    (ours,) = run_on_ranks(1, train, model, {}, compiled, process_group=False)
    assert ours.losses == pytest.approx(eager.losses, rel=1e-6)
    assert ours.gradients.keys() == eager.gradients.keys()
    for name, grad in eager.gradients.items():
        torch.testing.assert_close(ours.gradients[name], grad, rtol=1e-5, atol=1e-6 * grad.abs().max().item())


class Block(nn.Module):
    """A user's own block built from TorchTitan's modules, with other attribute names."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mixer = Attention(TransformerModelArgs(dim=dim, n_heads=4))
        self.router_and_experts = MoE(MoEArgs(num_experts=4, top_k=2, use_grouped_mm=False), dim=dim, hidden_dim=dim)
        self.first, self.second = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.first(x), angles, None)
        return x + self.router_and_experts(self.second(x))


class Mine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2048, 32)
        self.stack = nn.ModuleList([Block(32), Block(32)])
        self.register_buffer("angles", precompute_freqs_cis(8, 64), persistent=False)
        self.head = nn.Linear(32, 2048)

    def init_weights(self, buffer_device: torch.device) -> None:
        self.angles = precompute_freqs_cis(8, 64)
        for block in self.stack:
            block.mixer.init_weights(0.02)
            block.router_and_experts.init_weights(0.02, buffer_device)
            for norm in (block.first, block.second):
                norm.weight.uniform_(0.5, 1.5)
        for module in (self.embed, self.head):
            module.reset_parameters()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.stack:
            x = block(x, self.angles)
        return self.head(x)


def mine(*converters: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.device("meta"):
        model = Mine()
    model = (convert(model, *converters) if converters else model).to_empty(device="cpu")
    initialise(model)
    return model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def test_a_users_model_of_torchtitans_modules(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        converted = mine(*DENSE)
    assert [record.getMessage() for record in caplog.records if record.getMessage().startswith("npu_")] == [
        "npu_rms_norm: 4 RMSNorm in stack 0-1 -> npu_rms_norm",
        "npu_rope: 2 Attention in stack 0-1 -> npu_rotary_mul",
        "npu_rope: modules without shared tables: 2; each looks up its cosines and sines",
        "npu_permute: 2 MoE in stack 0-1 -> npu_moe_token_permute, npu_moe_token_unpermute",
        "npu_gmm: 2 GroupedExperts in stack 0-1 -> npu_grouped_matmul, npu_swiglu",
        "npu_attention: 2 ScaledDotProductAttentionWrapper in stack 0-1 -> npu_fusion_attention",
    ]
    assert_as_exact(step(converted), step(mine()), step(mine(dtype=torch.float64)))


def test_print_after_conversion_shows_what_was_replaced() -> None:
    text = str(build_on_meta("deepseek_v3", *DENSE, **SMALL))
    lines = (
        "NpuAttention(",
        "rotation=npu_rotary_mul",
        "NpuMoE(",
        "permutation=npu_moe_token_permute",
        "NpuRMSNorm((64,)",
        "NpuCausalAttention()",
    )
    for line in (*lines, "NpuGroupedExperts(experts=8, dim=64, hidden=32, product=npu_grouped_matmul)"):
        assert line in text, line


@pytest.mark.parametrize("name", ["npu_permute", "npu_gmm"])
def test_deepep_is_refused(name: str) -> None:
    config = job((name,))
    config.parallelism.expert_parallel_comm_backend = "deepep"
    with pytest.raises(UsageError, match=f"{name} and parallelism.expert_parallel_comm_backend"):
        CONVERTERS[name](config, None).convert(build_on_meta("deepseek_v3", **SMALL))
