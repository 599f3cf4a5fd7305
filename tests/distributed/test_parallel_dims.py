"""Two layouts for which TorchTitan builds no FSDP mesh, and separate groups on an NPU.

tests/planner/test_estimate.py has the groups of many layouts.
"""

from __future__ import annotations

import logging

import pytest
from torchtitan.distributed import ParallelDims as TitanParallelDims

from torchtitan_npu import platform
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.planner import fake_ranks

ONE = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1}
TWO = ONE | {"dp_shard": 2, "ep": 2, "world_size": 2}


@pytest.mark.parametrize("layout", [{"tp": 2, "ep": 2}, {"dp_replicate": 2, "tp": 2}, {"dp_replicate": 2, "pp": 2}])
def test_an_fsdp_mesh_of_size_one(layout: dict[str, int]) -> None:
    """If TorchTitan has the mesh too, the workaround can be deleted."""
    ranks = 2 if "ep" in layout else 4
    dims = TitanParallelDims(**ONE | layout, world_size=ranks)
    with fake_ranks(ranks):
        with pytest.raises(ValueError, match="fsdp"):
            dims.get_mesh("fsdp")
        assert ParallelDims.from_titan(dims).get_mesh("fsdp").size() == 1
    assert not dims.fsdp_enabled
    assert ParallelDims.from_titan(dims).fsdp_enabled == ("dp_replicate" in layout)


def test_experts_do_not_share_fsdp_s_group() -> None:
    """If TorchTitan's groups differ too, the workaround can be deleted."""
    for dims, separate in ((TitanParallelDims(**TWO), False), (ParallelDims(**TWO), True)):
        with fake_ranks(2), platform.job_for("npu"):
            ep, fsdp = (dims.get_mesh(name).get_group().group_name for name in ("ep", "fsdp"))
        assert (ep != fsdp) == separate


def test_a_buffer_without_a_communicator_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    dims = ParallelDims(**TWO)
    dims.hccl_buffers = {"ep": 64, "tp": 32, "efsdp": 32}
    with caplog.at_level(logging.INFO), fake_ranks(2), platform.job_for("npu"):
        dims.build_mesh()
    line = "comm.hccl_buffers has no effect for tp, efsdp: this layout has one rank there"
    assert [r.message for r in caplog.records if "hccl_buffers" in r.message] == [line]
