"""Measure how fast the user's data becomes batches: tokens per second by format and worker processes, and memory.

    python -m tools.bench.data_loading [--seconds 5]
    python -m tools.bench.data_loading --stream 64,1024,4096

The files have 16 MiB of the shipped texts and conversations, repeated. The second form reads jsonl files of growing
sizes, to show that memory does not grow with the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchtitan_npu import platform

platform.prepare()

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from datasets import Dataset  # noqa: E402
from torchtitan.components.tokenizer import HuggingFaceTokenizer  # noqa: E402

from torchtitan_npu.components.corpus import ASSETS  # noqa: E402
from torchtitan_npu.components.dataloader import build_text_dataloader  # noqa: E402
from torchtitan_npu.config.job_config import JobConfig  # noqa: E402

TOKENIZER = str(ASSETS / "tokenizer")
MIB = 16
"""Size of each file."""
WORKERS = (0, 1, 2)
"""Numbers of worker processes."""


def repeated(path: Path, size: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a file again and again, until they have ``size`` bytes."""
    for line in itertools.cycle(path.read_text().splitlines()):
        size -= len(line)
        if size < 0:
            return
        yield json.loads(line)


def write_files(folder: Path) -> dict[str, tuple[str, Path]]:
    """Write a file of each format, and return its dataset and path by name."""
    texts = [*repeated(ASSETS / "corpus/corpus.jsonl", MIB * 2**20)]
    chats = repeated(ASSETS / "chat/chat.jsonl", MIB * 2**20)
    (folder / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    (folder / "a.txt").write_text("\n\n".join(text["text"].replace("\n\n", "\n") for text in texts))
    pq.write_table(pa.Table.from_pylist(texts), folder / "a.parquet", row_group_size=1000)
    Dataset.from_list(texts).save_to_disk(folder / "dataset")
    (folder / "chat.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    names = {"jsonl": "a.jsonl", "txt, paragraphs": "a.txt", "parquet": "a.parquet", "dataset on disk": "dataset"}
    return {name: ("text", folder / file) for name, file in names.items()} | {"chat": ("chat", folder / "chat.jsonl")}


def write_large_file(path: Path, mib: int) -> Path:
    """Write a jsonl file of the shipped texts, without holding it in memory."""
    block = (ASSETS / "corpus/corpus.jsonl").read_bytes()
    with path.open("wb") as file:
        while file.tell() < mib * 2**20:
            file.write(block)
    return path


def measure(dataset: str, path: Path, workers: int, seconds: float) -> dict[str, float]:
    """Return tokens per second and per second of CPU time, and the memory that loading adds to this process."""
    config = JobConfig()
    config.model.hf_assets_path, config.data.txt_documents = TOKENIZER, "paragraph"
    config.training.dataset, config.training.dataset_path = dataset, str(path)
    config.training.seq_len, config.training.local_batch_size = 2048, 8
    config.training.dataloader.num_workers = workers
    if dataset == "chat":
        config.data.chat_template = str(ASSETS / "chat/template.jinja")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cpu = cpu_seconds()
    batches = iter(build_text_dataloader(1, 0, HuggingFaceTokenizer(TOKENIZER), config))
    next(batches)  # the first window is read, and workers are started
    start, tokens = time.perf_counter(), 0
    while (now := time.perf_counter()) < start + seconds:
        tokens += next(batches)[1].numel()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    del batches  # ends the workers, whose time counts then
    cpu = cpu_seconds() - cpu
    return {"tokens_per_s": tokens / (now - start), "tokens_per_cpu_s": tokens / cpu, "memory_mib": memory / 1024}


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def in_process(*args: Any) -> dict[str, float]:
    """Call :func:`measure` in a fork, so that the memory of one measurement does not hide that of the next."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, json.dumps(measure(*args)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        result = json.loads(pipe.read())
    os.waitpid(child, 0)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--stream", help="MiB of jsonl files to read instead, each without worker processes")
    args = parser.parse_args()

    def show(name: str, dataset: str, path: Path, workers: int) -> None:
        measured = in_process(dataset, path, workers, args.seconds)
        print(
            f"{name:16} {workers} workers: {measured['tokens_per_s']:9,.0f} tokens/s, "
            f"{measured['tokens_per_cpu_s']:9,.0f} per CPU second, {measured['memory_mib']:4.0f} MiB more",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        if args.stream:
            for mib in map(int, args.stream.split(",")):
                path = write_large_file(Path(folder) / "large.jsonl", mib)
                show(f"jsonl, {path.stat().st_size / 2**20:,.0f} MiB", "text", path, 0)
        else:
            for name, (dataset, path) in write_files(Path(folder)).items():
                for workers in WORKERS:
                    show(name, dataset, path, workers)


if __name__ == "__main__":
    main()
