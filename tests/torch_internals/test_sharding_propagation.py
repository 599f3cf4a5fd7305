"""DTensor caches sharding propagation, and the cache can be counted and cleared."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchtitan_npu.planner import fake_ranks
from torchtitan_npu.torch_internals.sharding_propagation import clear_sharding_cache, uncached_propagations


def test_propagations_are_cached_until_cleared() -> None:
    with fake_ranks(2):
        x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        clear_sharding_cache()
        before = uncached_propagations()
        x.sigmoid()
        first = uncached_propagations()
        x.sigmoid()
        assert before < first == uncached_propagations()
        clear_sharding_cache()
        assert uncached_propagations() == 0
