"""The planner's memory: blocks that no operator of the step has made, and workspaces of NPU jobs only."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torchtitan_npu import platform
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.memory import Memory, innermost, keeps_workspaces

aten = torch.ops.aten
KIB = 1 << 10


def detach(memory: Memory, tensor: Tensor) -> None:
    memory.record(aten.detach.default, (tensor,), {}, tensor.detach())


def test_tensors_that_a_job_keeps_between_steps_are_counted() -> None:
    memory = Memory(torch.device("cpu"))
    memory.enter("forward")
    table = torch.empty(KIB)
    memory.record(aten.neg.default, (table,), {}, -table)
    assert (memory.total, memory.peak.total) == (4 * KIB, 8 * KIB)  # the result is freed, the table is not
    detach(memory, table)
    assert memory.total == 4 * KIB


def test_storages_that_fsdp_fills_by_a_copy_are_freed() -> None:
    """On one rank FSDP resizes a storage, an operator reads its device, a copy fills it, and FSDP empties it."""
    memory = Memory(torch.device("cpu"))
    memory.enter("forward")
    shard, gathered = torch.ones(KIB), torch.empty(KIB)
    for _ in range(2):
        detach(memory, gathered)
        memory.record(aten.copy_.default, (gathered, shard), {}, gathered.copy_(shard))
        assert memory.total == 8 * KIB
        gathered.untyped_storage().resize_(0)
        detach(memory, shard)
        assert memory.total == 4 * KIB
        gathered.untyped_storage().resize_(4 * KIB)


def test_only_jobs_on_an_npu_need_the_queue_s_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "3")
    assert keeps_workspaces()
    with platform.job_for("npu"), pytest.raises(UsageError, match="TASK_QUEUE_ENABLE=3: must be 0, 1 or 2"):
        keeps_workspaces()


@pytest.mark.parametrize(
    ("running", "name"),
    [
        # A module that returns its input is never seen to end.
        (["layers.3", "layers.3._checkpoint_wrapped_module.moe", "layers.4.attention.inputs"], "layers.3.moe"),
        (["layers.9", "layers.10"], "layers.10"),
        (["layers.9", "layers.10", "layers.9.moe"], "layers.9.moe"),
        (["norm"], "norm"),
        ([], ""),
    ],
)
def test_innermost_module_does_not_depend_on_the_order_of_a_set(running: list[str], name: str) -> None:
    assert innermost({"", *running}) == name
    assert innermost(set()) is None
