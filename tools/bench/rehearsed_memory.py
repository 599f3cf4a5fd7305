#!/usr/bin/env python
"""The peak memory that tools/rehearse.py predicts, against what a GPU measures: the same job, one rank.

    python tools/bench/rehearsed_memory.py [--config X.toml] [--steps 3] [--json FILE] [--section.key value ...]

By default the cut of DeepSeek-V3.2 to 4 layers with 8 experts, in full width, 4096 tokens, on one GPU: 4.24e9
parameters, 63 GiB of weights, gradients and states. Each number comes from a process of its own: the real Trainer for
``--steps`` steps, the peak of ``torch.cuda.max_memory_allocated`` from the second on; and the rehearsal on fake CUDA
tensors. Exit code 1: they are more than 10 % apart.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from one_rank import CONFIGS, ONE_RANK, ROOT, environment
from record import need_gpu

TWO_BATCHES = ["--training.global_batch_size", "2"]  # the second finds the first one's gradients
ALLOWED = 0.1
GIB = 1 << 30


def measure(config_file: str, steps: int, options: list[str]) -> int:
    """Bytes that the real Trainer had allocated at the most, after its first step."""
    import torch

    import torchtitan_npu.train as entry
    from torchtitan_npu.config.parser import JobConfigManager

    with tempfile.TemporaryDirectory() as folder:
        config = JobConfigManager().parse_args(["--job.config_file", config_file, *options])
        config.job.dump_folder, config.checkpoint.enable = folder, False
        config.metrics.enable_tensorboard = False
        trainer = entry.Trainer(config)
        batches = trainer.batch_generator(trainer.dataloader)  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            trainer.step = step
            trainer.train_step(batches)
            torch.cuda.synchronize()
            print(f"step {step}: {torch.cuda.max_memory_allocated() / GIB:.2f} GiB", file=sys.stderr)
            if step == 1:
                torch.cuda.reset_peak_memory_stats()
        trainer.close()
    return torch.cuda.max_memory_allocated()


def in_a_process(command: list[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment()).stdout


def predict(config_file: str, options: list[str]) -> dict[str, object]:
    """The rehearsal's report of the rank."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rehearsal.json"
        command = [sys.executable, str(ROOT / "tools" / "rehearse.py"), "--config", config_file, "--home", "cuda"]
        print(in_a_process([*command, "--world-size", "1", "--device-memory", "1000GiB", "--json", str(out), *options]))
        return json.loads(out.read_text())["ranks"][0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(CONFIGS / "deepseek_v32_671b_4layers_4k.toml"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", action="store_true", help="only that, in this process")
    args, options = parser.parse_known_args()
    need_gpu()
    if args.measure:
        print(measure(args.config, args.steps, options))
        return 0
    options = [*ONE_RANK, *TWO_BATCHES, *options]
    predicted = predict(args.config, options)
    command = [sys.executable, __file__, "--measure", "--config", args.config, "--steps", str(args.steps), *options]
    measured = int(in_a_process(command).splitlines()[-1])
    peak = int(predicted["peak"])  # type: ignore[call-overload]
    print(f"predicted {peak / GIB:.2f} GiB, measured {measured / GIB:.2f} GiB: {peak / measured - 1:+.1%}")
    if args.json:
        args.json.write_text(json.dumps({"predicted": predicted, "measured": measured}, indent=1) + "\n")
    return 0 if abs(peak / measured - 1) <= ALLOWED else 1


if __name__ == "__main__":
    sys.exit(main())
