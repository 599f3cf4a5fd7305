#!/usr/bin/env python
"""Plan the memory of the shipped files and store it: python tools/planned_memory.py [FILE ...]

Dry-runs one rank of each pipeline stage that may need the most, for some minutes. Writes the results to
docs/benchmarks/planned_memory.json, to a line in the header of each file, and to a table of
docs/results/planning-671b.md. tests/test_train_configs.py compares these, and with --all it repeats the dry runs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import re
import tomllib
import warnings
from pathlib import Path
from typing import Any

STORED = Path(__file__).parents[1] / "docs" / "benchmarks/planned_memory.json"
STAGES: dict[str, tuple[int, ...]] = {
    "deepseek_v32_671b_4k": (0,),
    "deepseek_v32_671b_32k": (0, 1),
    "deepseek_v3_671b": (1, 7),
    "glm_moe_dsa_744b_4k_64": (0,),
    "glm_moe_dsa_744b_4k_128": (0,),
    "glm_moe_dsa_744b_32k_64": (0,),
    "glm_moe_dsa_744b_32k_128": (0,),
    "llama3_8b": (0,),
    "deepseek_v3_16b": (0,),
    "qwen3_30b_a3b": (0,),
    "qwen3_235b_a22b": (0,),
    "qwen3_vl_2b": (0,),
    "qwen3_vl_8b": (0,),
    "qwen3_vl_30b_a3b": (0,),
    "deepseek_v32_671b_4layers_4k": (0,),
    "deepseek_v32_671b_8layers_4k": (0,),
}
"""Pipeline stages by file. In deepseek_v3_671b, stages 1 to 6 have equal layers, and stage 1 keeps most microbatches.
Stage 0 has fewer expert parameters, and stage 7 the logits."""
PAGE = STORED.parents[1] / "results/planning-671b.md"
BEGIN, END = "<!-- planned: begin -->\n", "<!-- planned: end -->"
PLANNED = re.compile("^# Planned:.*$", re.MULTILINE)
GIB = 1 << 30
NUMBERS = ("peak", "workspace", "hccl_buffers", "needed")


def digest(file: Path) -> str:
    """Return a digest of the keys and values of a TOML file. Comments do not change it."""
    return hashlib.sha256(json.dumps(tomllib.loads(file.read_text()), sort_keys=True).encode()).hexdigest()[:16]


def plan(file: Path, stage: int) -> dict[str, Any]:
    """Return the bytes that the first rank of a pipeline stage needs, as a job for NPUs."""
    from torchtitan_npu import platform
    from torchtitan_npu.config.parser import JobConfigManager
    from torchtitan_npu.planner.dry_run_ranks import dry_run_truncated
    from torchtitan_npu.planner.layout import world_size_of
    from torchtitan_npu.preflight.job import check_job

    with platform.job_for("npu"):
        config = JobConfigManager().parse_args(["--job.config_file", str(file)])
        ranks, stages = world_size_of(config), config.parallelism.pipeline_parallel_degree
        check_job(config, ranks)
        training, size = config.training, config.parallelism.pipeline_parallel_microbatch_size
        # a stage keeps at most as many microbatches as the pipeline has stages: more of them only take time
        if stages > 1 and training.local_batch_size > (stages + 1) * size:
            replicas = training.global_batch_size // training.local_batch_size
            training.local_batch_size = (stages + 1) * size
            training.global_batch_size = replicas * training.local_batch_size
        run = dry_run_truncated(config, ranks, stage * ranks // stages)
    numbers = {"peak": run.peak, "workspace": run.kept_workspace, "hccl_buffers": run.hccl_buffers}
    return {"stage": stage, **numbers, "needed": run.needed, "where": run.where}


def header(stages: list[dict[str, Any]]) -> str:
    """Return the line in the header of a file, about the stage that needs the most."""
    row = max(stages, key=lambda row: row["needed"])
    _, workspace, hccl, needed = (f"{row[key] / GIB:.1f}" for key in NUMBERS)
    return (
        f"# Planned: {needed} GiB a device, with {workspace} for an operator's workspace and {hccl} for HCCL's buffers."
    )


def table(stored: dict[str, Any]) -> str:
    """Return the table of the docs."""
    lines = ["| file | stage | peak, GiB | workspace | HCCL | needed | peak in |", "|---|---|---|---|---|---|---|"]
    for name, planned in stored.items():
        for row in planned["stages"]:
            numbers = " | ".join(f"{row[key] / GIB:.2f}" for key in NUMBERS)
            lines.append(f"| `{name}` | {row['stage']} | {numbers} | {row['where']} |")
    return "\n".join(lines) + "\n"


def write(stored: dict[str, Any]) -> None:
    from torchtitan_npu.config.shipped_files import train_configs

    STORED.write_text(json.dumps(stored, indent=1) + "\n")
    for name, planned in stored.items():
        file = train_configs() / f"{name}.toml"
        file.write_text(PLANNED.sub(header(planned["stages"]), file.read_text()))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(stored) + "\n" + END + rest.partition(END)[2])


def main(names: list[str]) -> None:
    from torchtitan_npu import platform
    from torchtitan_npu.config.shipped_files import train_configs

    platform.prepare()
    logging.disable(logging.WARNING)  # TorchTitan logs the start of every dry run
    stored = json.loads(STORED.read_text()) if STORED.exists() else {}
    for name in names:
        file = train_configs() / f"{name}.toml"
        rows = []
        for stage in STAGES[name]:
            with warnings.catch_warnings(action="ignore"):
                rows.append(plan(file, stage))
            print(name, rows[-1], flush=True)
        stored[name] = {"digest": digest(file), "stages": rows}
        write(stored)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help=", ".join(STAGES))
    main(parser.parse_args().files or list(STAGES))
