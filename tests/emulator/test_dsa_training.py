"""DeepSeek-V3.2 with ``npu_dsa`` and all other converters in bfloat16, which the NPU's sparse attention requires.

The yardstick is a float32 run of the CPU backend. In bfloat16 the emulated NPU may be a stated factor further away from
it than the CPU backend is: both round the same numbers, at different steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests._helpers.deepseek_v32_training import CONVERTERS, SELECTIVE
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, assert_same_balance
from tests.emulator.training_jobs import DSA_BFLOAT16 as BFLOAT16
from tests.emulator.training_jobs import DSA_OPTIONS as OPTIONS
from tests.emulator.training_jobs import Job, run_on_cpu, train_and_count

ONE_SEQUENCE = {"training.global_batch_size": 1, "training.local_batch_size": 1, "training.steps": 2}

GRADIENT_FACTOR = 1.5
"""A gradient has at least 24 elements, so the norms of two independent errors differ by 20 % (one standard deviation)
or less. The largest ratio seen was 1.07."""
LOSS_FACTOR = 3.0
"""The largest of five errors of a number. The largest ratio seen was 1.3."""


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def assert_as_exact_as_the_cpu(emulated: Record, cpu: Record, exact: Record) -> None:
    for metric in ("losses", "indexer_losses"):
        ours, theirs, values = (getattr(record, metric) for record in (emulated, cpu, exact))
        assert len(ours) == len(values) > 1
        worst, allowed = (max(abs(x - y) for x, y in zip(run, values, strict=True)) for run in (ours, theirs))
        assert worst <= LOSS_FACTOR * allowed, f"{metric}: {worst:.1e}, on the CPU {allowed:.1e}"
    assert emulated.gradients.keys() == exact.gradients.keys()
    for name, gradient in exact.gradients.items():
        ours, allowed = error(emulated.gradients[name], gradient), error(cpu.gradients[name], gradient)
        assert ours <= GRADIENT_FACTOR * allowed, f"{name}: {ours:.1e}, on the CPU {allowed:.1e}"
        assert allowed < 0.2, f"{name}: an error of {allowed:.1e} shows nothing"


@pytest.mark.parametrize("layout", [{}, {"cp": 2}], ids=str)
def test_training(layout: dict[str, int], on_cpu: dict[str, Record]) -> None:
    emulated = Job("deepseek_v32_dsa", 2 if layout else 1, layout, BFLOAT16).run()
    assert_as_exact_as_the_cpu(emulated, on_cpu[f"npu_dsa {layout}"], on_cpu["npu_dsa float32"])


def test_layers_that_share_an_indexer(on_cpu: dict[str, Record]) -> None:
    """GLM-5 with all converters. Recomputed layers use the keys of the forward pass: they are selected once a step."""
    full = {**BFLOAT16, "activation_checkpoint.mode": "full"}
    job = Job("glm_moe_dsa", options=full)
    emulated, calls = run_on_ranks(1, train_and_count, job, process_group=False)[0]
    assert_as_exact_as_the_cpu(emulated, on_cpu["glm_moe_dsa"], on_cpu["glm_moe_dsa float32"])
    batches = 5 * 2  # steps, and batches of a step
    assert calls["npu_lightning_indexer"] == batches
    assert calls["npu_sparse_lightning_indexer_grad_kl_loss"] == 3 * batches
    assert calls["npu_sparse_flash_attention"] == 2 * 3 * batches


def test_selective_checkpointing_saves_attention() -> None:
    """Option "op" recomputes neither the selection of keys nor attention, and changes no bit."""
    short = {**BFLOAT16, "training.steps": 2}
    (plain, calls), (saving, saving_calls) = (
        run_on_ranks(1, train_and_count, Job("deepseek_v32_dsa", options=options), process_group=False)[0]
        for options in (short, {**short, **SELECTIVE})
    )
    assert saving.losses == plain.losses and saving.norms == plain.norms
    assert all(torch.equal(saving.weights[name], weight) for name, weight in plain.weights.items())
    attention = ("npu_lightning_indexer", "npu_sparse_flash_attention", "npu_sparse_flash_attention_grad")
    assert [saving_calls[name] for name in attention] == [calls[name] for name in attention] == [8] * 3
    assert saving_calls["npu_rms_norm"] > calls["npu_rms_norm"]  # other operators are recomputed


FULL = {"activation_checkpoint.mode": "full"}
# the first layer has no experts; one sequence is longer than the top-k, which selects every key of the other tests
LONG = {**ONE_SEQUENCE, "training.seq_len": 1088}
LONG["model.converters"] = [name for name in CONVERTERS if name not in ("npu_gating", "npu_permute", "npu_gmm")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "ranks", "layout", "options", "sizes"),
    [
        ("glm_moe_dsa", 2, {"cp": 2}, FULL, {}),
        ("glm_moe_dsa", 2, {"ep": 2}, {"mtp.layers": 1}, {}),
        ("deepseek_v32_dsa", 2, {"ep": 2}, {}, {}),
        # TorchTitan has no mixed precision with tensor parallel alone; the loss of the indexer needs 32 heads per rank
        ("deepseek_v32_dsa", 4, {"shard": 2, "tp": 2, "ep": 4}, {}, {"n_heads": 64}),
        ("deepseek_v32_dsa", 1, {}, LONG, {"n_layers": 1}),
    ],
    ids=str,
)
def test_more_layouts_and_options(
    model: str, ranks: int, layout: dict[str, int], options: dict[str, Any], sizes: dict[str, int]
) -> None:
    jobs = {
        dtype: Job(model, ranks, layout, {**of_dtype, **options}, sizes)
        for dtype, of_dtype in (("float32", OPTIONS), ("bfloat16", BFLOAT16))
    }
    cpu = run_on_cpu(jobs)
    assert_as_exact_as_the_cpu(jobs["bfloat16"].run(timeout=600), cpu["bfloat16"], cpu["float32"])


def test_a_record_of_an_npu_is_replayed_there_bit_for_bit_and_on_the_cpu(tmp_path: Path) -> None:
    short = {**BFLOAT16, **FULL, "training.steps": 2}
    recording = Job("deepseek_v32_dsa", options={**short, "replay.record": str(tmp_path)}).run()
    replay = Job("deepseek_v32_dsa", options={**short, "replay.replay": str(tmp_path)})
    replaying = replay.run()
    assert replaying.losses == recording.losses and replaying.norms == recording.norms
    assert all(torch.equal(replaying.weights[name], weight) for name, weight in recording.weights.items())
    for kind in ("experts", "keys"):
        assert replaying.metrics[f"replay/flipped_{kind}"] == [0, 0]
    on_cpu = run_on_cpu({"replay": replay})["replay"]
    assert_same_balance(on_cpu, recording)  # the experts are those of the NPU, whatever the CPU would select
    assert on_cpu.metrics["replay/keys"] == replaying.metrics["replay/keys"]
