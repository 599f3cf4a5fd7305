"""DCP's storage with atomic, checksummed writes and with reads that run no code from the checkpoint."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.serialization import get_crc32_options, set_crc32_options

from torchtitan_npu.components.checkpoint.folder import (
    FileRecord,
    Manifest,
    is_full_state,
    new_checksum,
    publish,
    saved_checkpoints,
    temporary_path,
)
from torchtitan_npu.components.checkpoint.restricted_pickle import DAMAGE, load_metadata, load_plain
from torchtitan_npu.components.checkpoint.writer_lock import WriterLock
from torchtitan_npu.errors import UsageError


@dataclass(frozen=True)
class Publication:
    """The fields of a manifest except its files, and the lock that the writer must hold."""

    run: str
    settings: dict[str, Any]
    lock: WriterLock

    def folder_of(self, checkpoint: Path) -> Path:
        """Return the folder in which ``checkpoint`` is written."""
        return temporary_path(checkpoint, "incomplete", self.lock.token)

    def publish(self, checkpoint: Path, files: dict[str, FileRecord], full: bool) -> None:
        """Write the manifest of the folder in which ``checkpoint`` was written, and give it its name."""
        self.lock.check_held()
        before = max((c.sequence for c in saved_checkpoints(checkpoint.parent)), default=0)
        step = int(checkpoint.name.removeprefix("step-"))
        sequence = int(before) + 1 if step else 0
        manifest = Manifest(step, self.run, sequence, full, self.settings, dict(sorted(files.items())))
        manifest.write(self.folder_of(checkpoint))
        publish(checkpoint, self.lock.token)


class CheckpointWriter(FileSystemWriter):
    """Write a folder beside ``checkpoint``. The coordinator publishes it under this name after every rank has written.

    DCP runs this protocol in the foreground, in a thread or in a process, so that asynchronous saves are atomic too.
    """

    def __init__(self, checkpoint: Path, publication: Publication) -> None:
        super().__init__(publication.folder_of(checkpoint))
        self.fs: ChecksumFileSystem = ChecksumFileSystem()
        self.checkpoint, self.publication = checkpoint, publication

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with without_zip_checksums():
            results = super().write_data(plan, planner).wait()
        # the records travel to the coordinator with DCP's results
        results += [WriteResult(MetadataIndex(name), r.size, r) for name, r in self.fs.records.items()]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        flat = [result for rank in results for result in rank]
        files = {r.index.fqn: r.storage_data for r in flat if isinstance(r.storage_data, FileRecord)}
        super().finish(metadata, [[r for r in flat if not isinstance(r.storage_data, FileRecord)]])
        files |= self.fs.records  # has .metadata now
        self.publication.publish(self.checkpoint, files, is_full_state(metadata.state_dict_metadata))


@contextmanager
def without_zip_checksums() -> Iterator[None]:
    """Let torch.save skip the CRC-32 of its zip format. It takes half of a save, and torch.load never checks it.

    Programs that do, such as ``unzip -t`` and Python's ``zipfile``, report an error for these files.
    """
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


LARGE = 1 << 18
"""Bytes of a write from which a thread computes its checksum. For fewer, the hand-over takes longer."""


@dataclass
class ChecksumFileSystem(FileSystem):
    """Compute the size and checksum of each file while it is written."""

    records: dict[str, FileRecord] = field(default_factory=dict)
    """By file name."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        try:
            with super().create_stream(path, mode) as stream:
                if "w" not in mode:
                    yield stream
                    return
                with ThreadPoolExecutor(max_workers=1) as thread:
                    with_checksum = ChecksumStream(stream, thread)
                    yield with_checksum
        except RuntimeError as error:  # after an error of the stream, such as a full disk, torch.save raises another
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        self.records[Path(path).name] = FileRecord(with_checksum.size, with_checksum.checksum.hexdigest())

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


class ChecksumStream:
    """A binary stream for writing. While it writes, a thread computes the checksum of the bytes. It cannot seek."""

    def __init__(self, stream: Any, thread: Executor) -> None:
        self.stream, self.thread, self.checksum, self.size = stream, thread, new_checksum(), 0
        self.flush, self.fileno, self.close = stream.flush, stream.fileno, stream.close

    def write(self, data: Any) -> int:
        if memoryview(data).nbytes < LARGE:
            self.checksum.update(data)
            written = self.stream.write(data)
        else:
            added = self.thread.submit(self.checksum.update, data)
            try:
                written = self.stream.write(data)
            finally:
                added.result()  # the memory may be freed after this call
        self.size += written
        return written

    def tell(self) -> int:
        return self.size


class CheckpointReader(FileSystemReader):
    """Read ``.metadata`` with a restricted unpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = load_metadata(file)
        except (OSError, pickle.UnpicklingError) as error:
            raise UsageError(f"{path} is not the metadata of a checkpoint: {error}") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:  # a path of the metadata must not lead out of the checkpoint
            name = self.storage_data[item.storage_index].relative_path
            if Path(name).name != name:
                raise UsageError(f"{self.path}/.metadata: the file {name!r} is not in the checkpoint's folder")
        return super().read_data(plan, planner)


OPTIONAL = {"train_state.nonfinite_steps"}
"""Entries that TorchTitan's checkpoints do not have. The value of the job stays."""


class PlainDataPlanner(DefaultLoadPlanner):
    """Load objects that are not tensors only if they are plain data. DCP's planner would unpickle anything."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        for name in OPTIONAL - metadata.state_dict_metadata.keys():
            self.state_dict.pop(name, None)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
            if name.startswith("dataloader.dp_rank_"):  # TorchTitan's loader unpickles it
                load_plain(loaded)
        except (pickle.UnpicklingError, *DAMAGE) as error:
            text = next(reversed(str(error).splitlines()), type(error).__name__)
            raise UsageError(f"{name} of the checkpoint is not plain data, and is not loaded: {text}") from error
        *containers, key = self.mappings[name]
        target: Any = self.original_state_dict
        for container in containers:
            target = target[container]
        target[key] = loaded
