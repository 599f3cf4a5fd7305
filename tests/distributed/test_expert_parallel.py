"""Expert parallel with fused dispatch: TorchTitan's results and collectives, no more host reads, no padding."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed import expert_parallel as upstream
from torchtitan.models.deepseek_v3.infra.parallelize import parallelize_deepseekv3
from torchtitan.models.gpt_oss.infra.expert_parallel import GptossExpertTensorParallel
from torchtitan.models.gpt_oss.infra.parallelize import parallelize_gptoss
from torchtitan.models.llama4.infra import parallelize as llama4
from torchtitan.models.qwen3.infra.parallelize import parallelize_qwen3

from tests._helpers.converted_models import assert_no_further, convert
from tests._helpers.moe_layers import (
    DIM,
    ROUNDINGS,
    ModelOfOneMoE,
    build_moe,
    call_exact,
    call_experts,
    call_experts_exact,
    output_gradient,
    rows,
)
from tests._helpers.multirank import run_on_ranks
from tests.preflight.test_job_checks import job
from torchtitan_npu import platform
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.distributed.expert_parallel import (
    STYLES,
    NpuExpertParallel,
    NpuExpertTensorParallel,
    NpuGptossExpertTensorParallel,
    fused_styles,
)
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.titan_internals.rebind import copy_with_globals, refers_to

RANKS, EXPERTS, TOP_K = 2, 6, 2
VARIANTS = {"plain": (), "npu_gmm": ("npu_gmm",), "npu_permute": ("npu_permute",), "both": ("npu_permute", "npu_gmm")}


class HostReads(TorchFunctionMode):
    """Count the calls by which Python reads a tensor's values or copies them to the CPU."""

    READS = frozenset({"tolist", "item", "cpu", "numpy", "__int__", "__bool__", "__float__", "__index__"})

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.count += name in self.READS or (name == "to" and torch.device("cpu") in args)
        return func(*args, **(kwargs or {}))


class HiddenReads(TorchDispatchMode):
    """Record operators whose output size or value only the device knows."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unknown_size = torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None
        if unknown_size or torch.Tag.data_dependent_output in func.tags:
            self.names.append(str(func))
        return func(*args, **kwargs)


def tokens_of(rank: int) -> Tensor:
    return torch.randn(2, 7, DIM, generator=torch.Generator().manual_seed(10 + rank))


def layer(biased: bool, before: bool, crowded: bool) -> nn.Sequential:
    """Return a MoE layer. With ``crowded``, every token goes to the experts of the first rank."""
    moe = build_moe(biased, num_experts=EXPERTS, top_k=TOP_K, num_shared_experts=1, score_before_experts=before)
    if crowded:
        moe[0].expert_bias[: EXPERTS // RANKS] += 100
    return moe


def dispatched(biased: bool, before: bool, crowded: bool) -> dict[str, dict[str, Any]]:
    """Return output, gradients, collectives and host reads of each variant on one rank."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    results = {}
    for name, converters in VARIANTS.items():
        model = ModelOfOneMoE(layer(biased, before, crowded)[0])
        model = convert(model, *converters) if converters else model
        plan = llama4.apply_moe_ep_tp
        copy_with_globals(plan, fused_styles(plan, model))(model, None, mesh, None, None)  # type: ignore[arg-type]
        seen: dict[str, Any] = {}

        def note(module: nn.Module, args: tuple[Tensor, Tensor], seen: dict[str, Any] = seen) -> None:
            seen["rows"], seen["counts"] = args[0].shape[0], args[1].tolist()

        hook = model.moe.experts.register_forward_pre_hook(note)
        x = tokens_of(dist.get_rank()).requires_grad_()
        model(x)
        hook.remove()
        with CommDebugMode() as communication, HiddenReads() as hidden, HostReads() as reads:
            output = model(x)
            output.backward(output_gradient(output))
        collectives = {str(op): count for op, count in communication.get_comm_counts().items()}
        seen |= {"collectives": collectives, "reads": reads.count, "hidden": hidden.names}
        seen |= {"output": output.detach(), "x": x.grad, "routed": model.moe.tokens_per_expert / 2}
        for key, parameter in model.moe.named_parameters():
            grad = parameter.grad
            seen[f"0.{key}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
        results[name] = seen
    return results


@pytest.mark.parametrize(
    ("biased", "before", "crowded"), [(False, True, False), (True, False, False), (False, False, True)]
)
def test_gives_what_torchtitan_gives(biased: bool, before: bool, crowded: bool) -> None:
    ranks = run_on_ranks(RANKS, dispatched, biased, before, crowded)
    exact = [call_exact(layer(biased, before, crowded), tokens_of(rank)) for rank in range(RANKS)]
    local = EXPERTS // RANKS
    routed = sum(results["plain"]["routed"] for results in ranks)
    for rank, results in enumerate(ranks):
        arrived = routed[rank * local : (rank + 1) * local].int().tolist()
        assert any(arrived) != (crowded and rank == 1)
        for variant, seen in results.items():
            assert torch.equal(seen["routed"], results["plain"]["routed"])
            for name, oracle in exact[rank].items():
                if name.startswith("0.experts."):  # their gradients come from the tokens of every rank
                    oracle = sum(other[name] for other in exact)
                assert_no_further(f"{variant} {name}", seen[name], results["plain"][name], oracle, ROUNDINGS)
            fused = variant in ("npu_permute", "both")
            if fused:
                assert seen["counts"] == arrived and seen["rows"] == sum(arrived)
            else:
                assert seen["counts"] == [max(8, -(-count // 8) * 8) for count in arrived]
                assert seen["rows"] > sum(arrived)


def test_communicates_as_torchtitan_and_reads_no_more() -> None:
    for results in run_on_ranks(RANKS, dispatched, False, True, False):
        plain = results["plain"]
        # the counts, dispatch and combine, and the backward of both
        assert sum(plain["collectives"].values()) == 5
        assert all(seen["collectives"] == plain["collectives"] for seen in results.values())
        assert plain["reads"] == results["npu_permute"]["reads"] == 5  # four in the dispatch, one in the experts' loop
        assert results["both"]["reads"] == results["npu_gmm"]["reads"] == 4
        assert not results["both"]["hidden"] and not results["npu_permute"]["hidden"]
        assert results["npu_gmm"]["hidden"] == plain["hidden"]  # TorchTitan's indexing


COUNTS = ([3, 0, 1, 5], [0, 2, 4, 0])
"""The tokens of each expert-parallel rank for the four experts."""


def over_experts_and_their_columns(biased: bool) -> tuple[int, dict[str, Tensor]]:
    """Return the expert-parallel rank, and the outputs and gradients of converted experts on one of 2 × 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    ep_rank = mesh["ep"].get_local_rank()
    experts = convert(build_moe(biased, num_experts=4), "npu_gmm")[0].experts
    (NpuGptossExpertTensorParallel() if biased else NpuExpertTensorParallel())._apply(experts, mesh)
    x, counts = rows(COUNTS[ep_rank], seed=ep_rank)
    x.requires_grad_()
    output = experts(x, counts)
    output.backward(output_gradient(output))
    full = output.detach().clone()
    dist.all_reduce(full, group=mesh["etp"].get_group())
    grads = {name: parameter.grad.full_tensor() for name, parameter in experts.named_parameters()}
    return ep_rank, {"output": full, "x": x.grad} | grads


@pytest.mark.parametrize("biased", [False, True])
def test_expert_tensor_parallel_is_equal(biased: bool) -> None:
    """gpt_oss's bias is added on each tensor-parallel rank, and must count once."""
    plain = build_moe(biased, num_experts=4)[0].experts
    inputs = [rows(counts, seed=rank) for rank, counts in enumerate(COUNTS)]
    exact, theirs = ([run(plain, *x) for x in inputs] for run in (call_experts_exact, call_experts))
    for ep_rank, ours in run_on_ranks(4, over_experts_and_their_columns, biased):
        for name in exact[0]:
            if name in ("output", "x"):
                assert_no_further(name, ours[name], theirs[ep_rank][name], exact[ep_rank][name], ROUNDINGS)
            else:
                alone, oracle = (sum(result[name] for result in results) for results in (theirs, exact))
                assert_no_further(name, ours[name], alone, oracle, ROUNDINGS)


PLANS = [llama4.parallelize_llama, parallelize_deepseekv3, parallelize_qwen3, parallelize_gptoss]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.__name__)
def test_plans_get_the_fused_styles_for_a_converted_model_only(plan: FunctionType) -> None:
    plain = ModelOfOneMoE(build_moe()[0])
    assert not fused_styles(plan, plain)
    converted = convert(copy.deepcopy(plain), "npu_permute", "npu_gmm")
    fused = copy_with_globals(plan, fused_styles(plan, converted))
    styles = refers_to(plan, STYLES)
    assert upstream.ExpertParallel in styles and len(styles) >= 2
    assert not refers_to(fused, STYLES)
    assert set(refers_to(fused, STYLES.values())) == {STYLES[style] for style in styles}


def test_a_plan_without_these_styles_is_an_error() -> None:
    """Such a plan would not use the operators that the job lists."""

    def plan(model: nn.Module, *args: Any) -> nn.Module:
        return model

    converted = convert(ModelOfOneMoE(build_moe()[0]), "npu_permute", "npu_gmm")
    with pytest.raises(
        UsageError, match=r"npu_permute does not support expert parallel of .*\.plan, which uses none of .*styles"
    ):
        fused_styles(plan, converted)
    assert not fused_styles(plan, convert(ModelOfOneMoE(build_moe()[0]), "npu_gmm"))


def test_torch_s_grouped_product_which_needs_padding_is_an_error() -> None:
    """With ``npu_permute`` alone, the experts stay TorchTitan's and call ``torch._grouped_mm``."""
    plan = llama4.apply_moe_ep_tp
    with pytest.raises(RuntimeError, match="takes only tokens that TorchTitan has sorted and padded"):
        fused_styles(plan, convert(ModelOfOneMoE(build_moe(use_grouped_mm=True)[0]), "npu_permute"))
    assert fused_styles(plan, convert(ModelOfOneMoE(build_moe(use_grouped_mm=False)[0]), "npu_permute")) == STYLES


def test_a_job_whose_experts_need_padding_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def permuting(*others: str) -> JobConfig:
        converters = ["npu_permute", *others]
        return job(model__name="deepseek_v3", model__converters=converters, parallelism__expert_parallel_degree=2)

    # else TorchTitan turns use_grouped_mm off
    monkeypatch.setattr("torchtitan.models.deepseek_v3.model.args.has_cuda_capability", lambda *version: True)
    check_job(permuting(), world_size=2)
    with platform.job_for("cuda"):
        check_job(permuting("npu_gmm"), world_size=2)
        with pytest.raises(UsageError, match=r"model\.converters: npu_permute with expert parallel needs npu_gmm here"):
            check_job(permuting(), world_size=2)


def test_every_style_of_torchtitan_has_its_fused_counterpart() -> None:
    assert set(STYLES) == {upstream.ExpertParallel, upstream.ExpertTensorParallel, GptossExpertTensorParallel}
    for style, fused in STYLES.items():
        assert issubclass(fused, style) and issubclass(fused, NpuExpertParallel)
        assert fused._token_dispatch is not upstream.ExpertParallel._token_dispatch


def test_gpt_oss_experts_with_biases_and_a_clamped_gate() -> None:
    model = build_moe(biased=True, num_experts=3, top_k=1)
    x, counts = rows([2, 0, 5])
    plain, exact = call_experts(model[0].experts, x, counts), call_experts_exact(model[0].experts, x, counts)
    fused = call_experts(convert(model, "npu_gmm")[0].experts, x, counts)
    for name in exact:
        assert_no_further(name, fused[name], plain[name], exact[name], ROUNDINGS)
