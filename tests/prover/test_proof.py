"""The comparison of recorded runs: what is equal, what differs, and what rounding makes incomparable."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from torchtitan_npu.prover.proof import EPS, Reference, compare, farthest, kind_of_error
from torchtitan_npu.prover.training import Run

EXACT = Run([2.0], [3.0], [{"a": 0.0, "b": 0.0}], [{"moe.expert_bias": [1e-3, -1e-3]}], longest_sum=64)
SPREAD = 4e-6


def reference(rounded: Run) -> Reference:
    return Reference(Path(), Path(), False, [EXACT, rounded])


ROUNDED = replace(EXACT, differences=[{"a": SPREAD, "b": EPS}], biases=[{"moe.expert_bias": [1e-3 + 1e-10, -1e-3]}])


@pytest.mark.parametrize(
    ("rank", "kind", "reason"),
    [
        (EXACT, "", ""),
        (replace(EXACT, differences=[{"a": 3.9 * SPREAD, "b": 0.0}]), "", ""),
        (replace(EXACT, differences=[{"a": 4.1 * SPREAD, "b": 0.0}]), "gradient", "most of all a: relative"),
        (replace(EXACT, differences=[{"a": math.nan, "b": 0.0}]), "gradient", "most of all a: relative"),
        (replace(EXACT, differences=[{"a": 0.0}]), "no gradient", "no gradient of b"),
        (replace(EXACT, losses=[2.0001]), "loss", "most of all loss"),
        (replace(EXACT, norms=[3.01]), "gradient norm", "most of all gradient norm"),
        (replace(EXACT, biases=[{}]), "expert bias", "no moe.expert_bias"),
        (replace(EXACT, biases=[{"moe.expert_bias": [-1e-3, 1e-3]}]), "expert bias", "moe.expert_bias differs"),
        (replace(EXACT, biases=[{"moe.expert_bias": [1e-3]}]), "expert bias", "moe.expert_bias differs"),
    ],
)
def test_what_differs_is_named(rank: Run, kind: str, reason: str) -> None:
    outcome = compare([rank], reference(ROUNDED))
    assert (outcome.status, outcome.kind) == ("differs" if kind else "equal", kind)
    assert reason in outcome.reason


@pytest.mark.parametrize(("values", "difference"), [([0.0], 0.0), ([0.0, 1e-9], math.inf), ([math.nan], math.inf)])
def test_a_reference_of_0_has_no_relative_difference(values: list[float], difference: float) -> None:
    """As of the loss if every label is masked."""
    assert farthest(values, 0.0) == difference


def test_ranks_of_a_pipeline_have_the_parameters_together() -> None:
    first = replace(EXACT, losses=[-1.0], differences=[{"a": 0.0}], biases=[{}])
    last = replace(EXACT, differences=[{"b": 0.0}])
    assert compare([first, last], reference(ROUNDED)).status == "equal"
    assert compare([first, first], reference(ROUNDED)).kind == "no gradient"


def test_rounding_that_selects_another_expert_allows_nothing() -> None:
    """The bound is √(4 operators · 2 parameters · 64 terms) units in the last place: 2.7e-6."""
    stable = reference(replace(ROUNDED, differences=[{"a": 2.6e-6, "b": EPS}]))
    assert stable.largest_spread() == pytest.approx(EPS * math.sqrt(512)) and not stable.instability()
    assert "rounding alone changes a by 4.0e-06, above 2.7e-06" in reference(ROUNDED).instability()
    assert reference(replace(EXACT, differences=[{"a": math.nan, "b": 0.0}])).instability()
    flipped = reference(replace(EXACT, biases=[{"moe.expert_bias": [-1e-3, 1e-3]}]))
    assert flipped.instability() == "step 1: with other rounding alone, moe.expert_bias differs"


def test_kinds_of_errors_have_no_numbers() -> None:
    text = "rank 1 of 2: Traceback (most recent call last):\n  File x\nValueError: 3 rows\n\nKeyError: 'b'"
    assert kind_of_error(text) == "ValueError: N rows"
    assert kind_of_error("rank 0 of 2: the process died") == "rank N of N: the process died"
