"""The Trainer: TorchTitan's, with correct gradients on every layout and the options of this package.

Import it after :func:`torchtitan_npu.platform.prepare`. Importing it registers the converters and train specs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.distributed.utils import clip_grad_norm_, set_pg_timeouts
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module
from torchtitan.train import Trainer as TitanTrainer

import torchtitan_npu.converters
import torchtitan_npu.train_specs.adapt  # noqa: F401
from torchtitan_npu import platform
from torchtitan_npu.compile import passes as graph_passes
from torchtitan_npu.compile.compile_progress import log_compile_progress
from torchtitan_npu.compile.device_graphs import DeviceGraphs
from torchtitan_npu.components.checkpoint.manager import CheckpointManager
from torchtitan_npu.components.chunked_loss import ChunkedLossPerToken
from torchtitan_npu.components.job_control.heartbeat import PHASES, Progress
from torchtitan_npu.components.job_control.rank_monitor import RankMonitor, start_monitor
from torchtitan_npu.components.metrics import peak_flops
from torchtitan_npu.components.nonfinite.captured_step import without_waiting
from torchtitan_npu.components.nonfinite.checked_steps import CheckedSteps, NonfiniteStep, NonfiniteStop
from torchtitan_npu.components.profiling import profile_npu
from torchtitan_npu.components.replay.install import start_session
from torchtitan_npu.components.replay.replayer import Replayer
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.titan_sections import hccl_buffers
from torchtitan_npu.distributed.context_parallel import model_inputs, takes_attention_masks
from torchtitan_npu.distributed.hccl_groups import flight_recorder_variables, set_timeouts
from torchtitan_npu.distributed.matmul_sharding import use_matmul_sharding
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.errors import EXIT_FAILED, EXIT_NONFINITE, EXIT_STOPPED, EXIT_USAGE, UsageError
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.layers.documents import DOCUMENT_ENDS
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.titan_internals.hooks import (
    train_step_with,
    train_with,
    with_checkpoint_manager,
    with_peak_flops,
)
from torchtitan_npu.torch_internals.dynamo import BackendCompilerFailed
from torchtitan_npu.torch_internals.pipelining import stage_modules


class JobStopped(SystemExit):
    """The job stops after a complete step, because a signal requested it."""

    def __init__(self, message: str) -> None:
        super().__init__(EXIT_STOPPED)
        self.message = message


class Trainer(TitanTrainer):
    """TorchTitan's Trainer, whose gradients are those of the mean loss over all tokens on every layout."""

    def __init__(self, job_config: JobConfig) -> None:
        self.has_stepped = self.has_finished = False
        self.progress = Progress()
        init = with_peak_flops(TitanTrainer.__init__, peak_flops(job_config))
        with_checkpoint_manager(init, partial(CheckpointManager, job_config=job_config))(self, job_config)
        if isinstance(self.loss_fn, ChunkedLossPerToken):
            self.loss_fn.use_output(self.model_parts)
        self.auxiliary_losses = auxiliary_losses(self.model_parts)
        graphed_parts = self.model_parts if job_config.npu.device_graphs else []
        self.device_graphs = DeviceGraphs(graphed_parts, self.device.type)
        self.checked_steps = CheckedSteps(self)
        self.replay = start_session(
            job_config, self.parallel_dims, self.model_parts, self.model_args, self.gradient_accumulation_steps
        )
        if isinstance(self.replay, Replayer):
            self.metrics_processor.replay = self.replay
        self._run_step = train_step_with(self._clip_and_check)

    def init_distributed(self) -> ParallelDims:
        job = self.job_config
        if platform.backend() == "npu":
            recorder = flight_recorder_variables(job.comm, job.job.dump_folder)
            os.environ |= {name: value for name, value in recorder.items() if name not in os.environ}
        dims = ParallelDims.of(super().init_distributed())
        dims.hccl_buffers = hccl_buffers(job.comm)
        if dims.tp_enabled:
            use_matmul_sharding(dims.get_mesh("tp"), self.job_config.npu.matmul_sharding)
        return dims

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        inputs, labels, extra_inputs, extra_kwargs = model_inputs(
            input_dict,
            labels,
            model=self.model_parts[0],
            model_args=self.model_args,
            tokenizer=self.tokenizer,
            dims=self.parallel_dims,
            job_config=self.job_config,
        )
        if self.replay:
            tokens, document_ends = input_dict["input"], None
            if takes_attention_masks(self.model_args):
                document_ends = input_dict.get(DOCUMENT_ENDS, tokens == self.tokenizer.eos_id)
            positions = extra_kwargs["positions"] if self.parallel_dims.cp_enabled else None
            self.replay.start_batch(tokens, positions, document_ends)
        return inputs, labels, extra_inputs, extra_kwargs

    def train(self) -> None:
        with log_compile_progress() if self.job_config.compile.enable else nullcontext():
            if platform.backend() == "npu":
                train_with(profile_npu, self._set_timeouts)(self)
            else:
                super().train()

    def _set_timeouts(self, timeout: timedelta, parallel_dims: ParallelDims) -> None:
        """Set the time-outs of all groups after the first step, as TorchTitan does for NCCL and gloo."""
        set_pg_timeouts(timeout, parallel_dims)  # waits for all ranks
        set_timeouts(parallel_dims.get_all_one_dimensional_meshes().values(), timeout)

    def should_continue_training(self) -> bool:
        """Return whether to run another step. Raise :class:`JobStopped` if the ranks have agreed to stop here."""
        if not super().should_continue_training():
            self.has_finished = True
            return False
        if self.progress.may_start(self.step + 1):
            return True
        if not self.has_stepped:
            raise JobStopped("before its first step")
        folder = self.checkpointer.save_before_stop(self.step)
        raise JobStopped(
            f"after step {self.step}, saved in {folder}" if folder else f"after step {self.step}, not saved"
        )

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, torch.Tensor], torch.Tensor]]
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        batches = super().batch_generator(data_iterable)
        while True:
            with self.progress.during("loading data"):
                try:
                    batch = next(batches)
                except DataloaderExhaustedError:
                    self.has_finished = True
                    raise
            yield batch

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        started = time.perf_counter()
        self.progress.phase = "training"
        for loss in self.auxiliary_losses:
            loss.start_step()
        if self.replay:
            self.replay.start_step(self.step)
        try:
            self._run_step(self, without_waiting(self.checked_steps.start(data_iterator), self.device))
        except NonfiniteStep as found:
            if self.replay:
                self.replay.end_step()
                self.replay.start_step(self.step)  # the step may run again below
            with self.progress.during(PHASES[-1]):  # it may wait for a save
                self.checked_steps.skip_or_stop(found)
        if self.replay:
            self.replay.end_step()
        if not self.has_stepped and self.job_config.compile.enable:
            logger.info(f"The first step took {time.perf_counter() - started:.1f} s, including compilation")
        if not self.has_stepped and self.job_config.npu.empty_cache_after_first_step:
            device_module.empty_cache()
        graph_passes.report(self.model_parts)  # includes graphs compiled by the validation after the previous step
        self.has_stepped = self.progress.has_stepped = True
        self.progress.phase = PHASES[-1]

    def _clip_and_check(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Clip the gradients. Raise :class:`NonfiniteStep`, on every rank, if they or the loss are not finite."""
        norm = clip_grad_norm_(*args, **kwargs)
        self.checked_steps.check(norm)
        return norm

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"nonfinite_steps": self.checked_steps.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.checked_steps.skipped = state_dict.get("nonfinite_steps", 0)

    def parts_by_stage(self) -> dict[int, torch.nn.Module]:
        """Return this rank's parts of the model, by pipeline stage."""
        return stage_modules(self.pp_schedule) if self.parallel_dims.pp_enabled else dict(enumerate(self.model_parts))

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: Any
    ) -> torch.Tensor:
        self.checked_steps.start_batch()
        # detached: nodes of an autograd graph that is alive would add their stream to the captures
        loss = self._forward_backward(input_dict, labels, global_valid_tokens).detach()
        if self.replay:
            self.replay.end_batch()
        self.device_graphs.capture_once()
        self.checked_steps.add_batch(global_valid_tokens, loss)
        return loss

    def _forward_backward(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: Any
    ) -> torch.Tensor:
        dims = self.parallel_dims
        # DDP averages the gradients of its replicas, which are already divided by the tokens of all replicas
        replicas = dims.dp_replicate if not (dims.fsdp_enabled or dims.ep_enabled) else 1
        if self.auxiliary_losses:
            labelled = torch.as_tensor(global_valid_tokens, dtype=torch.float32, device=self.device)
            # all batches have the same size, on all ranks and in all accumulation steps; labels are not split here yet
            batches = dims.dp_replicate * dims.dp_shard * self.gradient_accumulation_steps
            all_tokens = torch.full_like(labelled, labels.numel() * batches)
            for auxiliary_loss in self.auxiliary_losses:
                auxiliary_loss.start_batch(labelled if auxiliary_loss.of_labels else all_tokens, replicas)
        tokens = global_valid_tokens / replicas
        if not (dims.pp_enabled or isinstance(self.loss_fn, ChunkedLossPerToken)):
            loss = super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=tokens)
            return loss / replicas
        self.loss_fn.tokens = tokens
        loss = super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=1.0)
        self.loss_fn.tokens = 1.0  # validation divides by its own number of tokens
        return loss / replicas


def train(config: JobConfig) -> None:
    """Run a job, or write its seed checkpoint. Name the first rank that fails, on every rank.

    Raise ``SystemExit`` after a failure, which has then been printed, and :class:`JobStopped` after a stop signal.
    After a step that is not finite, raise :class:`NonfiniteStop`.
    """
    monitor = start_monitor(config.comm)
    if monitor:
        with closing(monitor):
            _train_monitored(config, monitor)
    else:
        _train(config)
    torch.distributed.destroy_process_group()


def _train_monitored(config: JobConfig, monitor: RankMonitor) -> None:
    try:
        _train(config, monitor)
        monitor.finish()
    except JobStopped as stopped:
        message = f"Stopped by {monitor.stop_reason} {stopped.message}"
        monitor.finish_stop(message, EXIT_STOPPED)
        log_on_first_rank(message)
        raise
    except NonfiniteStop as stopped:
        monitor.finish_stop(stopped.report, EXIT_NONFINITE)
        raise
    except UsageError as error:
        if monitor.progress.step == 0:  # before training, all ranks raise it alike, and the entry prints it once
            raise
        monitor.report(error)
        raise SystemExit(EXIT_USAGE) from error
    except (Exception, SystemExit) as error:  # a rank that exits early has failed, whatever its exit code
        monitor.report(error)
        raise SystemExit(EXIT_FAILED) from error


def _train(config: JobConfig, monitor: RankMonitor | None = None) -> None:
    trainer = Trainer(config)
    try:
        if config.comm.mode == "local_tensor":
            logger.info("Local tensor mode enabled - skipping training execution")  # as TorchTitan does
        elif config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            if monitor:
                trainer.progress = monitor.progress
                monitor.watch_signals()
            trainer.train()
            if not trainer.has_finished:  # torch's ``record`` around TorchTitan's loop returns after sys.exit(0)
                raise RuntimeError(f"sys.exit(0) was called before step {config.training.steps}, the last one")
            graph_passes.report(trainer.model_parts)  # graphs compiled by the validation after the last step
    except RuntimeError as failure:
        if error := usage_error(failure):
            raise error from None
        raise
    finally:
        trainer.close()


def usage_error(failure: BaseException | None) -> UsageError | None:
    """Return the error of our backend or graph passes, which torch.compile and pipeline stages wrap in their own."""
    while failure is not None:
        if isinstance(failure, UsageError):
            return failure
        failure = failure.inner_exception if isinstance(failure, BackendCompilerFailed) else failure.__cause__
    return None
