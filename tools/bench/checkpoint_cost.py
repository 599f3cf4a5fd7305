"""Measure what the checksums of a checkpoint cost: DCP's writer against this package's, in the current folder.

python -m tools.bench.checkpoint_cost [--gib 1] [--repeats 30]

The speed of a disk changes from save to save. The cost is therefore the median over rounds, of a save with checksums
against the save without them in the same round.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

from torchtitan_npu import platform

platform.prepare()

from torchtitan_npu.components.checkpoint.folder import FileRecord, Manifest  # noqa: E402
from torchtitan_npu.components.checkpoint.storage import (  # noqa: E402
    CheckpointWriter,
    ChecksumFileSystem,
    Publication,
)
from torchtitan_npu.components.checkpoint.writer_lock import WriterLock  # noqa: E402


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


class WithoutChecksums(ChecksumFileSystem):
    """Write the same files, but record neither sizes nor checksums."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with FileSystem.create_stream(self, path, mode) as stream:
            yield stream
        self.records[Path(path).name] = FileRecord(0, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "torch.distributed is disabled")
    folder = Path("checkpoint_cost")
    state = {f"layers.{i}": torch.randn(int(args.gib * 2**24)) for i in range(16)}
    lock = WriterLock(folder)
    lock.acquire()
    publication = Publication("bench", {}, lock)

    def check() -> None:
        manifest = Manifest.read(folder / "step-1")
        manifest.check_files(folder / "step-1", list(manifest.files))

    def save(checksums: bool) -> None:
        writer = CheckpointWriter(folder / "step-1", publication)
        writer.fs = ChecksumFileSystem() if checksums else WithoutChecksums()
        dcp.save(state, storage_writer=writer)

    saves: dict[str, Callable[[], object]] = {
        "DCP's save": lambda: dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "step-1")),
        "without checksums": lambda: save(False),
        "with checksums": lambda: save(True),
    }
    times: dict[str, list[float]] = {name: [] for name in (*saves, "check on load")}
    try:
        order = random.Random(0)  # a save may be faster or slower after another one
        for _ in range(args.repeats):
            for name in order.sample(list(saves), 3):
                times[name].append(seconds(saves[name]))
                if name == "with checksums":
                    times["check on load"].append(seconds(check))
                shutil.rmtree(folder / "step-1")
    finally:
        shutil.rmtree(folder)
    for name, measured in times.items():
        print(f"{name:17} median {statistics.median(measured):.3f} s, fastest {min(measured):.3f} s")
    for name in ("without checksums", "DCP's save"):
        ratios = [ours / other for ours, other in zip(times["with checksums"], times[name], strict=True)]
        print(
            f"with checksums against {name}: {100 * (statistics.median(ratios) - 1):+.1f} % (median of {args.repeats})"
        )


if __name__ == "__main__":
    main()
