"""The Trainer of a dry run: the user's job, built and trained as usual, on fake tensors.

Everything up to the parallelized model on the meta device is as in training. After that every tensor is fake. A dry run
has no text, no initial weights, no token counts of other ranks, and no shapes from neighbouring pipeline stages.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_npu.components.optimizers import SwappableOptimizers
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.distributed.tied_weights import ties_weights
from torchtitan_npu.planner.dry_run_trainer import local_rank
from torchtitan_npu.planner.expert_load import AssumedLoad, Load, balanced
from torchtitan_npu.planner.fake_devices import fake_device
from torchtitan_npu.planner.pipeline_stages import schedule_with_shapes
from torchtitan_npu.planner.unsupported_jobs import compiles_model
from torchtitan_npu.trainer import Trainer


class DryRunTrainer(Trainer):
    """A Trainer of one rank of a fake process group. After its start this process makes fake tensors only.

    Closing ``contexts`` ends that; the caller does it. ``model_args`` replace those of the job's flavor.
    """

    on_batch_start: Callable[[], None] = staticmethod(lambda: None)
    on_batch_end: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, job_config: JobConfig, contexts: ExitStack, load: Load = balanced, model_args: Any = None
    ) -> None:
        self._contexts, self._load, self._model_args = contexts, load, model_args
        with local_rank():
            super().__init__(without_outputs(job_config))
        self.step = 2  # TorchTitan logs the first step, and logging reads the losses
        if self.parallel_dims.pp_enabled:
            self.pp_schedule = schedule_with_shapes(
                self.model_parts, self.parallel_dims, self.job_config, self.model_args, self.device, self.loss_fn
            )

    def init_distributed(self) -> ParallelDims:
        dims = super().init_distributed()
        dims.build_mesh()  # before tensors are fake: a mesh reads the values of its rank tensor
        return dims

    @property
    def train_spec(self) -> TrainSpec:  # type: ignore[override]
        return self._train_spec

    @train_spec.setter
    def train_spec(self, spec: TrainSpec) -> None:
        """Change the spec that TorchTitan's constructor assigns: no data, fake tensors, no pinned host memory."""
        flavor = self.job_config.model.flavor
        args = self._model_args or spec.model_args[flavor]
        build_optimizers = spec.build_optimizers_fn
        if isinstance(build_optimizers, SwappableOptimizers):
            build_optimizers = replace(build_optimizers, dry_run=True)
        self._train_spec = replace(
            spec,
            model_args={flavor: copy.deepcopy(args)},  # the Trainer writes the job's settings into them
            build_tokenizer_fn=None,
            build_dataloader_fn=None,
            parallelize_fn=self._then_fake(spec.parallelize_fn),
            pipelining_fn=spec.pipelining_fn and self._then_fake(spec.pipelining_fn),
            build_optimizers_fn=build_optimizers,
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @device.setter
    def device(self, device: torch.device) -> None:
        # Fake tensors treat cpu:0 and cpu as two devices.
        self._device = torch.device("cpu") if device.type == "cpu" else device

    @property
    def uses_loss_parallel(self) -> bool:
        return self.parallel_dims.tp_enabled and not self.job_config.parallelism.disable_loss_parallel

    def _then_fake(self, parallelize: Any) -> Any:
        """Wrap ``parallelize``, or a pipelining function, so that after it every new tensor is fake."""

        def then_fake(*args: Any) -> Any:
            result = parallelize(*args)
            parts = result[1] if isinstance(result, tuple) else [result]
            for part in parts:
                part.init_weights = functools.partial(_tie_weights, part)
            # A device's backward pass has its own thread, whose DTensor cache would keep meshes of other dry runs.
            self._contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
            self._contexts.enter_context(fake_device())
            self._contexts.enter_context(AssumedLoad(self._load))
            return result

        return then_fake

    def batches(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield batches of this rank on the host, as a dataloader does: (local_batch_size, seq_len) each."""
        training = self.job_config.training
        shape = training.local_batch_size, training.seq_len
        while True:
            yield {"input": torch.zeros(shape, dtype=torch.int64)}, torch.zeros(shape, dtype=torch.int64)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        for loss in self.auxiliary_losses:
            loss.start_step()
        self.run_step(data_iterator)

    def sum_over_batch_ranks(self, tokens: torch.Tensor) -> torch.Tensor:
        # fake tensors have no values to read on the host, and the count changes no shape
        return tokens.float()

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        self.on_batch_start()
        loss = super().forward_backward_step(**kwargs)
        self.on_batch_end()
        return loss


def without_outputs(config: JobConfig) -> JobConfig:
    """Return a copy of ``config`` that writes no files, compiles and captures nothing and logs nothing."""
    config = copy.deepcopy(config)
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.metrics.log_freq = 1 << 30
    config.checkpoint.enable = False
    config.training.max_nonfinite_steps = 0  # fake tensors have no values
    if compiles_model(config):
        config.parallelism.enable_async_tensor_parallel = False  # an error without compile
    config.compile.enable = config.npu.device_graphs = False
    config.validation.enable = False
    config.profiling.enable_profiling = config.profiling.enable_memory_snapshot = False
    config.debug.seed = config.debug.seed or 0  # without a seed the ranks would exchange one
    return config


def _tie_weights(part: Any, buffer_device: torch.device | None = None) -> None:
    """Replace ``init_weights``: fake DTensors have no random state. Tie again the weights that ``to_empty`` untied."""
    if ties_weights(part):
        part.output.weight = part.tok_embeddings.weight
