"""NPU graphs on the emulator: capture and replay by torch_npu, and jobs with ``npu.device_graphs``."""

from __future__ import annotations

import pytest
import torch

from tests._helpers import device_graph_training
from tests._helpers.device_graph_training import OPTIONS, converted
from tests._helpers.multirank import run_on_ranks


class Captured:
    """``run`` captured on a stream of its own; ``output`` is what it returned."""

    def __init__(self, run, pool=None) -> None:  # type: ignore[no-untyped-def]
        self.graph = torch.npu.NPUGraph()
        with torch.npu.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self.output = run()


def test_a_replay_reads_what_its_inputs_hold_then() -> None:
    x, weight = torch.ones(8, device="npu"), torch.randn(8, 8, device="npu")
    captured = Captured(lambda: (x @ weight).relu() + 1)
    for value in (2.0, -3.0):
        x.fill_(value)
        captured.graph.replay()
        assert torch.equal(captured.output, (x @ weight).relu() + 1)


def test_nothing_is_computed_in_a_capture() -> None:
    x = torch.zeros(4, device="npu")
    graph = Captured(lambda: x.add_(1)).graph
    assert x.cpu().tolist() == [0] * 4
    for _ in range(3):
        graph.replay()
    assert x.cpu().tolist() == [3] * 4


def test_a_second_stream_joins_the_capture() -> None:
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()

    def run() -> torch.Tensor:
        main = torch.npu.current_stream()
        side.wait_stream(main)
        with torch.npu.stream(side):
            y = x * 2
        main.wait_stream(side)
        return y + 1

    captured = Captured(run)
    x.fill_(5)
    captured.graph.replay()
    assert captured.output.cpu().tolist() == [11] * 4
    with torch.npu.stream(side):  # no longer captured
        assert (x * 3).cpu().tolist() == [15] * 4


def test_waiting_for_the_device_invalidates_a_capture() -> None:
    x = torch.ones(4, device="npu")
    with pytest.raises(RuntimeError, match="507903") as failed:
        Captured(lambda: x.sum().item())
    assert "107027" in str(failed.value.__context__)
    assert Captured(lambda: x + 1).output.shape == (4,)  # the next capture works


def test_graphs_of_one_pool_reuse_memory() -> None:
    x, pool = torch.ones(1 << 20, device="npu"), torch.npu.graph_pool_handle()
    first = Captured(lambda: ((x + 1) * 2).sum(), pool)
    reserved = torch.npu.memory_reserved()
    second = Captured(lambda: ((x + 2) * 3).sum(), pool)
    assert torch.npu.memory_reserved() <= reserved
    for captured, expected in ((first, 4 << 20), (second, 9 << 20)):
        captured.graph.replay()
        assert captured.output.item() == expected


@pytest.mark.parametrize(
    ("model", "options", "converts"),
    [
        ("llama3", "accumulated", False),
        ("deepseek_v3", "full", True),
        ("deepseek_v3", "one microbatch", True),
        pytest.param("llama3", "one microbatch", True, marks=pytest.mark.slow),
        pytest.param("llama3", "validated", True, marks=pytest.mark.slow),
        pytest.param("llama3", "selective op", False, marks=pytest.mark.slow),
        pytest.param("llama3", "compiled", True, marks=pytest.mark.slow),
        pytest.param("qwen3", "full", False, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "accumulated", True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "compiled", True, marks=pytest.mark.slow),
    ],
)
def test_jobs_train_bit_identically(model: str, options: str, converts: bool) -> None:
    job = OPTIONS[options] | (converted(model) if converts else {})
    (found,) = run_on_ranks(1, device_graph_training.differences, model, job, process_group=False, timeout=120)
    assert not found
