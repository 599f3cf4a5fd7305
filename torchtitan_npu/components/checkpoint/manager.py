"""Workaround: TorchTitan's checkpoints are neither published at once nor checked.

Here is its CheckpointManager with atomic saves, checked loads and one writer per folder. Faults of TorchTitan 0.2.2
(components/checkpoint.py):

- Saving into an existing ``step-N`` overwrites its files one by one; a kill leaves a mixture that loads.
- ``keep_latest_k`` deletes by step, counts half-written folders and every name that contains ``step-N``.
- A checkpoint of the model only, the default last save, cannot be resumed, and hides the full state before it.
- A changed learning rate or optimizer setting is replaced with the checkpoint's, without a word.
- Ranks wait for the slowest with ``comm.train_timeout_seconds``: one rank that writes for longer ends the job.
- An empty checkpoint folder turns ``initial_load_path`` off.
- An export to Hugging Face has no config and no tokenizer, and leaves a second copy of the weights in ``sharded``.

Delete it when TorchTitan publishes checkpoints with a rename and checks them on load.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import uuid
from concurrent.futures import wait
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim.lr_scheduler import LambdaLR
from torchtitan.components.checkpoint import (
    LR_SCHEDULER,
    MODEL,
    TRAIN_STATE,
    AsyncMode,
    consolidate_safetensors_files_on_every_rank,
)
from torchtitan.components.checkpoint import CheckpointManager as TitanCheckpointManager
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from torchtitan_npu.components.checkpoint.folder import (
    Manifest,
    SavedCheckpoint,
    recover,
    rename_for_deletion,
    saved_checkpoints,
    stale_checkpoints,
)
from torchtitan_npu.components.checkpoint.hugging_face_files import write_model_files
from torchtitan_npu.components.checkpoint.loading import (
    damage_of,
    file_records,
    is_first_rank,
    load_state,
    manifest_or_damage,
    on_first_rank,
    save_error,
    sources_before,
)
from torchtitan_npu.components.checkpoint.source import CheckpointSource, find_source
from torchtitan_npu.components.checkpoint.storage import CheckpointWriter, Publication
from torchtitan_npu.components.checkpoint.writer_lock import WriterLock
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.dist_utils import new_file_group
from torchtitan_npu.errors import UsageError
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.models.hugging_face_config import hugging_face_config

COMPARED_SECTIONS = ("optimizer", "lr_scheduler", "training")
"""Sections whose changes since the checkpoint are logged when a job resumes."""
WAIT_AFTER_ERROR_S = 5.0
"""A job that fails waits this long for an asynchronous save."""


class CheckpointManager(TitanCheckpointManager):
    """TorchTitan's CheckpointManager with atomic saves, checked loads, one writer per folder, and settings compared."""

    lock: WriterLock | None = None
    last_save_model_only: bool
    last_save_in_hf: bool
    interval: int

    def __init__(self, *args: Any, job_config: JobConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.job_config = job_config
        settings = {
            f"{section}.{key}": value
            for section in COMPARED_SECTIONS
            for key, value in asdict(getattr(job_config, section)).items()
        }
        self.settings = json.loads(json.dumps(settings))  # as a manifest has them
        self.run = uuid.uuid4().hex
        """A job that resumes continues the run of its checkpoint."""
        self.loaded: Path | None = None
        """The checkpoint of this folder that the job has loaded."""
        self.sequence_at_start = 0.0
        """Position of the newest checkpoint when the job started: it has written the later ones."""
        self.group: dist.ProcessGroup | None = None
        """For work on files, on which ranks wait for each other."""
        if self.enable and dist.is_initialized():
            self.group = new_file_group()
            if hasattr(self, "pg"):  # of asynchronous saves, with the default time-out of half an hour
                self.pg = new_file_group()
        if not self.enable or self.load_only:
            return
        folder, lock = Path(self.folder), WriterLock(Path(self.folder))

        def take_folder() -> tuple[str, str]:
            if job_config.checkpoint.create_seed_checkpoint and saved_checkpoints(folder):
                raise UsageError(
                    f"checkpoint.create_seed_checkpoint: {folder} has checkpoints already: set another job.dump_folder"
                )
            note = lock.acquire()
            recover(folder)
            return note, lock.token

        self.lock = lock  # released by close(), also if this fails
        note, lock.token = on_first_rank(take_folder, self.group)
        if note:
            log_on_first_rank(note, logging.WARNING)

    def close(self) -> None:
        """Wait for the last asynchronous save, and release the folder. After an error, wait a few seconds only."""
        lock, self.lock = self.lock, None
        if lock:
            still_writes = False
            try:
                if not isinstance(sys.exception(), Exception):
                    self._async_wait()
                elif self.save_future:  # its other ranks may have ended
                    still_writes = bool(wait([self.save_future], WAIT_AFTER_ERROR_S).not_done)
            finally:
                if is_first_rank() and not still_writes:  # else the lock is stale when this process ends
                    lock.release()
        super().close()

    # saving

    def _async_wait(self) -> None:
        try:
            super()._async_wait()
        except CheckpointException as error:
            self.save_future = None
            raise save_error(self.folder, error) from error

    def save(self, curr_step: int, last_step: bool = False) -> None:
        super().save(curr_step, last_step)
        if last_step and self._should_save(curr_step, last_step):
            self._purge_stale_checkpoints()  # TorchTitan purges only after the saves before the last

    def save_before_stop(self, step: int) -> str | None:
        """Save ``step`` unless that has been done, wait for it, and return its folder; ``None`` if saving is off."""
        if not self.enable or self.load_only:
            return None
        if not self._should_save(step):
            interval, self.interval = self.interval, 1
            try:
                self.save(step)
            finally:
                self.interval = interval
        self._async_wait()
        return self._create_checkpoint_id(step)

    def _save_last_step(self, curr_step: int) -> None:
        options = self.last_save_model_only, self.last_save_in_hf
        if 0 < curr_step < self.job_config.training.steps:  # stopped early: the job must be able to continue
            self.last_save_model_only = self.last_save_in_hf = False
        super()._save_last_step(curr_step)
        self.last_save_model_only, self.last_save_in_hf = options

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save as TorchTitan does, in a folder beside ``checkpoint_id`` that gets this name when it is complete."""
        assert self.lock is not None
        checkpoint, publication = Path(checkpoint_id), Publication(self.run, self.settings, self.lock)
        try:
            if not to_hf and async_mode != AsyncMode.DISABLED:
                return self._save_asynchronously(state_dict, CheckpointWriter(checkpoint, publication), async_mode)
            if to_hf:
                self._export(state_dict, checkpoint, publication)
            else:
                writer = CheckpointWriter(checkpoint, publication)
                dcp.save(state_dict, storage_writer=writer, process_group=self.group)
        except CheckpointException as error:
            raise save_error(checkpoint_id, error) from error
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def _save_asynchronously(self, state_dict: dict[str, Any], writer: CheckpointWriter, mode: AsyncMode) -> Any:
        options: dict[str, Any] = {"storage_writer": writer, "process_group": self.pg}
        if mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            options |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS, "async_stager": self.stager}
            return dcp.async_save(state_dict, **options)
        stager = DefaultStager(StagingOptions(False, False, False, False))  # that of DCP if no writer is passed
        future: Any = dcp.async_save(state_dict, async_stager=stager, **options)
        future.add_done_callback(lambda _: stager.close())
        return future

    def _export(self, state_dict: dict[str, Any], checkpoint: Path, publication: Publication) -> None:
        """Write files of Hugging Face, which ranks join by the model's index if it has one, and publish them.

        TorchTitan does this in the default group, whose time-out is that of the training's collectives.
        """
        assert self.sd_adapter is not None
        folder = publication.folder_of(checkpoint)
        exported = self.sd_adapter.to_hf(state_dict)
        index = self.sd_adapter.fqn_to_index_mapping
        sharded = str(folder / "sharded" if index else folder)
        writer = HuggingFaceStorageWriter(
            path=sharded, save_distributed=True, fqn_to_index_mapping=index or None, enable_consolidation=not index
        )
        dcp.save(exported, storage_writer=writer, process_group=self.group)
        if index:
            consolidate_safetensors_files_on_every_rank(
                input_dir=sharded,
                output_dir=str(folder),
                fqn_to_index_mapping=index,
                num_threads=5,
                process_group=self.group,
            )
        if note := on_first_rank(lambda: self._complete_export(folder), self.group):
            log_on_first_rank(note, logging.WARNING)
        files = file_records(folder, self.group)
        on_first_rank(lambda: publication.publish(checkpoint, files, full=False), self.group)

    def _complete_export(self, folder: Path) -> str:
        """Add what transformers needs to the export in ``folder``. Return what is missing, or an empty string."""
        shutil.rmtree(folder / "sharded")  # each rank's part of the weights, from which the files were written
        job, config, problems = self.job_config, None, []
        args = getattr(self.states[MODEL].model[0], "model_args", None)
        try:
            config = hugging_face_config(job.model.name, args)
        except UsageError as error:
            problems.append(f"the export has no config.json: {error}")
        try:
            write_model_files(
                folder, config, Path(job.model.hf_assets_path), TORCH_DTYPE_MAP[job.checkpoint.export_dtype]
            )
        except UsageError as error:  # the weights of a finished job must not depend on these files
            problems.append(f"the export has no config.json and no tokenizer: {error}")
        return "; ".join(problems)

    def _purge_stale_checkpoints(self) -> None:
        if self.keep_latest_k <= 0 or not (lock := self.lock):
            return

        def rename_and_queue() -> None:
            lock.check_held()
            for checkpoint in stale_checkpoints(Path(self.folder), self.run, self.keep_latest_k):
                self.purge_queue.put(str(rename_for_deletion(checkpoint, lock.token)))

        on_first_rank(rename_and_queue, self.group)

    def keep_before(self, step: int) -> Path | None:
        """Keep the newest checkpoint that leads to ``step``, which is not finite, and return it. None if there is none.

        Collective: waits for an asynchronous save. A job that saves nothing marks nothing.
        """
        if not self.enable:
            return None
        if self.lock:
            self._async_wait()

        def keep_newest() -> Path | None:
            # after a rollback, the folder may have newer checkpoints that do not lead to this step
            leading = [
                c
                for c in saved_checkpoints(Path(self.folder))
                if c.step < step and (c.is_full or c.step == 0)
                if c.path == self.loaded or (c.sequence > self.sequence_at_start and c.manifest)
            ]
            if leading and self.lock:
                leading[-1].keep(f"The last checkpoint before step {step}, whose loss or gradient norm is not finite.")
            return leading[-1].path if leading else None

        return on_first_rank(keep_newest, self.group)

    # loading

    @torch.no_grad()
    def load(self, step: int = -1) -> bool:
        """Load the checkpoint of ``step``, the newest one for -1, or the initial weights. Return False if none."""
        if not self.enable:
            return False
        job, folder = self.job_config, Path(self.folder)
        saved = on_first_rank(lambda: saved_checkpoints(folder), self.group)
        self.sequence_at_start = saved[-1].sequence if saved else 0.0
        assets = getattr(job.model, "hf_assets_path", "")
        source = on_first_rank(
            lambda: find_source(job.checkpoint, saved, folder, job.training.steps, step, assets), self.group
        )
        if source is None:
            return False
        if source.note:
            log_on_first_rank(source.note, logging.WARNING)
        if source.is_finished:
            assert source.saved is not None
            self.states[TRAIN_STATE].load_state_dict({"step": source.saved.step, "ntokens_seen": 0})
            return True
        source = self._intact_source(source, saved)
        logger.info(f"Loading the checkpoint from {source.path}.")
        # the job's options of each parameter group of each optimizer
        configured = [
            [{key: value for key, value in group.items() if key != "params"} for group in s.optimizer.param_groups]
            for s in self.states[LR_SCHEDULER].schedulers
        ]
        self.dcp_load(
            self._states_to_load(source.model_only),
            checkpoint_id=str(source.path),
            from_hf=source.in_hugging_face_format,
            from_quantized=self.initial_load_in_hf_quantized,
        )
        self._apply_optimizer_settings(configured)
        self.loaded = source.saved.path if source.saved else None
        if source.saved and source.saved.manifest:
            self.run = source.saved.manifest.run
            self._log_changes(source.saved.manifest)
        elif source.saved:
            log_on_first_rank(
                f"{source.path} has no manifest.json: only the sizes of its files were checked", logging.WARNING
            )
        elif not source.model_only:  # a new run that continues the state of another one
            manifest, _ = on_first_rank(lambda: manifest_or_damage(source.path), self.group)
            if manifest:
                self._log_changes(manifest)
        GarbageCollection.collect("GC collection for checkpoint loading.")
        return True

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        adapter = self.sd_adapter if from_hf else None
        state = load_state(state_dict, checkpoint_id, adapter, from_quantized, self.group)
        self.states[MODEL].load_state_dict(state)

    def _intact_source(self, source: CheckpointSource, saved: list[SavedCheckpoint]) -> CheckpointSource:
        """Return ``source`` if its files are as they were written, or the checkpoint to fall back to."""
        problem = damage_of(source.path, self.group)
        if problem is None:
            return source
        damaged = source.saved
        if damaged is None:
            raise UsageError(problem)
        usable = on_first_rank(lambda: sources_before(damaged, saved), self.group)
        fallback = next((s for s in usable if damage_of(s.path, self.group) is None), None)
        intact = fallback.saved if fallback else None
        if fallback is None or intact is None:
            raise UsageError(f"{problem}; no intact checkpoint was written before it")
        if not self.job_config.checkpoint.fallback:
            raise UsageError(
                f"{problem}; the newest intact checkpoint before it is {intact.name}: checkpoint.fallback = true, or "
                f"checkpoint.load_step = {intact.step}, continues from there"
            )
        log_on_first_rank(
            f"{problem}; checkpoint.fallback: the job continues from {intact.name}, and the steps after it are lost",
            logging.ERROR,
        )
        return fallback

    def _apply_optimizer_settings(self, configured: list[list[dict[str, Any]]]) -> None:
        """Give each optimizer the job's options again. Loading has replaced them with those of the checkpoint."""
        for scheduler, groups in zip(self.states[LR_SCHEDULER].schedulers, configured, strict=True):
            base_lrs = [group["initial_lr"] for group in groups]
            if not isinstance(scheduler, LambdaLR):
                if scheduler.base_lrs != base_lrs:
                    raise UsageError(
                        f"optimizer.lr is {base_lrs[0]}, {scheduler.base_lrs[0]} in the checkpoint: the schedule "
                        f"{type(scheduler).__name__} cannot continue with another one"
                    )
                # some, such as OneCycleLR, also set the momentum of each step
                of_schedule = {"lr", "betas", "momentum"} if getattr(scheduler, "cycle_momentum", False) else {"lr"}
                for group, options in zip(scheduler.optimizer.param_groups, groups, strict=True):
                    group.update({key: value for key, value in options.items() if key not in of_schedule})
                continue
            factors = [factor(scheduler.last_epoch) for factor in scheduler.lr_lambdas]
            lrs = [lr * factor for lr, factor in zip(base_lrs, factors, strict=True)]
            for group, options, lr in zip(scheduler.optimizer.param_groups, groups, lrs, strict=True):
                group.update(options | {"lr": lr})
            scheduler.load_state_dict(scheduler.state_dict() | {"base_lrs": base_lrs, "_last_lr": lrs})

    def _log_changes(self, manifest: Manifest) -> None:
        for key, value in self.settings.items():
            before = manifest.settings.get(key, value)
            if before != value:
                log_on_first_rank(
                    f"{key} was {before} in step-{manifest.step} and is {value} from here on", logging.WARNING
                )
