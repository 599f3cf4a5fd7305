"""gpt_oss's experts and its expert parallel have fused versions; tests/converters has the numbers."""

from __future__ import annotations

from torchtitan.models.gpt_oss.infra.expert_parallel import GptossExpertTensorParallel
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.moe.moe import GroupedExperts

from tests._helpers.converted_models import assert_no_further, convert
from tests._helpers.moe_layers import ROUNDINGS, build_moe, call_experts, call_experts_exact, rows
from torchtitan_npu.converters.gmm import REPLACEMENTS
from torchtitan_npu.distributed.expert_parallel import STYLES, NpuGptossExpertTensorParallel, NpuGptOssGroupedExperts


def test_both_are_registered() -> None:
    assert GptOssGroupedExperts.forward is not GroupedExperts.forward
    assert REPLACEMENTS[GptOssGroupedExperts.forward] is NpuGptOssGroupedExperts
    assert STYLES[GptossExpertTensorParallel] is NpuGptossExpertTensorParallel


def test_experts_with_biases_and_a_clamped_gate() -> None:
    model = build_moe(biased=True, num_experts=3, top_k=1)
    x, counts = rows([2, 0, 5])
    theirs, exact = call_experts(model[0].experts, x, counts), call_experts_exact(model[0].experts, x, counts)
    ours = call_experts(convert(model, "npu_gmm")[0].experts, x, counts)
    for name in exact:
        assert_no_further(name, ours[name], theirs[name], exact[name], ROUNDINGS)
