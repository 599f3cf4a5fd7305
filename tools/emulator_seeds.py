"""Run small programs in many seeded orders of the emulator, and compare their results bit by bit with the usual order.

    python tools/emulator_seeds.py [--seeds 200] [--programs fsdp_prefetch,key_exchange]

needs the environment of the emulator's tests (``. tools/contract_env.sh``). A seed delays and reorders what no event
orders, so a result that differs shows a missing synchronization. The programs named "planted" miss one on purpose.
Prints a table; exit code 1 if another program differs, or a planted fault is never found.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torchtitan_npu import platform  # noqa: E402

platform.prepare()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402

from tests._helpers.deepseek_v32_training import CONVERTERS  # noqa: E402
from tests._helpers.multirank import RankError, run_on_ranks  # noqa: E402
from tests._helpers.training import train_until  # noqa: E402
from tests.emulator import stream_programs  # noqa: E402
from tests.emulator.training_jobs import Job, started  # noqa: E402
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapAdamW  # noqa: E402
from torchtitan_npu.emulator.seeds import set_seed  # noqa: E402

RANK_OFFSET = 10_000
"""Rank r draws its orders from seed + r * RANK_OFFSET, so that ranks are delayed at different places."""
SMALL = {"training.seq_len": 16, "training.global_batch_size": 2, "training.local_batch_size": 1}
Run = Callable[[], list[Tensor]]


@contextmanager
def training_step(job: Job) -> Iterator[Run]:
    """Yield a function that runs one training step, always from the same weights, states and batch."""
    with started(job) as (trainer, record):
        batches = trainer.batch_generator(trainer.dataloader)
        batch = [next(batches) for _ in range(trainer.gradient_accumulation_steps)]
        train_until(trainer, 1)
        entries = [entry for part in trainer.model_parts for entry in part.state_dict().values()]
        entries += [
            value for optimizer in trainer.optimizers for state in optimizer.state.values() for value in state.values()
        ]
        tensors = [entry.to_local() if isinstance(entry, DTensor) else entry for entry in entries]
        saved = [tensor.detach().clone() for tensor in tensors]
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        rates = [group["lr"] for group in groups]

        def run() -> list[Tensor]:
            with torch.no_grad():
                for tensor, value in zip(tensors, saved, strict=True):
                    tensor.copy_(value)
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            trainer.metrics_processor.data_loading_times.append(0.0)  # it would divide by their number
            trainer.train_step(iter([(dict(inputs), labels) for inputs, labels in batch]))
            return [torch.tensor([record.losses[-1], record.norms[-1]], dtype=torch.float64), *tensors]

        yield run


def fsdp_prefetch() -> Any:
    """FSDP gathers the next layer while one computes, and reduces gradients on another stream."""
    return training_step(Job("llama3", 2, {"shard": 2}, SMALL))


def key_exchange() -> Any:
    """Context-parallel ranks gather the keys of sparse attention while they compute their queries."""
    options = {"model.converters": CONVERTERS, "training.mixed_precision_param": "bfloat16"}
    return training_step(Job("deepseek_v32_dsa", 2, {"cp": 2}, {**SMALL, **options}))


def expert_exchange() -> Any:
    """Expert-parallel ranks read token counts on the host, and exchange tokens."""
    converters = ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"]
    return training_step(Job("deepseek_v3", 2, {"ep": 2}, {**SMALL, "model.converters": converters}))


@contextmanager
def swap_optimizer() -> Iterator[Run]:
    """Optimizer states travel between host and device on three streams."""
    generator = torch.Generator().manual_seed(3)
    weights, *gradients = ([torch.randn(300, 700, generator=generator) for _ in range(6)] for _ in range(3))

    def run() -> list[Tensor]:
        parameters = [torch.nn.Parameter(weight.to("npu")) for weight in weights]
        optimizer = SwapAdamW(parameters, lr=1e-2, slice_mib=1, foreach=False)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = gradient.to("npu") * 2
            optimizer.step()
        return list(parameters)

    yield run


@contextmanager
def copies() -> Iterator[Run]:
    """Batches are copied to the device on a second stream, and results back, without blocking."""
    host = [torch.full((4096,), float(i)).pin_memory() for i in range(8)]

    def run() -> list[Tensor]:
        npu = torch.get_device_module("npu")
        main, side = npu.current_stream(), npu.Stream()
        results, done = [], []
        for batch in host:
            with npu.stream(side):
                on_device = batch.to("npu", non_blocking=True)
            main.wait_stream(side)
            on_device.record_stream(main)
            squares = on_device * on_device + 1
            results.append(torch.empty(4096, pin_memory=True))
            results[-1].copy_(squares, non_blocking=True)
            done.append(main.record_event())
        for event in done:
            event.synchronize()
        return results

    yield run


class Program(NamedTuple):
    ranks: int
    start: Callable[[], Any]


PROGRAMS = {
    "fsdp_prefetch": Program(2, fsdp_prefetch),
    "key_exchange": Program(2, key_exchange),
    "expert_exchange": Program(2, expert_exchange),
    "swap_optimizer": Program(1, swap_optimizer),
    "copies": Program(1, copies),
}


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digests(name: str, seeds: int) -> list[str]:
    """Return the digest of the results on this rank, under each seed; without seeds that of the usual order."""
    rank = int(os.environ["RANK"])
    with PROGRAMS[name].start() as run:
        if not seeds:
            return [digest(run())]
        found = []
        for seed in range(1, seeds + 1):
            set_seed(seed + rank * RANK_OFFSET)
            found.append(digest(run()))
            if rank == 0 and (seed % 10 == 0 or seed == seeds):
                print(f"{name}: {seed} of {seeds} seeds", file=sys.stderr, flush=True)
        return found


def planted(name: str, seeds: int) -> int:
    """Return in how many seeds a program without a necessary synchronization computes a wrong number."""
    (program,) = (program for program in stream_programs.PROGRAMS if program.__name__ == name)
    return stream_programs.count_wrong(program, False, seeds)


class Result(NamedTuple):
    digests: list[list[str]]
    """By rank and seed; empty if the program failed."""
    seconds: float


def run_programs(names: list[str], seeds: int) -> dict[str, Result]:
    """Run programs in this process's order, seeded or not."""
    found = {}
    for name in names:
        started_at, ranks = time.monotonic(), PROGRAMS[name].ranks
        try:
            results = run_on_ranks(ranks, digests, name, seeds, process_group=False, timeout=60 + 30 * seeds)
        except RankError as error:
            print(f"{name}: {error}", file=sys.stderr)
            results = []
        found[name] = Result(results, time.monotonic() - started_at)
    return found


def in_emulator(seeds: int, names: list[str]) -> Any:
    """Run this file on the emulator, seeded or not, and return what it found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        seeded = ["--seed", "1"] if seeds else []
        command = [sys.executable, "-m", "torchtitan_npu.cli.main", "emulate", *seeded, "--", sys.executable, __file__]
        command += ["--seeds", str(seeds), "--programs", ",".join(names), "--out", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def count_different(seeded: list[list[str]], usual: list[list[str]], seeds: int) -> int | None:
    """Return in how many seeds the result of a rank differs; ``None`` if a run failed."""
    if not seeded or not usual:
        return None
    return sum(any(run[seed] != rank[0] for run, rank in zip(seeded, usual, strict=True)) for seed in range(seeds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--programs", default=",".join(PROGRAMS), help="comma-separated")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # the file of a process on the emulator
    args = parser.parse_args()
    names = args.programs.split(",")
    if args.out:
        faults = [program.__name__ for program in stream_programs.PROGRAMS] if args.seeds else []
        missed = {name: run_on_ranks(1, planted, name, args.seeds, process_group=False)[0] for name in faults}
        args.out.write_text(json.dumps([run_programs(names, args.seeds), missed]))
        return 0
    (usual, _), (seeded, missed) = in_emulator(0, names), in_emulator(args.seeds, names)
    print("| program | ranks | seeds | results that differ | seconds |\n|---|---|---|---|---|")
    good = all(missed.values())
    for name in names:
        (results, seconds), (expected, _) = seeded[name], usual[name]
        different = count_different(results, expected, args.seeds)
        good &= different == 0
        shown = "failed" if different is None else different
        print(f"| {name} | {PROGRAMS[name].ranks} | {args.seeds} | {shown} | {seconds:.0f} |")
    for name, count in missed.items():
        print(f"| {name}, planted | 1 | {args.seeds} | {count} | |")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
