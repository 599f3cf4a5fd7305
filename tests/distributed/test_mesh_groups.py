"""On an NPU, EP has a process group of its own; tests/planner/test_estimate.py has the groups of many layouts."""

from __future__ import annotations

import logging

import pytest
from torchtitan.distributed import ParallelDims as TitanParallelDims

from torchtitan_npu import platform
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.planner import fake_ranks

LAYOUT = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "pp": 1, "ep": 2, "etp": 1, "world_size": 2}


def test_experts_do_not_share_fsdp_s_group() -> None:
    """If TorchTitan's groups differ too, the workaround can be deleted."""
    for dims, separate in ((TitanParallelDims(**LAYOUT), False), (ParallelDims(**LAYOUT), True)):
        with fake_ranks(2), platform.job_for("npu"):
            ep, fsdp = (dims.get_mesh(name).get_group().group_name for name in ("ep", "fsdp"))
        assert (ep != fsdp) == separate


def test_a_buffer_without_a_communicator_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    dims = ParallelDims(**LAYOUT)
    dims.hccl_buffers = {"ep": 64, "tp": 32, "efsdp": 32}
    with caplog.at_level(logging.INFO), fake_ranks(2), platform.job_for("npu"):
        dims.build_mesh()
    line = "comm.hccl_buffers has no effect for tp, efsdp: this layout has one rank there"
    assert [r.message for r in caplog.records if "hccl_buffers" in r.message] == [line]
