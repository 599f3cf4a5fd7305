"""A training job of one rank in a process of its own, as a launcher would start it."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "torchtitan_npu" / "train_configs"
ONE_RANK = ["--parallelism.data_parallel_shard_degree", "1", "--parallelism.expert_parallel_degree", "1"]


def environment(**more: str) -> dict[str, str]:
    launcher = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **launcher, "PYTHONPATH": paths, **more}
