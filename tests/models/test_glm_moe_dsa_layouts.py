"""GLM-5 with shared indexers gives one rank's losses and gradients on any layout."""

from __future__ import annotations

from typing import Any

import pytest

from tests._helpers.deepseek_v32_training import (
    COMPILED,
    CONVERTERS,
    SELECTIVE,
    WARMUP,
    assert_as_on_one_rank,
    one_rank,
    train_on,
)

GLM = {"model.name": "glm_moe_dsa"}
FUSED = {"model.converters": CONVERTERS}
FULL = {"activation_checkpoint.mode": "full"}
BUDGET = {
    "compile.enable": True,
    "compile.backend": "aot_eager",
    "npu.bypass_codegen": "off",
    "activation_checkpoint.mode": "memory_budget",
}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
BALANCER = "parallelism.context_parallel_load_balancer"
DOCUMENTS = {"dsa.document_mask": True}
MTP = {"mtp.layers": 1}
OWN_LOSS = {"dsa.shared_indexer_loss": False}
FOUR_STAGES = {
    "parallelism.pipeline_parallel_layers_per_stage": 1,
    "parallelism.pipeline_parallel_first_stage_less_layers": 0,
    "parallelism.pipeline_parallel_last_stage_less_layers": 0,
}
"""Two of them start with a layer without an indexer."""


def slow(*case: Any) -> Any:
    """Mark a case that a cheaper one covers, or a product of layouts that are tested separately."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "layout", "options"),
    [
        (1, {}, {**FUSED, **FULL}),
        slow(1, {}, {**FUSED, **SELECTIVE, **DOCUMENTS}),
        slow(1, {}, {**COMPILED, **FULL}),
        slow(1, {}, {**COMPILED, **FUSED}),
        slow(1, {}, {**BUDGET, **FUSED}),
        slow(1, {}, {**FUSED, **FULL, **MTP}),
        slow(1, {}, {**WARMUP, **FUSED, **FULL}),
        slow(2, {"shard": 2}, {**FUSED, **FULL}),
        (2, {"tp": 2}, {**FUSED, **FULL}),
        slow(2, {"tp": 2}, {**COMPILED, **DOCUMENTS}),
        slow(2, {"cp": 2}, {BALANCER: None}),
        (2, {"cp": 2}, {BALANCER: "headtail", **FUSED, **SELECTIVE, **DOCUMENTS}),
        (2, {"shard": 2, "ep": 2}, {**FUSED, **MTP}),
        slow(2, {"cp": 2}, {BALANCER: "headtail", **FUSED, **WARMUP}),
        (2, {"pp": 2}, {SCHEDULE: "1F1B", **DOCUMENTS, **FULL}),
        slow(2, {"pp": 2}, {SCHEDULE: "Interleaved1F1B", **FOUR_STAGES, **FUSED}),
        slow(2, {"pp": 2}, {SCHEDULE: "1F1B", **OWN_LOSS, **FUSED, **FULL}),
        slow(2, {"pp": 2}, {SCHEDULE: "1F1B", **WARMUP}),
        (2, {"pp": 2}, {SCHEDULE: "ZBVZeroBubble", **FOUR_STAGES}),
        slow(4, {"pp": 2, "cp": 2}, {SCHEDULE: "1F1B", **FUSED, **DOCUMENTS, **FULL}),
        slow(4, {"pp": 2, "tp": 2}, {**FUSED, **FULL}),
        slow(4, {"pp": 2, "shard": 2, "ep": 2}, {SCHEDULE: "Interleaved1F1B", **FOUR_STAGES}),
        slow(4, {"tp": 2, "cp": 2, "ep": 4}, {**FUSED, **FULL}),
        slow(4, {"shard": 2, "tp": 2, "ep": 2, "etp": 2}, FUSED),
        slow(4, {"shard": 2, "cp": 2, "ep": 2}, {**FUSED, **SELECTIVE}),
    ],
    ids=str,
)
def test_any_layout_gives_one_ranks_losses_and_gradients(
    ranks: int, layout: dict[str, int], options: dict[str, Any]
) -> None:
    expected = one_rank(
        stage=options.get("dsa.stage", "sparse"),
        document_mask="dsa.document_mask" in options,
        model="glm_moe_dsa",
        mtp_layers=options.get("mtp.layers", 0),
        shared_indexer_loss=options.get("dsa.shared_indexer_loss", True),
    )
    assert_as_on_one_rank(train_on(ranks, layout, {**GLM, **options}), expected, "tp" in layout)
