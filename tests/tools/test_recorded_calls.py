"""The page of recorded calls in the docs is current. Each contract step checks its part of the file itself."""

from __future__ import annotations

from tools.recorded_calls import PAGE, page
from torchtitan_npu.cli.doctor.operators import recorded_calls


def test_the_page_of_calls_is_current() -> None:
    assert PAGE.read_text() == page(recorded_calls()), "run python -m tools.recorded_calls"
