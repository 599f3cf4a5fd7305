"""The entry, to be launched by torchrun:

    torchrun --nproc_per_node=N -m torchtitan_npu.train --job.config_file X.toml [--section.key value ...]

TorchTitan's own Trainer and options, plus ours.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stderr
from typing import Any

import torch

import torchtitan_npu
from torchtitan_npu import platform
from torchtitan_npu.errors import UsageError

FIRST_ON_NODE = os.environ.get("LOCAL_RANK", "0") == "0"
"""A mistake in the job is found by every rank alike; one of them a node says so."""
PATIENCE = 20
"""Seconds that the other ranks wait for it. Where one ended sooner, torchrun would end them all before it is said."""

platform.prepare()
torchtitan_npu.register()
from torchtitan.tools.logging import init_logger, logger  # noqa: E402
from torchtitan.train import Trainer as TitanTrainer  # noqa: E402

from torchtitan_npu.compile import passes as graph_passes  # noqa: E402
from torchtitan_npu.compile.progress import told_by_torch  # noqa: E402
from torchtitan_npu.components.auxiliary_loss import auxiliary_losses  # noqa: E402
from torchtitan_npu.config.job_config import JobConfig  # noqa: E402
from torchtitan_npu.config.parser import JobConfigManager, import_module  # noqa: E402
from torchtitan_npu.config.preflight import check_job  # noqa: E402
from torchtitan_npu.distributed.context_parallel import context_parallel, with_context  # noqa: E402
from torchtitan_npu.distributed.matmul_sharding import use_matmul_sharding  # noqa: E402
from torchtitan_npu.torch_internals.dynamo import BackendCompilerFailed  # noqa: E402
from torchtitan_npu.upstream.parallel_dims import ParallelDims  # noqa: E402


class Trainer(TitanTrainer):
    """TorchTitan's Trainer with gradients that are those of the mean loss over all tokens, on every layout."""

    def __init__(self, job_config: JobConfig) -> None:
        use_matmul_sharding(job_config.npu.matmul_sharding)
        self.has_stepped = False
        super().__init__(job_config)
        self.auxiliary_losses = auxiliary_losses(self.model_parts)
        own = getattr(self.model_args, "context_parallel", None)
        if context := context_parallel(job_config, self.parallel_dims, own):
            self.post_dataloading_process = with_context(TitanTrainer.post_dataloading_process, context).__get__(self)

    def init_distributed(self) -> ParallelDims:
        return ParallelDims.of(super().init_distributed())

    def train(self) -> None:
        generating = self.job_config.compile.enable and not self.job_config.npu.bypass_codegen
        with told_by_torch() if generating else nullcontext():  # a backend of our own says it by itself
            super().train()

    def train_step(self, data_iterator: Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]) -> None:
        started = time.perf_counter()
        for loss in self.auxiliary_losses:
            loss.start_step()
        super().train_step(data_iterator)
        if not self.has_stepped and self.job_config.compile.enable:
            logger.info(f"The first step took {time.perf_counter() - started:.1f} s, with compiling")
        graph_passes.report(self.model_parts)  # and what was compiled to validate after the step before
        self.has_stepped = True

    def forward_backward_step(
        self, *, input_dict: dict[str, torch.Tensor], labels: torch.Tensor, global_valid_tokens: Any
    ) -> torch.Tensor:
        dims = self.parallel_dims
        # DDP averages the gradients of its replicas, which already are shares of the global mean
        replicas = dims.dp_replicate if not (dims.fsdp_enabled or dims.ep_enabled) else 1
        if self.auxiliary_losses:
            with_label = torch.as_tensor(global_valid_tokens, dtype=torch.float32, device=self.device)
            # batches are alike, on all ranks and in all steps of accumulation; labels are not split here yet
            batches = dims.dp_replicate * dims.dp_shard * self.gradient_accumulation_steps
            every = torch.full_like(with_label, labels.numel() * batches)
            for auxiliary_loss in self.auxiliary_losses:
                auxiliary_loss.start_batch(with_label if auxiliary_loss.of_labels else every, replicas)
        tokens = global_valid_tokens / replicas
        if not dims.pp_enabled:
            loss = super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=tokens)
            return loss / replicas
        self.loss_fn.tokens = tokens
        loss = super().forward_backward_step(input_dict=input_dict, labels=labels, global_valid_tokens=1.0)
        self.loss_fn.tokens = 1.0  # validation divides by its own number of tokens
        return loss / replicas


def train(config: JobConfig) -> None:
    """Run a job, or write its seed checkpoint."""
    trainer = Trainer(config)
    try:
        if config.comm.mode == "local_tensor":
            logger.info("Local tensor mode enabled - skipping training execution")  # as TorchTitan does
        elif config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            trainer.train()
            graph_passes.report(trainer.model_parts)  # the last step is validated after it
    except BackendCompilerFailed as failure:  # torch.compile's wrapping of what our backend or a graph pass refuses
        if isinstance(failure.inner_exception, UsageError):
            raise failure.inner_exception from None
        raise
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


def let_the_first_rank_speak() -> None:
    if not FIRST_ON_NODE:
        time.sleep(PATIENCE)


def parsed() -> JobConfig:
    """The job's config. The parser says by itself what is wrong with it, and exits."""
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(sys.stderr if FIRST_ON_NODE else nowhere):
            return JobConfigManager().parse_args()
    except SystemExit:
        let_the_first_rank_speak()
        raise


def main() -> None:
    init_logger()
    try:
        config = parsed()
        if config.experimental.custom_import:  # its models and converters have to be known to the checks
            import_module("experimental.custom_import", config.experimental.custom_import)
        # without real communication TorchTitan takes the number of ranks from NGPU
        ranks = os.environ.get("WORLD_SIZE" if config.comm.mode == "default" else "NGPU", "1")
        check_job(config, int(ranks))
        train(config)
    except UsageError as error:
        let_the_first_rank_speak()  # torchrun then ends this one; if not, it alone has something to say
        print(f"torchtitan_npu: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
