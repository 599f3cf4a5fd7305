"""The Trainer: TorchTitan's, with correct gradients on every layout and the options of this package.

Import it after :func:`torchtitan_npu.platform.prepare`. Importing it registers the converters and train specs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.components.checkpoint import CheckpointManager as TitanCheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.utils import clip_grad_norm_, dist_max, dist_sum, set_pg_timeouts
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.train import Trainer as TitanTrainer

import torchtitan_npu.converters
import torchtitan_npu.train_specs.registry  # noqa: F401
from torchtitan_npu import platform
from torchtitan_npu.compile import passes as graph_passes
from torchtitan_npu.compile.device_graphs import DeviceGraphs
from torchtitan_npu.components.checkpoint.manager import CheckpointManager
from torchtitan_npu.components.chunked_loss import ChunkedLossPerToken
from torchtitan_npu.components.job_control.heartbeat import PHASES, StepProgress
from torchtitan_npu.components.loss import GradientScale
from torchtitan_npu.components.metrics import log_compile_progress, peak_flops
from torchtitan_npu.components.nonfinite.checked_steps import Batch, CheckedSteps, NonfiniteStep
from torchtitan_npu.components.profiling import profile_npu
from torchtitan_npu.components.replay.install import start_session
from torchtitan_npu.components.replay.replayer import Replayer
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.titan_sections import hccl_buffers
from torchtitan_npu.distributed.context_parallel import model_inputs, takes_attention_masks
from torchtitan_npu.distributed.matmul_sharding import use_matmul_sharding
from torchtitan_npu.distributed.parallel_dims import ParallelDims, flight_recorder_variables, set_timeouts
from torchtitan_npu.errors import EXIT_STOPPED
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.layers.documents import DOCUMENT_ENDS
from torchtitan_npu.titan_internals.rebind import copy_with_globals
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
        self.progress = StepProgress()
        # TorchTitan's constructor names its checkpoint manager, and a function that takes an NPU for an A100
        init = copy_with_globals(
            TitanTrainer.__init__,
            {
                TitanCheckpointManager: partial(CheckpointManager, job_config=job_config),
                utils: SimpleNamespace(**vars(utils) | {"get_peak_flops": peak_flops(job_config)}),
            },
        )
        init(self, job_config)
        if isinstance(self.loss_fn, ChunkedLossPerToken):
            self.loss_fn.use_output(self.model_parts)
        self.auxiliary_losses = auxiliary_losses(self.model_parts)
        self.gradient_scale = GradientScale(self.parallel_dims, self.gradient_accumulation_steps, self.auxiliary_losses)
        graphed_parts = self.model_parts if job_config.npu.device_graphs else []
        self.device_graphs = DeviceGraphs(graphed_parts, self.device.type)
        self.checked_steps = CheckedSteps(self)
        self.replay = start_session(
            job_config, self.parallel_dims, self.model_parts, self.model_args, self.gradient_accumulation_steps
        )
        if isinstance(self.replay, Replayer):
            self.metrics_processor.replay = self.replay

    def init_distributed(self) -> ParallelDims:
        job = self.job_config
        if platform.backend() == "npu":
            recorder = flight_recorder_variables(job.comm, job.job.dump_folder)
            os.environ |= {name: value for name, value in recorder.items() if name not in os.environ}
        dims = ParallelDims.from_titan(super().init_distributed())
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

    @record
    def train(self) -> None:
        """Run the steps from the loaded checkpoint to the last, as TorchTitan does, with the profiler of the device."""
        config, is_npu = self.job_config, platform.backend() == "npu"
        self.checkpointer.load(step=config.checkpoint.load_step)
        logger.info(f"Training starts at step {self.step + 1}")
        start = {"global_step": self.step, "base_folder": config.job.dump_folder}
        with (
            log_compile_progress() if config.compile.enable else nullcontext(),
            (profile_npu if is_npu else maybe_enable_profiling)(config.profiling, **start) as profiler,
            maybe_enable_memory_snapshot(config.profiling, **start) as memory_snapshots,
        ):
            batches = self.batch_generator(self.dataloader)  # type: ignore[arg-type]
            while self.should_continue_training():
                self.step += 1
                self.gc_handler.run(self.step)
                try:
                    self.train_step(batches)
                except DataloaderExhaustedError:
                    logger.warning("Ran out of data; last step was canceled.")
                    break
                self.checkpointer.save(self.step, last_step=self.step == config.training.steps)
                if config.validation.enable and self.validator.should_validate(self.step):
                    self.validator.validate(self.model_parts, self.step)
                for observer in (profiler, memory_snapshots):
                    if observer:
                        observer.step()
                if self.step == 1:  # compilation and lazy initialization are done
                    timeout = timedelta(seconds=config.comm.train_timeout_seconds)
                    set_pg_timeouts(timeout, self.parallel_dims)  # waits for all ranks
                    if is_npu:
                        set_timeouts(self.parallel_dims.get_all_one_dimensional_meshes().values(), timeout)
        if torch.distributed.get_rank() == 0:
            logger.info("Sleeping 2 seconds for other ranks to complete")
            time.sleep(2)
            logger.info("Training completed")

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

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        batches = super().batch_generator(data_iterable)
        while True:
            with self.progress.during("loading data"):
                try:
                    batch = next(batches)
                except DataloaderExhaustedError:
                    self.has_finished = True
                    raise
            yield batch

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        started = time.perf_counter()
        self.progress.phase = "training"
        for loss in self.auxiliary_losses:
            loss.start_step()
        if self.replay:
            self.replay.start_step(self.step)
        try:
            self.run_step(self.checked_steps.start(data_iterator))
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
            utils.device_module.empty_cache()
        graph_passes.report(self.model_parts)  # includes graphs compiled by the validation after the previous step
        self.has_stepped = self.progress.has_stepped = True
        self.progress.phase = PHASES[-1]

    def run_step(self, batches: Iterator[Batch]) -> None:
        """Accumulate the gradients of a step's batches, clip them, update the weights, and log, as TorchTitan does."""
        self.optimizers.zero_grad()
        learning_rate = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        microbatches = [next(batches) for _ in range(self.gradient_accumulation_steps)]
        counts = [(labels != IGNORE_INDEX).sum() for _, labels in microbatches]
        local_tokens = to_device(torch.stack(counts).sum(), self.device)
        global_tokens = self.sum_over_batch_ranks(local_tokens)

        losses = []
        for inputs, labels in microbatches:
            for name, value in inputs.items():
                if isinstance(value, Tensor):
                    inputs[name] = to_device(value, self.device)
            loss = self.forward_backward_step(
                input_dict=inputs, labels=to_device(labels, self.device), global_valid_tokens=global_tokens
            )
            losses.append(loss.detach())

        norm = self.clip_gradients()
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            self.log_step(torch.stack(losses).sum(), local_tokens, global_tokens, norm, learning_rate)

    def sum_over_batch_ranks(self, tokens: Tensor) -> Any:
        """Return the sum of ``tokens`` over the ranks with different batches. Waits for the device."""
        if not self.parallel_dims.dp_enabled:
            return tokens.float()
        return dist_sum(tokens, self.parallel_dims.get_mesh("batch"))

    def clip_gradients(self) -> Tensor:
        """Clip the gradients. Raise :class:`NonfiniteStep`, on every rank, if they or the loss are not finite."""
        dims = self.parallel_dims
        norm = clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.job_config.training.max_norm,
            foreach=True,
            pp_mesh=dims.get_optional_mesh("pp"),
            ep_enabled=dims.ep_enabled,
        )
        self.checked_steps.check(norm)
        return norm

    def log_step(
        self, loss: Tensor, local_tokens: Tensor, global_tokens: Any, norm: Tensor, learning_rate: float
    ) -> None:
        """Log the mean loss of all tokens and the largest of a rank. ``loss`` is this rank's part of the mean."""
        tokens_seen: Any = self.ntokens_seen
        if self.parallel_dims.dp_cp_enabled:
            mesh = self.parallel_dims.get_optional_mesh("loss")
            local_mean = loss * global_tokens / local_tokens
            mean_loss, largest_loss = dist_sum(loss, mesh), dist_max(local_mean, mesh)
            tokens_seen = dist_sum(torch.tensor(tokens_seen, dtype=torch.int64, device=self.device), mesh)
        else:
            mean_loss = largest_loss = loss.item()
        metrics = {"n_tokens_seen": tokens_seen, "lr": learning_rate}
        self.metrics_processor.log(self.step, mean_loss, largest_loss, norm.item(), extra_metrics=metrics)

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
        tokens = self.gradient_scale.start_batch(labels, global_valid_tokens, self.device)
        # their backward pass starts inside, before the loss could be divided here
        divides = self.parallel_dims.pp_enabled or isinstance(self.loss_fn, ChunkedLossPerToken)
        if divides:
            self.loss_fn.tokens, tokens = tokens, 1.0
        loss = super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=tokens)
        if divides:
            self.loss_fn.tokens = 1.0  # validation divides by another number of tokens
        # detached: nodes of an autograd graph that is alive would add their stream to the captures
        loss = (loss / self.gradient_scale.replicas).detach()
        if self.replay:
            self.replay.end_batch()
        self.device_graphs.capture_once()
        self.checked_steps.add_batch(global_valid_tokens, loss)
        return loss


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Workaround: TorchTitan's copies make the host wait. Copy in the order of the stream, while the host continues.

    A copy from memory that is not pinned makes the host wait for everything launched before. Other tensors than plain
    ones in host memory, which a user's data loader may return, cannot be pinned. Delete when TorchTitan pins batches.
    """
    is_plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided
    if device.type == "cpu" or not is_plain:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
