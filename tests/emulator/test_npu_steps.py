"""The benchmark of launches (``tools/bench/npu_steps.py``) counts what the emulator logs, in the right phase."""

from __future__ import annotations

import sys
from collections import Counter

from tests.emulator.training_jobs import ROOT

sys.path.insert(0, str(ROOT / "tools" / "bench"))

from npu_steps import PHASES, WARM_UP, count_launches, logged_steps

PARAMETERS = 9 + 3
"""Those of a layer of llama3, and embedding, norm and output."""


def test_launches_of_llama3() -> None:
    steps, calls = logged_steps("llama3", ["eager", "converters"], [1])
    eager, converted = (count_launches(calls, step["times"]) for step in steps)

    # the log counts the steps of the first job itself
    logged = Counter(call["operator"] for call in calls if call["step"] == WARM_UP)
    assert sum(eager.values(), Counter()) == logged

    norms = {phase: (counts["aclnnRmsNorm"], counts["aclnnRmsNormGrad"]) for phase, counts in converted.items()}
    assert norms == {"forward": (3, 0), "backward": (0, 3), "optimizer": (0, 0)}
    for counts in (eager, converted):
        assert [counts[phase]["aclnnFlashAttentionScore"] for phase in PHASES] == [1, 0, 0]
        assert [counts[phase]["aclnnFlashAttentionScoreGrad"] for phase in PHASES] == [0, 1, 0]
        assert [counts[phase]["aclnnApplyAdamWV2"] for phase in PHASES] == [0, 0, PARAMETERS]
    assert all(converted[phase].total() < eager[phase].total() for phase in ("forward", "backward"))
    assert converted["optimizer"] == eager["optimizer"]
