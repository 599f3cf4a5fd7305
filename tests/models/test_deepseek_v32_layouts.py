"""DeepSeek-V3.2 gives one rank's losses and gradients with tensor, context, pipeline and expert parallel."""

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
ONE_LAYER_PER_STAGE = {"parallelism.pipeline_parallel_layers_per_stage": 1}


def slow(*case: Any) -> Any:
    """Mark a case that a cheaper one covers, or a product of layouts that are tested separately."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("ranks", "layout", "options"),
    [
        slow(2, {"shard": 2}, FUSED),
        slow(2, {"tp": 2}, {}),
        (2, {"tp": 2}, {**FUSED, **FULL}),
        slow(2, {"cp": 2}, {BALANCER: "headtail"}),
        slow(2, {"cp": 2}, {BALANCER: None, **FUSED}),
        (2, {"cp": 2}, {BALANCER: "headtail", **FUSED, **SELECTIVE}),
        (2, {"tp": 2, "ep": 2}, FUSED),
        slow(2, {"cp": 2}, {**COMPILED, **FULL}),
        slow(4, {"replicate": 2, "shard": 2}, {}),
        slow(4, {"tp": 2, "cp": 2}, FUSED),
        slow(4, {"pp": 2, "cp": 2}, {**FUSED, SCHEDULE: "1F1B"}),
        slow(4, {"shard": 2, "cp": 2, "ep": 2}, FUSED),
        slow(4, {"pp": 2, "tp": 2}, {**FUSED, **FULL}),
        slow(4, {"pp": 2, "shard": 2, "ep": 2}, {SCHEDULE: "1F1B"}),
        slow(4, {"shard": 2, "cp": 2}, {BALANCER: None, "dsa.document_mask": True}),
        slow(4, {"shard": 2, "tp": 2, "ep": 2, "etp": 2}, FUSED),
        slow(4, {"shard": 2, "tp": 2, "ep": 4}, {}),
        slow(4, {"tp": 2, "cp": 2, "ep": 4}, FUSED),
    ],
    ids=str,
)
def test_any_layout_gives_one_ranks_losses_and_gradients(
    ranks: int, layout: dict[str, int], options: dict[str, Any]
) -> None:
    documents = options.get("dsa.document_mask", False)
    assert_as_on_one_rank(train_on(ranks, layout, options), one_rank(document_mask=documents), "tp" in layout)


@pytest.mark.parametrize(
    ("layout", "converters"),
    [
        slow({"cp": 2}, []),
        ({"cp": 2}, CONVERTERS),
        ({"tp": 2}, []),
        slow({"tp": 2}, CONVERTERS),
    ],
    ids=str,
)
def test_documents_with_a_split_sequence(layout: dict[str, int], converters: list[str]) -> None:
    assert one_rank(document_mask=True).losses[0] != one_rank().losses[0]
    records = train_on(2, layout, {"dsa.document_mask": True, "model.converters": converters})
    assert_as_on_one_rank(records, one_rank(document_mask=True), "tp" in layout)


@pytest.mark.parametrize(
    ("ranks", "layout", "options"),
    [
        (2, {"pp": 2}, {SCHEDULE: "1F1B", **TWO_ROWS}),
        (2, {"pp": 2}, {SCHEDULE: "Interleaved1F1B", **ONE_LAYER_PER_STAGE, **FUSED}),
        slow(2, {"pp": 2}, {SCHEDULE: "ZBVZeroBubble", **ONE_LAYER_PER_STAGE}),
        slow(4, {"pp": 2, "cp": 2}, {SCHEDULE: "1F1B"}),
        slow(4, {"pp": 2, "cp": 2}, {SCHEDULE: "1F1B", **TWO_ROWS, **FUSED, **FULL}),
    ],
    ids=str,
)
def test_documents_go_through_a_pipeline(ranks: int, layout: dict[str, int], options: dict[str, Any]) -> None:
    """A microbatch has one or two of a batch's four rows, with different documents."""
    records = train_on(ranks, layout, {"dsa.document_mask": True, **options})
    assert_as_on_one_rank(records, one_rank(document_mask=True))


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"cp": 2}, {"tp": 2}, {"shard": 2, "ep": 2}], ids=str)
def test_a_zero_bubble_pipeline_with_other_layouts(layout: dict[str, int]) -> None:
    records = train_on(4, {"pp": 2, **layout}, {SCHEDULE: "ZBVZeroBubble", **ONE_LAYER_PER_STAGE, **FUSED})
    assert_as_on_one_rank(records, one_rank(), "tp" in layout)


@pytest.mark.parametrize("schedule", [slow("Interleaved1F1B"), slow("InterleavedZeroBubble"), "ZBVZeroBubble"])
def test_pipeline_schedules_count_the_indexers_loss_once(schedule: str) -> None:
    records = train_on(2, {"pp": 2}, {SCHEDULE: schedule, **ONE_LAYER_PER_STAGE})
    assert_as_on_one_rank(records, one_rank())


@pytest.mark.parametrize(("layout", "documents"), [({"cp": 2}, False), ({"pp": 2}, True)], ids=str)
def test_validates_a_split_sequence(layout: dict[str, int], documents: bool) -> None:
    options = {"validation.enable": True, "dsa.document_mask": documents}
    whole, split = (together(train_on(ranks, degrees, options)) for ranks, degrees in ((1, {}), (2, layout)))
    assert split.validation == pytest.approx(whole.validation, rel=TOLERANCE)
    assert len(whole.validation) == 1
