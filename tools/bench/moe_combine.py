#!/usr/bin/env python
"""Train DeepSeek-V3.2 with 4 layers on one GPU with both values of npu.moe_combine_dtype: losses, speed and memory.

    python tools/bench/moe_combine.py [--json FILE]

The runs have the same batches and, except for rounding, the same weights: in all but the first, one percent of the
initial weights differ by one ulp. The two variants take turns in one process, so that they share the GPU's clock. Their
losses are compared with those of TorchTitan's combine, which is float32: a process without npu_permute.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

from harness import GIB, Row, need_gpu, parser_of, printed, rank_environment, store
from models import BASIC, BFLOAT16, converters, perturb, train, trainer_of_layers

LAYERS = 4
UPSTREAM = "upstream"
RUNS = {"scores": 8, "rows": 8, UPSTREAM: 3}
"""Three runs of TorchTitan's combine tell how far two of them are apart."""
STEPS = 50
EVERY_STEP = ["--metrics.log_freq", "1"]


def measure(variants: list[str]) -> Iterator[Row]:
    """Train in this process with each variant in turn."""
    from torchtitan_npu.converters.permute import NpuMoE

    names = [name for name in ("npu_dsa", *BASIC) if variants != [UPSTREAM] or name != "npu_permute"]
    with trainer_of_layers(LAYERS, False, [*BFLOAT16, *EVERY_STEP, *converters(*names)]) as trainer:
        model = trainer.model_parts[0]
        batches = list(islice(trainer.dataloader, STEPS))
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors(model)}
        schedule = trainer.lr_schedulers.state_dict()
        rate = trainer.optimizers.optimizers[0].param_groups[0]["lr"]
        for run in range(RUNS[variants[0]]):
            for variant in variants:
                restart(trainer, state, schedule, rate)
                if run:
                    perturb(model, run)
                for module in model.modules():
                    if isinstance(module, NpuMoE):
                        module.combine_dtype = variant
                yield {"variant": variant, "run": run, **train(trainer, trainer.batch_generator(batches), STEPS)}


def tensors(model: Any) -> Iterator[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def restart(trainer: Any, state: dict[str, Any], schedule: dict[str, Any], rate: float) -> None:
    """Set weights, optimizer and learning rate to those of the start."""
    for name, tensor in tensors(trainer.model_parts[0]):
        tensor.detach().copy_(state[name])
    for optimizer in trainer.optimizers.optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["lr"] = rate  # a schedule's state does not have it
    trainer.optimizers.zero_grad()
    trainer.lr_schedulers.load_state_dict(schedule)


def in_a_process(*variants: str) -> Iterator[Row]:
    """Yield the rows of :func:`measure` as a new process prints them, and raise if it fails."""
    variables = rank_environment(PYTORCH_ALLOC_CONF="expandable_segments:True")
    command = [sys.executable, __file__, "--measure", *variants]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))
    if process.returncode:
        raise SystemExit(f"the runs of {', '.join(variants)} failed")


def line(row: Row) -> str:
    speed, memory = row["tokens_per_second"], row["memory"] / GIB
    return f"{row['variant']:8} {row['run']}  {speed:8.0f} tokens/s  {memory:6.2f} GiB  {row['losses'][-1]:.5f}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--measure", nargs="+", help="train these variants in this process")
    args = parser.parse_args()
    need_gpu()
    if args.measure:
        for row in measure(args.measure):
            print(json.dumps(row), flush=True)
    else:
        store(args.json, printed([in_a_process("scores", "rows"), in_a_process(UPSTREAM)], line))


if __name__ == "__main__":
    main()
