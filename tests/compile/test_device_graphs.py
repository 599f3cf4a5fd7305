"""Blocks that are captured as device graphs train bit-identically, and what cannot be captured is refused.

Tests marked device run on a GPU; ``tests/emulator/test_device_graphs.py`` runs the same jobs on an emulated NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests._helpers import device_graph_training, layouts
from tests._helpers.device_graph_training import GRAPHS, OPTIONS, V32, WIDE, converted
from tests._helpers.layouts import add_flavor
from tests._helpers.multirank import RankError, run_on_ranks
from torchtitan_npu import platform
from torchtitan_npu.compile.device_graphs import Arguments, DeviceGraphs
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.rotary import RotaryTables
from torchtitan_npu.preflight.job import check_job

SHARED = "shared_indexer"
DETERMINISTIC = {"debug.deterministic": True, "debug.deterministic_warn_only": True}


@pytest.fixture
def _for_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with platform.job_for("cuda"):
        yield


def refusal(options: dict[str, Any], model: str = "llama3", ranks: int = 1) -> str:
    config = layouts.job_config(model, {}, {**options, **GRAPHS})
    with pytest.raises(UsageError) as refused:
        check_job(config, ranks)
    return str(refused.value)


@pytest.mark.usefixtures("_for_gpu")
@pytest.mark.parametrize(
    ("options", "ranks", "reason"),
    [
        ({"parallelism.tensor_parallel_degree": 2}, 2, "tensor parallel"),
        ({"parallelism.data_parallel_shard_degree": 2}, 2, "FSDP"),
        (
            {"parallelism.data_parallel_shard_degree": 1, "parallelism.data_parallel_replicate_degree": 2},
            2,
            "data-parallel replicas",
        ),
        ({"parallelism.pipeline_parallel_degree": 2}, 2, "pipeline parallel"),
        ({"activation_checkpoint.mode": "full"}, 1, "activation_checkpoint.preserve_rng_state"),
        ({"model.flavor": "debugmodel_flex_attn"}, 1, "flex attention"),
        ({"replay.record": "choices"}, 1, "[replay]"),
    ],
)
def test_a_job_that_cannot_be_captured_is_refused(options: dict[str, Any], ranks: int, reason: str) -> None:
    assert refusal(options, ranks=ranks).startswith(f"npu.device_graphs cannot be combined with {reason}")


@pytest.mark.usefixtures("_for_gpu")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dsa.document_mask": True}, "dsa.document_mask = true"),
        ({"mtp.layers": 1}, "mtp.layers = 1"),
        ({"model.flavor": SHARED}, f"model.flavor '{SHARED}': its layers pass selected keys"),
    ],
)
def test_layers_with_several_results_are_refused(options: dict[str, Any], reason: str) -> None:
    add_flavor(V32, SHARED, {"n_layers": 2, "index_topk_pattern": "FS"})
    assert refusal(options, V32).startswith(f"npu.device_graphs cannot be combined with {reason}")


def test_experts_of_titan_are_refused_on_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with platform.job_for("npu"):
        assert "needs npu_gmm in model.converters" in refusal({}, "deepseek_v3")


def test_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with platform.job_for("cpu"):
        assert refusal({}) == "npu.device_graphs needs an accelerator; this job runs on the CPU"


def test_arguments_are_taken_apart_and_put_together_again() -> None:
    x, angles, positions = torch.randn(2, 3, requires_grad=True), torch.randn(3), torch.arange(3)
    tables = RotaryTables(angles, replaced=positions)
    arguments = Arguments("layers.0", (x, None), {"positions": tables, "causal": True})
    assert [id(t) for t in arguments.activations] == [id(x)]
    assert [id(t) for t in arguments.others] == [id(angles), id(positions)]
    others = [angles + 1, positions + 1]
    static = arguments.with_tensors([x.detach()], others)
    assert static.args[1] is None and static.kwargs["causal"] is True
    assert static.kwargs["positions"].tables is others[0] and static.kwargs["positions"].replaced is others[1]
    assert static.kwargs["positions"].modes == tables.modes
    assert static.signature == arguments.signature != Arguments("layers.0", (x[:1], None), {}).signature


def test_an_argument_that_is_no_tensor_is_refused() -> None:
    with pytest.raises(UsageError, match=r"argument mask of layers\.1 is a dict"):
        Arguments("layers.1", (), {"mask": {}})


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def graphs_of(block: nn.Module) -> DeviceGraphs:
    part = nn.Module()
    part.layers = nn.ModuleDict({"0": block})
    return DeviceGraphs([part], "cpu")


def test_a_block_that_first_runs_after_the_capture_stays_without_graphs() -> None:
    block, x = Doubled(), torch.ones(2, requires_grad=True)
    graphs = graphs_of(block)
    graphs.captured = True
    assert block(x).tolist() == [2, 2] and not graphs.blocks
    graphs.captured = False
    assert block(x).tolist() == [2, 2] and len(graphs.blocks) == 1


def test_no_memory_in_a_capture_is_reported_as_such() -> None:
    """The end of the capture fails, too."""
    graphs = graphs_of(block := Doubled())
    block(torch.ones(2, requires_grad=True))
    for inside, reported in ((torch.OutOfMemoryError, torch.OutOfMemoryError), (RuntimeError, UsageError)):
        with pytest.raises(reported, match="first"), graphs.blocks[0].reasons():
            try:
                raise inside("first")
            finally:
                raise RuntimeError("the capture is invalid")


def differences(model: str, options: dict[str, Any]) -> list[str]:
    (found,) = run_on_ranks(1, device_graph_training.differences, model, options, process_group=False, timeout=120)
    return found


CONVERTED = {"llama3": "full", WIDE: "full", V32: "selective op"}


@pytest.mark.device
@pytest.mark.parametrize(
    ("model", "options"),
    [
        *(("llama3", options) for options in OPTIONS),
        *((model, f"{name}, converted") for model, ac in CONVERTED.items() for name in ("accumulated", "compiled", ac)),
    ],
)
def test_blocks_train_bit_identically(model: str, options: str) -> None:
    name, _, converters = options.partition(", ")
    assert not differences(model, {**OPTIONS[name], **(converted(model) if converters else {}), **DETERMINISTIC})


@pytest.mark.device
def test_titans_moe_blocks_are_captured() -> None:
    """Its scatter adds in an order that varies, so that two runs without graphs differ, too."""
    (record, replays), (plain, _) = (
        run_on_ranks(1, device_graph_training.train, WIDE, graphs, process_group=False, timeout=120)[0]
        for graphs in (GRAPHS, {})
    )
    assert set(replays) == {5}
    assert record.losses == pytest.approx(plain.losses, rel=1e-3)


@pytest.mark.device
def test_a_block_that_synchronizes_is_refused() -> None:
    """The kernel of grouped products takes no experts of 32 features; the reference reads the group sizes."""
    with pytest.raises(RankError) as failed:
        differences("deepseek_v3", converted("deepseek_v3"))
    message = str(failed.value)
    assert "npu.device_graphs: layers.1 cannot be captured" in message and "synchroniz" in message
    assert "tolist()" in message and "set npu.device_graphs to false" in message
