"""Parallel means equal for sparse attention: DeepSeek-V3.2, and GLM-5, several of whose layers share an indexer."""

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
from tests._helpers.training import TOLERANCE, together
from tests.distributed.test_layouts import layout

FUSED = {"model.converters": CONVERTERS}
FULL = {"activation_checkpoint.mode": "full"}
BUDGET = {
    "compile.enable": True,
    "compile.backend": "aot_eager",
    "npu.bypass_codegen": "off",
    "activation_checkpoint.mode": "memory_budget",
}
CONTIGUOUS, HEAD_TAIL = ({"parallelism.context_parallel_load_balancer": name} for name in (None, "headtail"))
DOCUMENTS = {"dsa.document_mask": True}
MTP = {"mtp.layers": 1}
OWN_LOSS = {"dsa.shared_indexer_loss": False}
TWO_ROWS = {"parallelism.pipeline_parallel_microbatch_size": 2}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
SIMPLE, INTERLEAVED, INTERLEAVED_ZERO_BUBBLE, ZERO_BUBBLE = (
    {SCHEDULE: name} for name in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
)
FOUR_STAGES = {
    "deepseek_v32": {"parallelism.pipeline_parallel_layers_per_stage": 1},
    "glm_moe_dsa": {  # two of them start with a layer without an indexer
        "parallelism.pipeline_parallel_layers_per_stage": 1,
        "parallelism.pipeline_parallel_first_stage_less_layers": 0,
        "parallelism.pipeline_parallel_last_stage_less_layers": 0,
    },
}

DEFAULT: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek_v32", "tp2", {**FUSED, **FULL}),
    ("deepseek_v32", "tp2", DOCUMENTS),
    ("deepseek_v32", "tp2 ep2", FUSED),
    ("deepseek_v32", "cp2", {**HEAD_TAIL, **FUSED, **SELECTIVE}),
    ("deepseek_v32", "cp2", {**DOCUMENTS, **FUSED}),
    # a microbatch has one or two of a batch's four rows, with different documents
    ("deepseek_v32", "pp2", {**SIMPLE, **TWO_ROWS, **DOCUMENTS}),
    ("deepseek_v32", "pp2", {**INTERLEAVED, **FUSED, **DOCUMENTS}),
    ("deepseek_v32", "pp2", ZERO_BUBBLE),
    ("glm_moe_dsa", "", {**FUSED, **FULL}),
    ("glm_moe_dsa", "tp2", {**FUSED, **FULL}),
    ("glm_moe_dsa", "cp2", {**HEAD_TAIL, **FUSED, **SELECTIVE, **DOCUMENTS}),
    ("glm_moe_dsa", "shard2 ep2", {**FUSED, **MTP}),
    ("glm_moe_dsa", "pp2", {**SIMPLE, **DOCUMENTS, **FULL}),
    ("glm_moe_dsa", "pp2", ZERO_BUBBLE),
]
SLOW: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek_v32", "shard2", FUSED),
    ("deepseek_v32", "tp2", {}),
    ("deepseek_v32", "tp2", {**DOCUMENTS, **FUSED}),
    ("deepseek_v32", "cp2", HEAD_TAIL),
    ("deepseek_v32", "cp2", {**CONTIGUOUS, **FUSED}),
    ("deepseek_v32", "cp2", {**COMPILED, **FULL}),
    ("deepseek_v32", "cp2", DOCUMENTS),
    ("deepseek_v32", "pp2", INTERLEAVED),
    ("deepseek_v32", "pp2", INTERLEAVED_ZERO_BUBBLE),
    ("deepseek_v32", "pp2", {**ZERO_BUBBLE, **DOCUMENTS}),
    ("deepseek_v32", "replicate2 shard2", {}),
    ("deepseek_v32", "tp2 cp2", FUSED),
    ("deepseek_v32", "shard2 cp2", {**CONTIGUOUS, **DOCUMENTS}),
    ("deepseek_v32", "shard2 cp2 ep2", FUSED),
    ("deepseek_v32", "shard2 tp2 ep2 etp2", FUSED),
    ("deepseek_v32", "shard2 tp2 ep4", {}),
    ("deepseek_v32", "tp2 cp2 ep4", FUSED),
    ("deepseek_v32", "pp2 cp2", {**SIMPLE, **FUSED}),
    ("deepseek_v32", "pp2 cp2", {**SIMPLE, **DOCUMENTS}),
    ("deepseek_v32", "pp2 cp2", {**SIMPLE, **TWO_ROWS, **DOCUMENTS, **FUSED, **FULL}),
    ("deepseek_v32", "pp2 tp2", {**FUSED, **FULL}),
    ("deepseek_v32", "pp2 shard2 ep2", SIMPLE),
    *(("deepseek_v32", f"pp2 {other}", {**ZERO_BUBBLE, **FUSED}) for other in ("cp2", "tp2", "shard2 ep2")),
    ("glm_moe_dsa", "", {**FUSED, **SELECTIVE, **DOCUMENTS}),
    ("glm_moe_dsa", "", {**COMPILED, **FULL}),
    ("glm_moe_dsa", "", {**COMPILED, **FUSED}),
    ("glm_moe_dsa", "", {**BUDGET, **FUSED}),
    ("glm_moe_dsa", "", {**FUSED, **FULL, **MTP}),
    ("glm_moe_dsa", "", {**WARMUP, **FUSED, **FULL}),
    ("glm_moe_dsa", "shard2", {**FUSED, **FULL}),
    ("glm_moe_dsa", "tp2", {**COMPILED, **DOCUMENTS}),
    ("glm_moe_dsa", "cp2", CONTIGUOUS),
    ("glm_moe_dsa", "cp2", {**HEAD_TAIL, **FUSED, **WARMUP}),
    ("glm_moe_dsa", "pp2", {**INTERLEAVED, **FUSED}),
    ("glm_moe_dsa", "pp2", {**SIMPLE, **OWN_LOSS, **FUSED, **FULL}),
    ("glm_moe_dsa", "pp2", {**SIMPLE, **WARMUP}),
    ("glm_moe_dsa", "pp2 cp2", {**SIMPLE, **FUSED, **DOCUMENTS, **FULL}),
    ("glm_moe_dsa", "pp2 tp2", {**FUSED, **FULL}),
    ("glm_moe_dsa", "pp2 shard2 ep2", INTERLEAVED),
    ("glm_moe_dsa", "tp2 cp2 ep4", {**FUSED, **FULL}),
    ("glm_moe_dsa", "shard2 tp2 ep2 etp2", FUSED),
    ("glm_moe_dsa", "shard2 cp2 ep2", {**FUSED, **SELECTIVE}),
]
"""Cases that a cheaper one covers, and products of layouts that are tested separately."""


def ranks_of(degrees: dict[str, int]) -> int:
    ranks = 1
    for name in ("replicate", "shard", "tp", "cp", "pp"):
        ranks *= degrees.get(name, 1)
    return max(ranks, degrees.get("ep", 1))


@pytest.mark.parametrize(
    ("model", "text", "options"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_any_layout_gives_one_ranks_losses_and_gradients(model: str, text: str, options: dict[str, Any]) -> None:
    degrees = layout(text)
    if options.get(SCHEDULE, "1F1B") != "1F1B":
        options = {**options, **FOUR_STAGES[model]}
    expected = one_rank(
        stage=options.get("dsa.stage", "sparse"),
        document_mask="dsa.document_mask" in options,
        model=model,
        mtp_layers=options.get("mtp.layers", 0),
        shared_indexer_loss=options.get("dsa.shared_indexer_loss", True),
    )
    records = train_on(ranks_of(degrees), degrees, {"model.name": model, **options})
    assert_as_on_one_rank(records, expected, "tp" in degrees)


def test_documents_have_an_effect() -> None:
    assert one_rank(document_mask=True).losses[0] != one_rank().losses[0]


@pytest.mark.parametrize(("text", "documents"), [("cp2", False), ("pp2", True)])
def test_validates_a_split_sequence(text: str, documents: bool) -> None:
    options = {"validation.enable": True, "dsa.document_mask": documents}
    whole, split = (together(train_on(ranks, layout(words), options)) for ranks, words in ((1, ""), (2, text)))
    assert split.validation == pytest.approx(whole.validation, rel=TOLERANCE)
    assert len(whole.validation) == 1
