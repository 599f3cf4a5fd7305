"""Checkpoints survive kills, damage and a changed configuration, or the error says what to do."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from tests._helpers.killed_saves import kill_ranks, kill_saves
from tests._helpers.multirank import run_on_ranks
from tests._helpers.small_jobs import SmallJob
from torchtitan_npu.components.checkpoint import manager as checkpoint_manager
from torchtitan_npu.components.checkpoint import writer_lock
from torchtitan_npu.components.checkpoint.folder import DamagedCheckpoint, Manifest, file_record
from torchtitan_npu.components.checkpoint.loading import on_first_rank
from torchtitan_npu.components.checkpoint.restricted_pickle import load_metadata
from torchtitan_npu.components.checkpoint.source import stored_shapes
from torchtitan_npu.components.checkpoint.storage import LARGE, ChecksumFileSystem, PlainDataPlanner
from torchtitan_npu.components.checkpoint.writer_lock import Holder, WriterLock
from torchtitan_npu.errors import UsageError, file_error

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 10 steps, stopped after step 6, with a checkpoint of every second step."""
    folder = tmp_path_factory.mktemp("six_steps")
    SmallJob(folder, checkpoint__interval=2).train(stop=6)
    return folder


@pytest.fixture
def job_folder(six_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(six_steps, tmp_path / "job"))


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoint").iterdir()}


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Let writes fail beyond ``size`` bytes of a file, as on a disk that fills after the file was created."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# atomic saves


def run_in_a_process(target: Any, *args: Any) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests._helpers.multirank_preload"])
    process = context.Process(target=target, args=args)
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0


def test_a_killed_save_leaves_every_checkpoint_complete_or_absent(tmp_path: Path) -> None:
    run_in_a_process(kill_saves, tmp_path)


@pytest.mark.parametrize("in_hugging_face_format", [False, True], ids=["checkpoint", "export"])
def test_a_killed_rank_of_two_leaves_every_checkpoint_complete_or_absent(
    in_hugging_face_format: bool, tmp_path: Path
) -> None:
    run_in_a_process(kill_ranks, tmp_path, in_hugging_face_format)


def test_only_folders_of_earlier_jobs_are_removed(job_folder: Path) -> None:
    checkpoints = job_folder / "checkpoint"
    for name in (".incomplete-5", ".deleted-7-old", f".incomplete-8-{'0a' * 16}", f".deleted-2-{'0a' * 16}"):
        shutil.copytree(checkpoints / "step-2", checkpoints / name)
        (checkpoints / name / "manifest.json").unlink()
    SmallJob(job_folder).checkpointer.close()
    assert names(job_folder) == {".incomplete-5", ".deleted-7-old", "step-2", "step-4", "step-6"}


def resume_without_the_default_group(folder: Path) -> int:
    """Save and resume where a collective of the default group waits for nobody and moves nothing."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group("fake", store=store, rank=int(os.environ["RANK"]), world_size=2)
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, dist.get_rank())
    assert gathered == 2 * [dist.get_rank()]
    SmallJob(folder, checkpoint__async_mode="async").train(stop=1)
    return SmallJob(folder, checkpoint__load_only=True).resume().step


def test_ranks_wait_for_work_on_files_in_groups_of_their_own(tmp_path: Path) -> None:
    """The default group has the time-out ``comm.train_timeout_seconds``, which files may exceed."""
    assert run_on_ranks(2, resume_without_the_default_group, tmp_path, process_group=False, new_processes=True) == [
        1,
        1,
    ]


def test_a_checkpoint_without_the_count_of_skipped_steps_is_loaded(job_folder: Path) -> None:
    """TorchTitan's have none."""
    job = SmallJob(job_folder)
    job.state_dict = lambda: {"step": 0, "ntokens_seen": 0, "nonfinite_steps": 0}  # type: ignore[method-assign]
    assert job.resume().step == 6


def test_a_resumed_job_continues_exactly(job_folder: Path, tmp_path: Path) -> None:
    resumed = SmallJob(job_folder, checkpoint__interval=2).resume()
    assert resumed.step == 6
    straight = SmallJob(tmp_path / "straight", checkpoint__enable=False)
    assert resumed.train().values() == straight.train().values()


class ThreadStager(DefaultStager):
    """Stage in a thread as for ``async_with_pinned_mem``, in memory that is not pinned: that needs CUDA."""

    def __init__(self) -> None:
        super().__init__(StagingOptions(False, True, False, False))
        self.pool = ThreadPoolExecutor(1)

    def stage(self, state_dict: Any, **kwargs: Any) -> Any:
        return self.pool.submit(super().stage, state_dict, **kwargs)


@pytest.mark.slow
def test_a_save_in_another_process_is_resumed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    options = {"checkpoint__interval": 2, "checkpoint__async_mode": "async_with_pinned_mem"}
    job = SmallJob(tmp_path, **options)
    job.checkpointer.stager = ThreadStager()
    job.train(stop=6)
    resumed = SmallJob(tmp_path, checkpoint__interval=2).resume()
    assert resumed.step == 6
    straight = SmallJob(tmp_path / "straight", checkpoint__enable=False)
    assert resumed.train().values() == straight.train().values()
    dist.destroy_process_group()


@pytest.mark.parametrize("files", [None, {"model.weight": 1, "model.bias": 2}], ids=["one file", "two files"])
def test_an_export_in_hugging_face_format_is_published_with_its_checksums(files: Any, tmp_path: Path) -> None:
    job = SmallJob(tmp_path, training__steps=2, checkpoint__last_save_in_hf=True)
    job.checkpointer.sd_adapter.fqn_to_index_mapping = files
    job.train()
    export = tmp_path / "checkpoint" / "step-2"
    manifest = Manifest.read(export)
    weights = [name for name in manifest.files if name.startswith("model-") and "shard" not in name]
    assert len(weights) == (2 if files else 1)
    manifest.check_files(export, list(manifest.files))
    assert names(tmp_path) == {"step-1", "step-2"}
    assert SmallJob(tmp_path, training__steps=3).resume().step == 1  # the export has no optimizer


def test_a_job_stopped_early_saves_its_full_state(tmp_path: Path) -> None:
    job = SmallJob(tmp_path, checkpoint__interval=100)
    job.step = 4
    job.checkpointer.save(4, last_step=True)
    job.checkpointer.close()
    assert SmallJob(tmp_path).resume().step == 4


def save_on_a_full_disk(folder: Path, mode: str) -> str:
    """Return the error of a save whose files may have 512 bytes only."""
    job = SmallJob(folder, checkpoint__async_mode=mode)
    with files_of_at_most(512), pytest.raises(UsageError) as error:
        job.train(stop=1)
    job.checkpointer.close()
    return str(error.value)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_full_disk_is_one_line_on_every_rank(mode: str, tmp_path: Path) -> None:
    first, second = run_on_ranks(2, save_on_a_full_disk, tmp_path, mode)
    assert first == second and "\n" not in first
    assert "cannot be written: File too large" in first


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    """Small writes are added in the thread that writes, large ones in another."""
    files, path = ChecksumFileSystem(), tmp_path / "f"
    with files.create_stream(path, "wb") as file:
        torch.save([torch.arange(LARGE // 8 + count) for count in (-1, 0, 1, 3 * LARGE)], file)
    assert files.records == {"f": file_record(path)}


def test_a_disk_that_fills_within_a_tensor_is_the_error_of_the_file_system(tmp_path: Path) -> None:
    """torch.save raises an error about positions in its zip format then."""
    stream = ChecksumFileSystem().create_stream(tmp_path / "f", "wb")
    with pytest.raises(OSError, match="File too large"), stream as file, files_of_at_most(1 << 16):
        torch.save(torch.zeros(LARGE, dtype=torch.uint8), file)


def test_a_failed_job_does_not_wait_for_a_save_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_manager, "WAIT_AFTER_ERROR_S", 0.1)
    job = SmallJob(tmp_path)
    job.checkpointer.save_future = Future()  # another rank has ended
    with pytest.raises(KeyError):
        try:
            raise KeyError
        finally:
            job.checkpointer.close()
    assert names(tmp_path) == {"lock"}  # of a process that may still write


# purging


def test_only_the_oldest_written_checkpoints_of_this_run_are_deleted(job_folder: Path) -> None:
    checkpoints = job_folder / "checkpoint"
    shutil.copytree(checkpoints / "step-2", checkpoints / "best-step-2-keep")
    (checkpoints / "step-3").mkdir()  # not complete
    shutil.copytree(checkpoints / "step-2", checkpoints / "step-1")
    manifest = Manifest.read(checkpoints / "step-1")
    Manifest(**{**vars(manifest), "run": "another", "step": 1}).write(checkpoints / "step-1")
    # a rollback to step 2, with 4 and 6 present
    SmallJob(job_folder, checkpoint__keep_latest_k=2).resume(step=2).train(stop=4)
    assert names(job_folder) == {"best-step-2-keep", "step-1", "step-3", "step-4"}
    resumed = SmallJob(job_folder).resume()
    assert resumed.step == 4  # the last one written
    resumed.checkpointer.close()


def test_the_newest_full_state_is_kept(tmp_path: Path) -> None:
    options = {"checkpoint__keep_latest_k": 2, "training__steps": 3}
    SmallJob(tmp_path, **options).train()
    assert names(tmp_path) == {"step-2", "step-3"}
    SmallJob(tmp_path, **options | {"training__steps": 4}).resume().train()
    assert names(tmp_path) == {"step-3", "step-4"}


def test_the_checkpoint_before_a_step_that_is_not_finite_is_kept(tmp_path: Path) -> None:
    options = {"checkpoint__keep_latest_k": 2, "training__steps": 20}
    job = SmallJob(tmp_path, **options)
    assert job.checkpointer.keep_before(1) is None
    job.train(stop=4)
    job = SmallJob(tmp_path, **options).resume(step=3)  # a rollback: step 4 does not lead to the steps after it
    assert job.checkpointer.keep_before(6) == tmp_path / "checkpoint" / "step-3"
    job.train(stop=7)
    assert names(tmp_path) == {"step-3", "step-6", "step-7"}
    job = SmallJob(tmp_path, **options).resume()
    assert job.checkpointer.keep_before(8) == tmp_path / "checkpoint" / "step-7"
    job.train(stop=10)
    assert names(tmp_path) == {"step-3", "step-7", "step-9", "step-10"}
    rollback = SmallJob(tmp_path, **options).resume(step=3)
    token = rollback.checkpointer.lock.token  # type: ignore[union-attr]
    kept = Manifest.read(tmp_path / "checkpoint" / "step-7")
    rollback.train(stop=8)  # the second step 7 does not replace the first
    assert names(tmp_path) == {"step-3", f"step-7-kept-{token}", "step-7", "step-8"}
    assert Manifest.read(tmp_path / "checkpoint" / f"step-7-kept-{token}") == kept


def test_a_job_without_its_lock_deletes_nothing(tmp_path: Path) -> None:
    job = SmallJob(tmp_path, checkpoint__keep_latest_k=2, checkpoint__interval=3)
    for step in (3, 6):
        job.step = step
        job.checkpointer.save(step)
    job.checkpointer.keep_latest_k = 1
    leave_lock(tmp_path / "checkpoint", {})  # of another job
    with pytest.raises(UsageError, match=r"this job must not write to it"):
        job.checkpointer._purge_stale_checkpoints()
    job.checkpointer.close()
    assert names(tmp_path) == {"lock", "step-3", "step-6"}


# integrity


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        *(("__0_0.distcp", damage) for damage in ("flipped", "truncated", "missing")),
        *((".metadata", damage) for damage in ("flipped", "truncated", "missing")),
        *(("manifest.json", damage) for damage in ("flipped", "truncated")),
    ],
)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_offered(
    file: str, damage: str, job_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = job_folder / "checkpoint" / "step-6" / file
    if damage == "flipped":
        flip_a_bit(path)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    job = SmallJob(job_folder)
    with pytest.raises(UsageError, match=r"before it is step-4: checkpoint.fallback = true") as error:
        job.resume()
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    job.checkpointer.close()
    job = SmallJob(job_folder, checkpoint__fallback=True).resume()
    assert job.step == 4
    assert "continues from step-4, and the steps after it are lost" in caplog.text
    job.train(stop=6)
    assert SmallJob(job_folder).resume().step == 6  # written again


def test_a_checkpoint_without_a_manifest_is_loaded_with_a_warning(
    job_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = job_folder / "checkpoint" / "step-6"
    (path / "manifest.json").unlink()  # as TorchTitan writes it
    job = SmallJob(job_folder).resume()
    assert job.step == 6 and "step-6 has no manifest.json: only the sizes" in caplog.text
    job.checkpointer.close()
    (path / "__0_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"step-6/__0_0.distcp is truncated.*before it is step-4"):
        SmallJob(job_folder).resume()


def test_a_damaged_manifest_does_not_decide_the_order_silently(job_folder: Path) -> None:
    SmallJob(job_folder, checkpoint__interval=1).resume(step=2).train(stop=3)
    manifest = job_folder / "checkpoint" / "step-3" / "manifest.json"
    times = manifest.stat().st_atime_ns, manifest.stat().st_mtime_ns
    flip_a_bit(manifest)
    os.utime(manifest, ns=times)
    with pytest.raises(UsageError, match=r"step-3/manifest.json is damaged.*before it is step-2"):
        SmallJob(job_folder, checkpoint__load_only=True).resume()
    assert SmallJob(job_folder, checkpoint__load_only=True, checkpoint__fallback=True).resume().step == 2
    os.utime(manifest, ns=(0, 0))
    with pytest.raises(UsageError, match=r"step-3/manifest.json is damaged.*step-3 may be newer than step-6: set"):
        SmallJob(job_folder, checkpoint__load_only=True).resume()
    assert SmallJob(job_folder, checkpoint__load_only=True).resume(step=4).step == 4


def test_a_header_that_lacks_a_shape_is_damage(tmp_path: Path) -> None:
    header = json.dumps({"weight": {"dtype": "F32", "data_offsets": [0, 4]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(DamagedCheckpoint, match=r"model.safetensors is damaged: its header cannot be read"):
        stored_shapes(tmp_path)


def read_on_first_rank(path: Path) -> str:
    with pytest.raises(UsageError) as error:
        on_first_rank(path.read_bytes)
    return str(error.value)


def test_every_rank_reports_a_file_that_rank_0_cannot_read(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, read_on_first_rank, tmp_path / "absent")
    assert first == second and "absent" in first


def test_an_unexpected_error_keeps_its_type() -> None:
    with pytest.raises(KeyError):
        on_first_rank(lambda: {}["absent"])


def damage_on_two_ranks(folder: Path) -> tuple[str, int]:
    """Save asynchronously, damage the last file, and return the error and the step that the job falls back to."""
    SmallJob(folder, checkpoint__async_mode="async").train(stop=2)
    if dist.get_rank() == 0:
        flip_a_bit(max((folder / "checkpoint" / "step-2").glob("*.distcp")))
    job = SmallJob(folder)  # waits for rank 0
    with pytest.raises(UsageError) as error:
        job.resume()
    job.checkpointer.close()
    return str(error.value), SmallJob(folder, checkpoint__fallback=True).resume().step


def test_every_rank_reports_damage_that_one_has_read(tmp_path: Path) -> None:
    (first, step), second = run_on_ranks(2, damage_on_two_ranks, tmp_path)
    assert (first, step) == second
    assert step == 1 and "is damaged" in first


def test_without_an_intact_checkpoint_there_is_nothing_to_fall_back_to(job_folder: Path) -> None:
    for path in (job_folder / "checkpoint").glob("*/*.distcp"):
        flip_a_bit(path)
    with pytest.raises(UsageError, match=r"step-6.*no intact checkpoint was written before it"):
        SmallJob(job_folder, checkpoint__fallback=True).resume()


class Malicious:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_malicious_metadata_file_is_an_error_and_runs_nothing(job_folder: Path, tmp_path: Path) -> None:
    checkpoint = job_folder / "checkpoint" / "step-6"
    (checkpoint / "manifest.json").unlink()  # whoever can write the file can also write a manifest
    (checkpoint / ".metadata").write_bytes(pickle.dumps(Malicious(tmp_path / "ran")))
    with pytest.raises(UsageError, match=r"step-6/.metadata is not the metadata .* refers to posix.system"):
        SmallJob(job_folder).resume()
    assert not (tmp_path / "ran").exists()


class Python3112Pickler(pickle.Pickler):
    """Write a member of an enum as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_metadata_of_python_3_11_2_is_read() -> None:
    properties = TensorProperties(dtype=torch.float32)
    file = io.BytesIO()
    Python3112Pickler(file).dump(Metadata({"x": TensorStorageMetadata(properties, torch.Size([2]), [])}))
    file.seek(0)
    assert load_metadata(file).state_dict_metadata["x"].properties == properties


class ReadsAnAttribute:
    def __reduce__(self) -> Any:
        return getattr, (Metadata, "__init__")


def test_metadata_reads_no_attribute_but_members_of_enums() -> None:
    with pytest.raises(pickle.UnpicklingError, match="the attribute __init__ of something that is not an enum"):
        load_metadata(io.BytesIO(pickle.dumps(ReadsAnAttribute())))


@pytest.mark.parametrize("key", ["position", "dp_rank_0"])
def test_a_malicious_object_in_a_checkpoint_is_an_error_and_runs_nothing(key: str, tmp_path: Path) -> None:
    malicious = Malicious(tmp_path / "ran")
    job = SmallJob(tmp_path)
    # TorchTitan's loader keeps pickled bytes under dp_rank_N
    job.loader.state_dict = lambda: {key: malicious if key == "position" else pickle.dumps(malicious)}  # type: ignore
    job.train(stop=1)
    job = SmallJob(tmp_path)
    job.loader.state_dict = lambda: {key: 0}  # type: ignore[method-assign, return-value]
    with pytest.raises(UsageError, match=rf"dataloader.{key} of the checkpoint is not plain data"):
        job.resume()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 not a zip file", b"\x80\x02}q", b"\x80\x02K\x01K\x02\x86R."],
    ids=["empty", "not a zip file", "truncated pickle", "a call of a number"],
)
def test_a_damaged_object_in_a_checkpoint_is_one_line(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallJob(tmp_path).train(stop=1)
    load_bytes = PlainDataPlanner.load_bytes

    def load_damaged(planner: PlainDataPlanner, item: Any, value: Any) -> None:
        load_bytes(planner, item, io.BytesIO(content) if item.dest_index.fqn == "dataloader.position" else value)

    monkeypatch.setattr(PlainDataPlanner, "load_bytes", load_damaged)  # a file without a checksum, or a forged one
    with pytest.raises(UsageError, match=r"^dataloader.position of the checkpoint is not plain data[^\n]*: [^\n]+$"):
        SmallJob(tmp_path).resume()


def test_a_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(OSError, match="Input/output error") as error:
        file_record(Path("/proc/self/mem"))  # nothing is mapped at its beginning
    assert file_error(error.value) == "/proc/self/mem: Input/output error"


# extending and what is loaded


def test_a_finished_job_says_so_and_is_extended_from_its_last_full_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SmallJob(tmp_path, training__steps=5).train()
    again = SmallJob(tmp_path, training__steps=5).resume()
    assert again.step == 5 and "nothing is left to train" in caplog.text
    again.train()
    extended = SmallJob(tmp_path, training__steps=8).resume()
    assert extended.step == 4 and "continues from step-4, the last full state" in caplog.text
    assert extended.train().step == 8


def test_a_model_without_a_full_state_cannot_be_extended(tmp_path: Path) -> None:
    SmallJob(tmp_path, training__steps=5, checkpoint__interval=100).train()
    with pytest.raises(UsageError, match=r"step-5 has only the model.*initial_load_path = '.*step-5'"):
        SmallJob(tmp_path, training__steps=8).resume()


def test_a_full_last_save_is_extended_exactly(tmp_path: Path) -> None:
    options = {"lr_scheduler__total_steps": 8, "checkpoint__last_save_model_only": False}
    SmallJob(tmp_path, training__steps=5, **options).train()
    extended = SmallJob(tmp_path, training__steps=8, **options).resume()
    assert extended.step == 5
    straight = SmallJob(tmp_path / "straight", training__steps=8, checkpoint__enable=False, **options)
    assert extended.train().values() == straight.train().values()


def test_changed_optimizer_settings_take_effect(job_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = SmallJob(job_folder).resume()
    before.checkpointer.close()
    assert "from here on" not in caplog.text
    changed = SmallJob(job_folder, optimizer__lr=before.config.optimizer.lr / 4, optimizer__weight_decay=0.5).resume()
    group = changed.optimizers.optimizers[0].param_groups[0]
    assert group["lr"] == before.lr / 4 and group["weight_decay"] == 0.5
    assert changed.schedulers.schedulers[0].get_last_lr() == [before.lr / 4]
    assert "optimizer.weight_decay was 0.1 in step-6 and is 0.5 from here on" in caplog.text
    changed.schedulers.step()
    before.schedulers.step()
    assert changed.lr == before.lr / 4
    changed.checkpointer.close()


def test_a_changed_schedule_takes_effect(job_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = SmallJob(job_folder, training__steps=10, lr_scheduler__min_lr_factor=1.0).resume()
    assert job.lr == job.config.optimizer.lr  # no decay
    assert "lr_scheduler.min_lr_factor was 0.0 in step-6 and is 1.0 from here on" in caplog.text


@pytest.mark.parametrize("sets_momentum", [False, True])
def test_another_schedule_keeps_its_lr_and_the_other_settings_take_effect(sets_momentum: bool, tmp_path: Path) -> None:
    def job(**options: Any) -> SmallJob:
        job = SmallJob(tmp_path, **options)
        optimizer = job.optimizers.optimizers[0]
        if sets_momentum:
            schedule: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        else:
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        job.schedulers.schedulers[:] = [schedule]
        return job

    first = job().train(stop=3)
    changed = job(optimizer__weight_decay=0.5).resume()
    changed.checkpointer.close()
    before, after = (j.optimizers.optimizers[0].param_groups[0] for j in (first, changed))
    assert (before["weight_decay"], after["weight_decay"]) == (0.1, 0.5)
    assert (after["lr"], after["betas"]) == (before["lr"], before["betas"])


def test_a_seed_checkpoint_is_never_the_newest(job_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"create_seed_checkpoint: .* has checkpoints already"):
        SmallJob(job_folder, checkpoint__create_seed_checkpoint=True)
    seed = SmallJob(tmp_path / "seed", checkpoint__create_seed_checkpoint=True)
    seed.checkpointer.save(0, last_step=True)
    seed.checkpointer.close()
    assert Manifest.read(tmp_path / "seed" / "checkpoint" / "step-0").sequence == 0
    copy = shutil.copytree(tmp_path / "seed" / "checkpoint" / "step-0", job_folder / "checkpoint" / "step-0")
    Manifest(**{**vars(Manifest.read(copy)), "sequence": 9}).write(copy)
    assert SmallJob(job_folder, checkpoint__load_only=True).resume().step == 6


def test_initial_weights_are_loaded_although_the_folder_exists(six_steps: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    source = six_steps / "checkpoint" / "step-6"
    job = SmallJob(tmp_path, checkpoint__initial_load_path=str(source)).resume()
    other = SmallJob(tmp_path / "other", checkpoint__load_only=True)
    assert job.step == 0
    assert not torch.equal(job.model.weight, other.model.weight)


@pytest.mark.parametrize("newest_has_only_the_model", [False, True])
def test_keys_of_initial_weights_that_a_resumed_job_does_not_use_are_named(
    newest_has_only_the_model: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    SmallJob(tmp_path, training__steps=3 + 5 * (not newest_has_only_the_model)).train(stop=3)
    used = {"checkpoint__load_only": True, "training__steps": 8}
    SmallJob(tmp_path, **used).resume()
    assert "not used" not in caplog.text
    SmallJob(tmp_path, **used, checkpoint__initial_load_in_hf=True).resume()
    assert f"{tmp_path}/checkpoint has checkpoints: checkpoint.initial_load_in_hf is not used" in caplog.text
    SmallJob(tmp_path, **used, checkpoint__initial_load_in_hf=True, checkpoint__initial_load_path="x").resume()
    assert "checkpoint.initial_load_path and checkpoint.initial_load_in_hf are not used" in caplog.text
    assert ("has only the model" in caplog.text) == newest_has_only_the_model


def test_a_branch_with_the_full_state_needs_one(
    six_steps: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"checkpoint__initial_load_model_only": False, "training__steps": 8, "optimizer__weight_decay": 0.5}
    source = six_steps / "checkpoint" / "step-6"
    branch = SmallJob(tmp_path / "branch", checkpoint__initial_load_path=str(source), **options).resume()
    assert branch.step == branch.loader.position == 6
    assert "optimizer.weight_decay was 0.1 in step-6 and is 0.5 from here on" in caplog.text
    branch.train()
    only_model = str(tmp_path / "branch" / "checkpoint" / "step-8")
    with pytest.raises(UsageError, match=r"step-8 has only the model: set checkpoint.initial_load_model_only = true"):
        SmallJob(tmp_path / "other", checkpoint__initial_load_path=only_model, **options).resume()


def test_a_key_that_the_checkpoint_lacks_is_one_line(job_folder: Path) -> None:
    job = SmallJob(job_folder)
    job.loader.state_dict = lambda: {"other": 0}  # type: ignore[method-assign]
    with pytest.raises(
        UsageError, match=r"step-6 has no dataloader.other, .*exclude_from_loading = .\"dataloader\". starts"
    ):
        job.resume()


# one writer


def test_a_second_job_cannot_write_to_the_folder(tmp_path: Path) -> None:
    first = SmallJob(tmp_path)
    with pytest.raises(UsageError, match=rf"is in use by process {os.getpid()} on .*, since 20"):
        SmallJob(tmp_path)
    SmallJob(tmp_path, checkpoint__load_only=True)  # reads only
    first.checkpointer.close()
    SmallJob(tmp_path).checkpointer.close()
    assert names(tmp_path) == set()


@pytest.mark.parametrize("change", [{"pid": 2**22 + 1}, {"ticks": "1"}], ids=["process ended", "number used again"])
def test_the_lock_of_a_dead_process_is_removed(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leave_lock(tmp_path / "checkpoint", change)
    SmallJob(tmp_path).checkpointer.close()
    assert "removed the lock of process" in caplog.text


def test_a_lock_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    error = rf"^{tmp_path}/checkpoint/lock cannot be written: File too large$"
    with files_of_at_most(8), pytest.raises(UsageError, match=error):
        WriterLock(tmp_path / "checkpoint").acquire()
    assert not names(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=rf"^{tmp_path}/file cannot be written: File exists$"):
        WriterLock(tmp_path / "file").acquire()


def test_the_lock_of_another_machine_is_stale_if_its_time_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_lock, "STALE_S", 20.0)  # the heartbeat may be late on a busy machine
    monkeypatch.setattr(writer_lock, "HEARTBEAT_S", 0.05)
    holder = WriterLock(tmp_path)
    holder.acquire()
    leave_lock(tmp_path, {"kernel": "another", "host": "there", "token": holder.token})
    with pytest.raises(UsageError, match=r"on there"):
        WriterLock(tmp_path).acquire()
    leave_lock(tmp_path, {"kernel": "another", "host": "there"})
    time.sleep(0.5)  # the heartbeat ends
    monkeypatch.setattr(writer_lock, "STALE_S", 0.4)
    assert "removed the lock" in WriterLock(tmp_path).acquire()
    with pytest.raises(UsageError, match=r"this job must not write to it"):
        holder.check_held()


def leave_lock(folder: Path, change: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "new").write_text(json.dumps({**vars(Holder.this_process()), **change}))
    (folder / "new").rename(folder / "lock")


def test_the_heartbeat_outlives_a_lock_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_lock, "HEARTBEAT_S", 0.05)
    lock = WriterLock(tmp_path)
    lock.acquire()
    lock.path.rename(tmp_path / "gone")
    time.sleep(0.5)
    os.utime(tmp_path / "gone", ns=(0, 0))
    (tmp_path / "gone").rename(lock.path)
    lock.check_held()
    deadline = time.monotonic() + 20
    while lock.path.stat().st_mtime_ns == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert lock.path.stat().st_mtime_ns > 0
    lock.release()


def test_a_lock_taken_while_a_stale_one_is_removed_is_put_back(tmp_path: Path) -> None:
    stale = Holder.this_process()
    leave_lock(tmp_path, {})
    taken = json.loads((tmp_path / "lock").read_text())
    lock = WriterLock(tmp_path)
    assert not lock._remove(stale, tmp_path / "aside")
    assert json.loads(lock.path.read_text()) == taken
    assert lock._remove(Holder(**taken), tmp_path / "aside")
    assert not lock._remove(Holder(**taken), tmp_path / "aside")  # another job was faster
    assert not list(tmp_path.iterdir())
