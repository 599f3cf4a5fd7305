"""The choices of an emulated NPU are recorded and replayed there and on the CPU."""

from __future__ import annotations

from pathlib import Path

import torch

from tests._helpers.training import assert_same_balance
from tests.emulator.training_jobs import DSA_BFLOAT16, Job, run_on_cpu

SHORT = {**DSA_BFLOAT16, "training.steps": 2, "activation_checkpoint.mode": "full"}


def test_a_record_of_an_npu_is_replayed_there_bit_for_bit_and_on_the_cpu(tmp_path: Path) -> None:
    recording = Job("deepseek_v32_dsa", options={**SHORT, "replay.record": str(tmp_path)}).run()
    replay = Job("deepseek_v32_dsa", options={**SHORT, "replay.replay": str(tmp_path)})
    replaying = replay.run()
    assert replaying.losses == recording.losses and replaying.norms == recording.norms
    assert all(torch.equal(replaying.weights[name], weight) for name, weight in recording.weights.items())
    for kind in ("experts", "keys"):
        assert replaying.metrics[f"replay/flipped_{kind}"] == [0, 0]
    on_cpu = run_on_cpu({"replay": replay})["replay"]
    assert_same_balance(on_cpu, recording)  # the experts are those of the NPU, whatever the CPU would choose
    assert on_cpu.metrics["replay/keys"] == replaying.metrics["replay/keys"]
