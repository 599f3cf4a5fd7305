"""The Trainer of a dry run: the user's job, built and trained as usual, on fake tensors.

Everything up to the parallelized model on the meta device is as in training. After that every tensor is fake. A dry run
has no text, no initial weights, no token counts of other ranks, and no shapes from neighbouring pipeline stages.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed.pipeline_parallel import build_pipeline_schedule
from torchtitan.protocols.train_spec import TrainSpec

from torchtitan_npu.components.optimizers import SwappableOptimizers
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.pipeline import pipeline_stages
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.distributed.pipeline_stage import PipelineStage, keeping_counts
from torchtitan_npu.distributed.tied_weights import ties_weights
from torchtitan_npu.errors import UsageError
from torchtitan_npu.planner.fake_devices import AssumedLoad, Load, balanced, fake_device
from torchtitan_npu.planner.layout import stages_of_rank, uses_fsdp
from torchtitan_npu.torch_internals.pipelining import skip_shape_vote
from torchtitan_npu.trainer import Trainer


def check_dry_run(config: JobConfig) -> None:
    """Raise :class:`UsageError` for a job that may train, but not on fake tensors."""
    if config.dsa.document_mask:
        raise UsageError("dsa.document_mask = true is not supported in a dry run: it has no text to find documents in")
    if config.training.enable_cpu_offload:
        raise UsageError(
            "training.enable_cpu_offload = true is not supported in a dry run: fake tensors cannot be pinned"
        )
    if config.activation_checkpoint.mode == "memory_budget" and compiles_model(config):
        raise UsageError(
            'activation_checkpoint.mode = "memory_budget" is not supported in a dry run: the compiler chooses what is '
            'kept; "selective" and "full" are supported'
        )
    replicas = config.parallelism.data_parallel_replicate_degree
    if replicas > 1 and not uses_fsdp(config):
        raise UsageError(
            f"parallelism.data_parallel_replicate_degree {replicas} alone is not supported in a dry run: DDP compares "
            "values of the ranks; data_parallel_replicate_degree 1 with data_parallel_shard_degree "
            f"{replicas} is supported"
        )


def compiles_model(config: JobConfig) -> bool:
    """Return whether the model itself is compiled, not only the loss."""
    return config.compile.enable and "model" in config.compile.components


@contextmanager
def local_rank() -> Iterator[None]:
    """Workaround: TorchTitan 0.2.2's Trainer reads LOCAL_RANK, which torchrun sets; delete when it takes its device.

    Set LOCAL_RANK to 0 in this context if it is not set.
    """
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = before or "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]


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
            self.pp_schedule = self._schedule_with_shapes()

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

    def _then_fake(self, parallelize: Any) -> Any:
        """Wrap ``parallelize``, or a pipelining function, so that after it every new tensor is fake."""

        def then_fake(*args: Any) -> Any:
            result = parallelize(*args)
            parts = result[1] if isinstance(result, tuple) else [result]
            for part in parts:
                part.init_weights = functools.partial(_tie_weights, part)
            # A device runs the backward pass in a thread whose DTensor cache would keep meshes of other dry runs.
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
        for auxiliary_loss in self.auxiliary_losses:
            auxiliary_loss.start_step()
        self.run_step(data_iterator)

    def sum_over_batch_ranks(self, tokens: torch.Tensor) -> torch.Tensor:
        # fake tensors have no values to read on the host, and the count changes no shape
        return tokens.float()

    def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
        self.on_batch_start()
        loss = super().forward_backward_step(**kwargs)
        self.on_batch_end()
        return loss

    def _schedule_with_shapes(self) -> Any:
        """Return the job's pipeline schedule over stages that know the shapes they receive and send.

        In training, stages exchange them before the first step. Here the shapes of inputs are arithmetic, and those of
        outputs come from running the stage once. Stages exchange hidden states of (microbatch, seq_len / CP / TP, dim):
        tensor parallel splits the sequence between layers. Before a layer without an indexer they also exchange the
        selected keys, and the indexer's tensors if its loss is shared.
        """
        config, dims, args = self.job_config, self.parallel_dims, self.model_args
        batch, seq_len = config.parallelism.pipeline_parallel_microbatch_size, config.training.seq_len
        length = seq_len // dims.cp
        # Mixed precision is FSDP's: without FSDP a pipeline computes in training.dtype.
        dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param if dims.fsdp_enabled else config.training.dtype]
        mesh, count = dims.get_mesh("pp"), len(pipeline_stages(config, args.n_layers))
        stages = []
        for index, part in zip(stages_of_rank(config, mesh.get_local_rank(), count), self.model_parts, strict=True):
            if index == 0:
                hidden = torch.zeros(batch, length, dtype=torch.int64, device=self.device)
            else:
                shape = batch, length // dims.tp, args.dim
                hidden = torch.zeros(shape, dtype=dtype, device=self.device, requires_grad=True)
            inputs = [hidden]
            if hasattr(args, "passed_tensors"):
                # Each rank has the keys of seq_len tokens and the queries of ``length`` tokens.
                shapes = {
                    "selected": (batch, length, 1, args.attended_keys()),
                    "index_q": (batch, length, args.index_n_heads, args.index_head_dim),
                    "index_k": (batch, seq_len, args.index_head_dim),
                    "index_weights": (batch, length, args.index_n_heads),
                }
                for name in args.passed_tensors(min(map(int, part.layers), default=0) - 1):
                    is_index = name == "selected"
                    options = {"dtype": torch.int32} if is_index else {"requires_grad": True}
                    inputs.append(hidden.new_zeros(shapes[name], **options))
            with torch.no_grad(), keeping_counts(part):
                found = part(*inputs)
            for module in part.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            outputs = found if isinstance(found, tuple) else (found,)
            outputs = tuple(x.requires_grad_() if x.is_floating_point() else x for x in outputs)
            received, sent = (tuple(x.to("meta") for x in each) for each in (inputs, outputs))
            stage = PipelineStage(part, index, count, self.device, received, sent, group=mesh.get_group())
            skip_shape_vote(stage)
            stages.append(stage)
        return build_pipeline_schedule(config, stages, self.loss_fn)


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
