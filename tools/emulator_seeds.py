"""Run programs in many seeded orders of the emulator, and compare their results bit by bit with the usual order.

    python tools/emulator_seeds.py [--seeds 200] [--programs fsdp_prefetch,key_exchange]

needs the environment of the emulator's tests (``. tools/contract_env.sh``). A seed delays and reorders what no event
orders, so a result that differs shows a missing synchronization. The "planted" programs miss one on purpose.
Prints a table; exit code 1 if another program differs, or a planted fault is never found.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

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
from torchtitan_npu.emulator import set_seed  # noqa: E402

RANK_OFFSET = 10_000
"""Rank r draws its orders from seed + r * RANK_OFFSET, so that ranks are delayed at different tasks."""
SMALL = {"training.seq_len": 16, "training.global_batch_size": 2, "training.local_batch_size": 1}
DSA = {**SMALL, "model.converters": CONVERTERS, "training.mixed_precision_param": "bfloat16"}
EXPERTS = {**SMALL, "model.converters": ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"]}
JOBS = {
    # FSDP gathers the next layer while one computes, and reduces gradients on another stream
    "fsdp_prefetch": Job("llama3", 2, {"shard": 2}, SMALL),
    # context-parallel ranks gather the keys of sparse attention while they compute their queries
    "key_exchange": Job("deepseek_v32_dsa", 2, {"cp": 2}, DSA),
    # expert-parallel ranks read token counts on the host, and exchange tokens
    "expert_exchange": Job("deepseek_v3", 2, {"ep": 2}, EXPERTS),
}
"""Training jobs, of which one step runs again and again."""
PROGRAMS = {program.__name__: program for program in (*stream_programs.PROGRAMS, *stream_programs.CORRECT)}
PLANTED = {f"planted {program.__name__}": program for program in stream_programs.PROGRAMS}
"""The same without a necessary synchronization."""


@contextmanager
def training_step(job: Job) -> Iterator[Callable[[], list[Tensor]]]:
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


def digest(tensors: list[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def different_seeds(name: str, seeds: int) -> list[int]:
    """Return the seeds for which a job's step has another result on this rank than in the usual order."""
    rank, wrong = int(os.environ["RANK"]), []
    with training_step(JOBS[name]) as run:
        set_seed(0)
        expected = digest(run())
        for seed in range(1, seeds + 1):
            set_seed(seed + rank * RANK_OFFSET)
            if digest(run()) != expected:
                wrong.append(seed)
            if rank == 0 and (seed % 10 == 0 or seed == seeds):
                print(f"{name}: {seed} of {seeds} seeds", file=sys.stderr, flush=True)
    return wrong


def count_wrong(name: str, seeds: int) -> int | None:
    """Return in how many seeds the result of a rank is wrong; ``None`` if the run failed."""
    try:
        if name in JOBS:
            timeout = 60 + 30 * seeds
            ranks = run_on_ranks(JOBS[name].ranks, different_seeds, name, seeds, process_group=False, timeout=timeout)
            return len(set().union(*ranks))
        program, synchronized = (PLANTED[name], False) if name in PLANTED else (PROGRAMS[name], True)
        return stream_programs.count_wrong(program, synchronized, seeds)
    except RankError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--programs", default=",".join([*JOBS, *PROGRAMS, *PLANTED]), help="comma-separated")
    args = parser.parse_args()
    if "NPU_EMULATOR_SEED" not in os.environ:  # start again on the emulator
        command = [sys.executable, "-m", "torchtitan_npu.cli.main", "emulate", "--seed", "1", "--", sys.executable]
        os.execv(sys.executable, [*command, *sys.argv])
    good = True
    print("| program | ranks | seeds | results that differ | seconds |\n|---|---|---|---|---|")
    for name in args.programs.split(","):
        began, wrong = time.monotonic(), count_wrong(name, args.seeds)
        good &= bool(wrong) if name in PLANTED else wrong == 0
        shown, ranks = "failed" if wrong is None else wrong, JOBS[name].ranks if name in JOBS else 1
        print(f"| {name} | {ranks} | {args.seeds} | {shown} | {time.monotonic() - began:.0f} |", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
