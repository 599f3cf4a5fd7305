"""The project's Trainer over fake tensors: the user's own job, built and trained as it would be, without a value.

Everything up to the parallelised model on the meta device is as in a real start. From then on there are only fake
tensors. What stands in for what a fake job cannot have: batches without text, weights without initial values, the
number of tokens that the ranks would add up, and the shapes that pipeline stages would tell each other.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.train_spec import OptimizersBuilder, TrainSpec

from torchtitan_npu.components.swap_optimizer.container import SWAPPING
from torchtitan_npu.components.swap_optimizer.swap_adam import SwapStates
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.planner.expert_load import Load, StatedLoad, balanced
from torchtitan_npu.planner.fake_devices import fake_device
from torchtitan_npu.planner.limits import compiles_model
from torchtitan_npu.planner.pipeline_stages import know_neighbours
from torchtitan_npu.trainer import TitanTrainer, Trainer
from torchtitan_npu.upstream.parallel_dims import ParallelDims
from torchtitan_npu.upstream.rebind import rebound
from torchtitan_npu.upstream.swap_optimizers import with_swap_if_enabled
from torchtitan_npu.upstream.tied_weights import ties_weights


class RehearsedTrainer(Trainer):
    """A Trainer of one rank of a fake process group, after whose start this process makes fake tensors only.

    ``contexts`` is what ends that: the caller closes it. ``model_args`` replace those of the job's flavor.
    """

    def __init__(
        self, job_config: JobConfig, contexts: ExitStack, load: Load = balanced, model_args: Any = None
    ) -> None:
        self._contexts, self._load, self._model_args = contexts, load, model_args
        with _local_rank():
            super().__init__(without_outputs(job_config))
        if self.parallel_dims.pp_enabled:
            know_neighbours(self.pp_schedule, self.parallel_dims, self.job_config, self.model_args)

    def init_distributed(self) -> ParallelDims:
        dims = super().init_distributed()
        dims.build_mesh()  # now, because later there are only fake tensors, and a mesh holds the numbers of its ranks
        return dims

    @property
    def train_spec(self) -> TrainSpec:  # type: ignore[override]
        return self._train_spec

    @train_spec.setter
    def train_spec(self, spec: TrainSpec) -> None:
        flavor = self.job_config.model.flavor
        args = self._model_args or spec.model_args[flavor]
        self._train_spec = replace(
            spec,
            model_args={flavor: copy.deepcopy(args)},  # the Trainer writes the job's settings into them
            build_tokenizer_fn=None,
            build_dataloader_fn=None,
            parallelize_fn=self._then_fake(spec.parallelize_fn),
            pipelining_fn=spec.pipelining_fn and self._then_fake(spec.pipelining_fn),
            build_optimizers_fn=rebound(spec.build_optimizers_fn, {with_swap_if_enabled: _swapping_without_host}),
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    @device.setter
    def device(self, device: torch.device) -> None:
        # to fake tensors cpu:0 is another device than cpu
        self._device = torch.device("cpu") if device.type == "cpu" else device

    def _then_fake(self, parallelize: Any) -> Any:
        """``parallelize``, or a pipelining function, after which there are only fake tensors."""

        def then_fake(*args: Any) -> Any:
            result = parallelize(*args)
            parts = result[1] if isinstance(result, tuple) else [result]
            for part in parts:
                part.init_weights = functools.partial(_without_values, part)
            # a device's backward pass has a thread of its own, where DTensor would remember another rank's meshes
            self._contexts.enter_context(torch.autograd.set_multithreading_enabled(False))
            self._contexts.enter_context(fake_device())
            self._contexts.enter_context(StatedLoad(self._load))
            return result

        return then_fake

    def batches(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Batches of this rank, on the host, as a dataloader gives them: (local_batch_size, seq_len) each."""
        training = self.job_config.training
        shape = training.local_batch_size, training.seq_len
        while True:
            yield {"input": torch.zeros(shape, dtype=torch.int64)}, torch.zeros(shape, dtype=torch.int64)

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        for loss in self.auxiliary_losses:
            loss.start_step()
        _train_step(self, data_iterator)


@contextmanager
def _local_rank() -> Iterator[None]:
    """torchrun says which device a rank has; where it does not, the first."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = before or "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]


def without_outputs(config: JobConfig) -> JobConfig:
    """``config`` without what writes files, compiles or logs: a rehearsal leaves nothing behind."""
    config = copy.deepcopy(config)
    config.metrics.enable_tensorboard = config.metrics.enable_wandb = False
    config.metrics.log_freq = 1 << 30
    config.checkpoint.enable = False
    if compiles_model(config):
        config.parallelism.enable_async_tensor_parallel = False  # the compiler's; without it a start refuses the option
    config.compile.enable = False
    config.validation.enable = False
    config.profiling.enable_profiling = config.profiling.enable_memory_snapshot = False
    config.debug.seed = config.debug.seed or 0  # else the ranks agree on one
    return config


# how many tokens the ranks have together is read on the host; the value matters to nothing that is rehearsed
_train_step = rebound(
    TitanTrainer.train_step,
    {dist_utils: SimpleNamespace(dist_sum=lambda x, *_: x.float(), clip_grad_norm_=dist_utils.clip_grad_norm_)},
)


def _without_values(part: Any, buffer_device: torch.device | None = None) -> None:
    """In place of ``init_weights``: there are no values, but weights that ``to_empty`` has untied are one again."""
    if ties_weights(part):
        part.output.weight = part.tok_embeddings.weight


def _swapping_without_host(
    build_optimizers: OptimizersBuilder, model_parts: list[nn.Module], config: Any
) -> OptimizersBuilder:
    """In place of ``with_swap_if_enabled``: without a look at this machine's memory and its link to a device."""
    if not config.swap:
        return build_optimizers
    options = {"slice_mib": config.swap_slice_mib, "fraction": config.swap_fraction}

    def container(parts: list[nn.Module], cls: type[torch.optim.Optimizer], settings: Any) -> OptimizersContainer:
        swapping = _with_fake_states(SWAPPING[cls])
        return OptimizersContainer(parts, functools.partial(swapping, **options), settings)  # type: ignore[arg-type]

    return rebound(build_optimizers, {OptimizersContainer: container})


def _with_fake_states(optimizer: type[SwapStates]) -> type[SwapStates]:
    """``optimizer`` whose states are views: a fake storage cannot be cut into pieces."""
    return type(optimizer.__name__, (optimizer,), {"with_own_storage": staticmethod(lambda view: view)})
