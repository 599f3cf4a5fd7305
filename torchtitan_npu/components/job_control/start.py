"""Start the monitor of this rank with the store of torchrun."""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import HashStore, PrefixStore, TCPStore
from torchtitan.config.job_config import Comm

from torchtitan_npu.components.job_control.rank_monitor import Limits, RankMonitor
from torchtitan_npu.log import log_on_first_rank


def start_monitor(comm: Comm) -> RankMonitor | None:
    """Return the monitor of this rank, or ``None`` if there is no store of torchrun that outlives the ranks."""
    limits, variables = Limits.of(comm), os.environ
    if comm.mode != "default":  # a job without communication
        return None
    world_size = int(variables.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return RankMonitor(HashStore(), 0, 1, [], limits)
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        log_on_first_rank("Not started by torchrun: ranks are not watched, and signals end the job at once")
        return None
    timeout = timedelta(seconds=comm.init_timeout_seconds)
    address = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)
    attempt = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank, local = int(variables["RANK"]), int(variables["LOCAL_RANK"])
    local_ranks = range(rank - local, rank - local + int(variables["LOCAL_WORLD_SIZE"]))
    return RankMonitor(PrefixStore(f"torchtitan_npu/{attempt}", store), rank, world_size, local_ranks, limits)
