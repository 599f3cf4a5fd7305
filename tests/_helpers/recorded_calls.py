"""The doctor's file of recorded calls, against the calls that a contract step makes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan_npu.cli.doctor.operators import NOT_CALLED, recorded_calls

if TYPE_CHECKING:
    from tests._helpers.contract_step import CallsAndLimits

FOLDER = os.environ.get("RECORDED_CALLS")
"""Set by tools/recorded_calls.py, which reads a file per step there."""


def check_sampled(calls: CallsAndLimits) -> None:
    """Assert that each call is one that the doctor samples.

    ``tests/emulator/test_tools.py`` runs the doctor's samples on the emulator.
    """
    if not FOLDER:
        for op in calls.described.keys() - set(NOT_CALLED):
            sampled = [call["arguments"] for call in recorded_calls().get(op, [])]
            missing = [call for call in calls.described[op] if call not in sampled]
            assert not missing, f"{op}: call check_calls in this test and run python -m tools.recorded_calls"


def check_calls(step: str, calls: CallsAndLimits) -> None:
    """Assert that the file has exactly the calls of ``step``."""
    if FOLDER:
        (Path(FOLDER) / f"{step}.json").write_text(json.dumps(calls.described))
    else:
        assert _sorted(calls.described) == _sorted(_recorded(step)), "run python -m tools.recorded_calls"


def step_name(model: str, layout: dict[str, int] | None = None, only: str = "") -> str:
    """Return a name such as ``"llama3, cp 4, tp 2"``, or ``"llama3, only npu_rope"`` for a step with one converter."""
    degrees = (f"{name} {degree}" for name, degree in (layout or {}).items())
    return ", ".join([model, *([f"only {only}"] if only else []), *degrees])


def _recorded(step: str) -> dict[str, list[dict[str, Any]]]:
    calls = {
        op: [call["arguments"] for call in recorded if step in call["steps"]]
        for op, recorded in recorded_calls().items()
    }
    return {op: described for op, described in calls.items() if described}


def _sorted(calls: dict[str, list[dict[str, Any]]]) -> dict[str, list[str]]:
    return {op: sorted(json.dumps(call, sort_keys=True) for call in described) for op, described in calls.items()}
