"""DeepSeek-V3.2 split over ranks, by heads, by sequence, by layers and by experts, trains as on one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests._helpers.deepseek_v32_training import (
    COMPILED,
    CONVERTERS,
    SELECTIVE,
    assert_as_on_one_rank,
    one_rank,
    train_on,
)
from tests._helpers.training import TOLERANCE, together

BALANCER = "parallelism.context_parallel_load_balancer"
FUSED = {"model.converters": CONVERTERS}
FULL = {"activation_checkpoint.mode": "full"}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
TWO_ROWS = {"parallelism.pipeline_parallel_microbatch_size": 2}
ONE_LAYER_A_STAGE = {"parallelism.pipeline_parallel_layers_per_stage": 1}


@pytest.mark.parametrize(
    ("ranks", "layout", "options"),
    [
        (2, {"shard": 2}, FUSED),
        (2, {"tp": 2}, {}),
        (2, {"tp": 2}, {**FUSED, **FULL}),
        (2, {"cp": 2}, {BALANCER: "headtail"}),
        (2, {"cp": 2}, {BALANCER: None, **FUSED}),
        (2, {"cp": 2}, {BALANCER: "headtail", **FUSED, **SELECTIVE}),
        (2, {"tp": 2, "ep": 2}, FUSED),
        (2, {"cp": 2}, {**COMPILED, **FULL}),
        (4, {"replicate": 2, "shard": 2}, {}),
        (4, {"tp": 2, "cp": 2}, {**FUSED, **FULL}),
        (4, {"pp": 2, "cp": 2}, {**FUSED, SCHEDULE: "1F1B"}),
        (4, {"shard": 2, "cp": 2, "ep": 2}, FUSED),
        (4, {"pp": 2, "tp": 2}, {**FUSED, **FULL}),
        (4, {"pp": 2, "shard": 2, "ep": 2}, {SCHEDULE: "1F1B"}),
        (4, {"shard": 2, "cp": 2}, {BALANCER: None, "dsa.document_mask": True}),
        (4, {"shard": 2, "tp": 2, "ep": 2, "etp": 2}, FUSED),
        (4, {"shard": 2, "tp": 2, "ep": 4}, {}),
        (4, {"tp": 2, "cp": 2, "ep": 4}, FUSED),
    ],
    ids=str,
)
def test_any_layout_gives_one_ranks_losses_and_gradients(
    ranks: int, layout: dict[str, int], options: dict[str, Any]
) -> None:
    documents = options.get("dsa.document_mask", False)
    assert_as_on_one_rank(train_on(ranks, layout, options), one_rank(document_mask=documents), "tp" in layout)


@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}], ids=str)
@pytest.mark.parametrize("converters", [[], CONVERTERS], ids=["eager", "fused"])
def test_documents_are_split_as_sequences_are(layout: dict[str, int], converters: list[str]) -> None:
    assert one_rank(document_mask=True).losses[0] != one_rank().losses[0]
    records = train_on(2, layout, {"dsa.document_mask": True, "model.converters": converters})
    assert_as_on_one_rank(records, one_rank(document_mask=True), "tp" in layout)


@pytest.mark.parametrize(
    ("ranks", "layout", "options"),
    [
        (2, {"pp": 2}, {SCHEDULE: "1F1B", **TWO_ROWS}),
        (2, {"pp": 2}, {SCHEDULE: "Interleaved1F1B", **ONE_LAYER_A_STAGE, **FUSED}),
        (2, {"pp": 2}, {SCHEDULE: "ZBVZeroBubble", **ONE_LAYER_A_STAGE}),
        (4, {"pp": 2, "cp": 2}, {SCHEDULE: "1F1B"}),
        (4, {"pp": 2, "cp": 2}, {SCHEDULE: "1F1B", **TWO_ROWS, **FUSED, **FULL}),
    ],
    ids=str,
)
def test_documents_go_through_a_pipeline(ranks: int, layout: dict[str, int], options: dict[str, Any]) -> None:
    """Of a batch's four rows a microbatch has one or two, with documents of their own."""
    records = train_on(ranks, layout, {"dsa.document_mask": True, **options})
    assert_as_on_one_rank(records, one_rank(document_mask=True))


@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}, {"shard": 2, "ep": 2}], ids=str)
def test_a_zero_bubble_pipeline_of_other_layouts(layout: dict[str, int]) -> None:
    records = train_on(4, {"pp": 2, **layout}, {SCHEDULE: "ZBVZeroBubble", **ONE_LAYER_A_STAGE, **FUSED})
    assert_as_on_one_rank(records, one_rank(), "tp" in layout)


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_pipeline_schedules_count_the_indexers_loss_once(schedule: str) -> None:
    records = train_on(2, {"pp": 2}, {SCHEDULE: schedule, **ONE_LAYER_A_STAGE})
    assert_as_on_one_rank(records, one_rank())


@pytest.mark.parametrize(("layout", "documents"), [({"cp": 2}, False), ({"pp": 2}, True)], ids=str)
def test_validates_a_split_sequence(layout: dict[str, int], documents: bool) -> None:
    options = {"validation.enable": True, "dsa.document_mask": documents}
    whole, split = (together(train_on(ranks, degrees, options)) for ranks, degrees in ((1, {}), (2, layout)))
    assert split.validation == pytest.approx(whole.validation, rel=TOLERANCE)
    assert len(whole.validation) == 1
