"""Compute the traffic of a training step under tensor and expert parallelism, in TorchTitan's MoE layout and in ours.

``python tools/moe_traffic_table.py`` runs truncated dry runs of one of 64 ranks on fake tensors of real sizes, and
writes the table of docs/explanation/moe-tensor-parallel.md. It takes some minutes.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path

from torchtitan_npu import platform, register

platform.prepare()

from torchtitan_npu.config.job_config import JobConfig  # noqa: E402
from torchtitan_npu.config.shipped_files import shipped  # noqa: E402
from torchtitan_npu.planner.dry_run_ranks import dry_run_truncated  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "explanation/moe-tensor-parallel.md"
START, END = "<!-- made by tools/moe_traffic_table.py -->\n", "<!-- end -->\n"
HEAD = f"| model | group | collective | TorchTitan's | GiB | ours | GiB |\n|{'---|' * 7}\n"

RANKS, TP, SEQUENCE = 64, 4, 4096
MODELS = {"deepseek_v3": "671B_sdpa", "deepseek_v32": "671B", "qwen3": "235B-A22B"}
GROUPS = {"tp": "TP", "ep": "EP", "fsdp": "FSDP"}
GIB = 2**30


def job(name: str, ours: bool) -> JobConfig:
    """Return a job with one sequence per data-parallel rank."""
    config = JobConfig()
    config.model.name, config.model.flavor = name, MODELS[name]
    config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
    config.training.dataset, config.training.seq_len = "tiny_corpus", SEQUENCE
    config.training.local_batch_size, config.training.global_batch_size = 1, RANKS // TP
    config.training.mixed_precision_param = "bfloat16"
    config.parallelism.data_parallel_shard_degree = RANKS // TP
    config.parallelism.tensor_parallel_degree, config.parallelism.expert_parallel_degree = TP, RANKS
    config.activation_checkpoint.mode = "none"
    config.npu.moe_sequence_parallel = ours
    return config


def rows(name: str) -> str:
    """Return a row for each type of collective over TP, and one for each group: calls and GiB sent by a rank."""
    layouts = [dry_run_truncated(job(name, ours), RANKS) for ours in (False, True)]
    lines = []
    for group, label in GROUPS.items():
        keys = sorted(key for key in layouts[0].calls | layouts[1].calls if key[0] == group)
        single = [[key] for key in keys] if group == "tp" else []  # the layouts differ only in TP
        for chosen in [*single, keys]:
            what = f"`{chosen[0][1]}`" if chosen is not keys else "**all**"
            cells = (
                f"{sum(run.calls.get(k, 0) for k in chosen)} | {sum(run.sent.get(k, 0) for k in chosen) / GIB:,.2f}"
                for run in layouts
            )
            lines.append(f"| {name} {MODELS[name].removesuffix('_sdpa')} | {label} | {what} | {' | '.join(cells)} |\n")
    return "".join(lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    register()
    logging.disable()
    warnings.simplefilter("ignore")
    before, _, rest = PAGE.read_text().partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + START + HEAD + "".join(map(rows, MODELS)) + END + after)


if __name__ == "__main__":
    main()
