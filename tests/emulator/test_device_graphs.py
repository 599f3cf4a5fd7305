"""NPU graphs on the emulator: capture and replay by torch_npu, and jobs with ``npu.device_graphs``."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests._helpers import device_graph_training
from tests._helpers.device_graph_training import OPTIONS, converted
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.compile.device_graphs import DeviceGraphs
from torchtitan_npu.errors import UsageError


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


def test_another_thread_may_invalidate_captures_while_they_end() -> None:
    x, event, refused, is_done = torch.ones(4, device="npu"), torch.npu.Event(), [], threading.Event()

    def wait_for_device() -> None:
        while not is_done.is_set():
            for wait in (torch.npu.synchronize, event.query):
                try:
                    wait()
                except RuntimeError as error:
                    refused.append(str(error))

    def run() -> None:
        x.add(1)
        event.record()
        before = len(refused)
        while len(refused) == before and other.is_alive():
            time.sleep(0)

    other, failed = threading.Thread(target=wait_for_device), 0
    other.start()
    try:
        for _ in range(50):
            graph = torch.npu.NPUGraph()
            try:
                with torch.npu.graph(graph, capture_error_mode="global"):
                    run()
            except RuntimeError:
                failed += 1
    finally:
        is_done.set()
        other.join()
    assert failed == 50
    assert Captured(lambda: x + 1).output.shape == (4,)


def test_graphs_of_one_pool_reuse_memory() -> None:
    x, pool = torch.ones(1 << 20, device="npu"), torch.npu.graph_pool_handle()
    first = Captured(lambda: ((x + 1) * 2).sum(), pool)
    reserved = torch.npu.memory_reserved()
    second = Captured(lambda: ((x + 2) * 3).sum(), pool)
    assert torch.npu.memory_reserved() <= reserved
    for captured, expected in ((first, 4 << 20), (second, 9 << 20)):
        captured.graph.replay()
        assert captured.output.item() == expected


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4, bias=False)
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale + self.frozen


@pytest.fixture
def captured_block() -> Block:
    block, part = Block().npu(), torch.nn.Module()
    part.layers = torch.nn.ModuleDict({"0": block})
    graphs = DeviceGraphs([part], "npu")
    block(batch(2)).sum().backward()
    graphs.capture_once()
    return block


def batch(size: int) -> torch.Tensor:
    return torch.ones(size, 4, device="npu", requires_grad=True)


def test_replays_reserve_no_memory() -> None:
    x = torch.ones(1 << 18, 4, device="npu", requires_grad=True)  # 4 MiB, more than a segment of small blocks
    part = torch.nn.Module()
    part.layers = torch.nn.ModuleDict({"0": Block().npu()})
    graphs = DeviceGraphs([part], "npu")
    reserved = []
    for _ in range(6):
        part.layers["0"](x).sum().backward()
        x.grad = None
        graphs.capture_once()
        reserved.append(torch.npu.memory_reserved())
    assert reserved[0] >= x.nbytes and len(set(reserved[1:])) == 1


def test_a_captured_block_takes_one_shape(captured_block: Block) -> None:
    assert torch.equal(captured_block(batch(2)), captured_block.forward.forward(batch(2)))
    with pytest.raises(UsageError, match=r"layers\.0 was captured for .*\(2, 4\).* a later step has .*\(3, 4\)"):
        captured_block(batch(3))


@pytest.mark.parametrize("name", ["linear.weight", "frozen", "scale"])
def test_a_tensor_of_a_captured_block_must_stay(captured_block: Block, name: str) -> None:
    *module, attribute = name.split(".")
    owner = captured_block.get_submodule(".".join(module))
    if name == "scale":
        owner.scale = owner.scale.clone()
    else:
        tensor = getattr(owner, attribute)
        tensor.data = tensor.data.clone()
    with pytest.raises(RuntimeError, match=rf"{attribute} of layers\.0 has moved"):
        captured_block(batch(2))


@pytest.mark.parametrize(
    ("model", "options", "converts"),
    [
        ("llama3", "accumulated", False),
        ("deepseek_v3", "full", True),
        ("deepseek_v3", "one microbatch", True),
        pytest.param("deepseek_v32", "selective op", True, marks=pytest.mark.slow),
        pytest.param("llama3", "validated", True, marks=pytest.mark.slow),
        pytest.param("qwen3", "full", False, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "accumulated", True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "compiled", True, marks=pytest.mark.slow),
    ],
)
def test_jobs_train_bit_identically(model: str, options: str, converts: bool) -> None:
    job = OPTIONS[options] | (converted(model) if converts else {})
    (found,) = run_on_ranks(1, device_graph_training.differences, model, job, process_group=False, timeout=120)
    assert not found
