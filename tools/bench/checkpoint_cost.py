"""Measure what the checksums of a checkpoint cost: DCP's writer against this package's, on the same file system.

python -m tools.bench.checkpoint_cost [--gib 1] [--folder .] [--repeats 5]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from torchtitan_npu import platform

platform.prepare()

from torchtitan_npu.components.checkpoint.manifest import Manifest, new_checksum  # noqa: E402
from torchtitan_npu.components.checkpoint.storage import CheckpointWriter, Publication  # noqa: E402
from torchtitan_npu.components.checkpoint.writer_lock import WriterLock  # noqa: E402


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def checksums(state: dict[str, torch.Tensor]) -> list[str]:
    """Compute what a save computes besides writing."""
    return [new_checksum(tensor.numpy().data).hexdigest() for tensor in state.values()]


def check_files(checkpoint: Path) -> None:
    manifest = Manifest.read(checkpoint)
    manifest.check_files(checkpoint, list(manifest.files))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("."), help="file system to measure")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    folder = args.folder / "checkpoint_cost"
    state = {f"layers.{i}": torch.randn(int(args.gib * 2**24)) for i in range(16)}
    lock = WriterLock(folder)
    lock.acquire()
    publication = Publication("bench", {}, lock)
    plain, ours, alone, check = [], [], [], []
    try:
        for _ in range(args.repeats):  # in turn: the speed of a disk changes
            plain.append(seconds(lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp"))))
            shutil.rmtree(folder / "dcp")
            ours.append(
                seconds(lambda: dcp.save(state, storage_writer=CheckpointWriter(folder / "step-1", publication)))
            )
            alone.append(seconds(lambda: checksums(state)))
            check.append(seconds(lambda: check_files(folder / "step-1")))
            shutil.rmtree(folder / "step-1")
    finally:
        shutil.rmtree(folder)
    rows = {"DCP's save": plain, "with manifest": ours, "checksums alone": alone, "check on load": check}
    for name, times in rows.items():
        print(f"{name:15} median {statistics.median(times):.3f} s, fastest {min(times):.3f} s for {args.gib} GiB")
    print(f"the checksums alone: {100 * min(alone) / min(plain):.1f} % of DCP's save; ", end="")
    print(f"with the manifest a save takes {100 * (min(ours) / min(plain) - 1):+.1f} % (fastest times)")


if __name__ == "__main__":
    main()
