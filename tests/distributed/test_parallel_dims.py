"""Two layouts for which TorchTitan builds no FSDP mesh."""

from __future__ import annotations

import pytest
from torchtitan.distributed import ParallelDims as TitanParallelDims

from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.planner import fake_ranks

ONE = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1}


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
