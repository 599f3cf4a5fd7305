"""Train a debug model for some steps with the real Trainer, and record the reported metrics."""

from __future__ import annotations

import copy
import gc
import os
import tempfile
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from torchtitan_npu import platform, register

platform.prepare()
register()

from torch.distributed.tensor import DTensor  # noqa: E402
from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from torchtitan_npu.cli.parity.cases import MODELS  # noqa: E402
from torchtitan_npu.config.job_config import JobConfig  # noqa: E402
from torchtitan_npu.config.parser import shipped  # noqa: E402
from torchtitan_npu.converters import exact_converters  # noqa: E402
from torchtitan_npu.preflight.job import check_job  # noqa: E402
from torchtitan_npu.preflight.job_context import build_on_meta  # noqa: E402
from torchtitan_npu.trainer import Trainer  # noqa: E402

FLAVOR = "parity"
GLOBAL_BATCH = 4


class Curve(NamedTuple):
    """Hold the metrics of a run, one value per step."""

    losses: list[float]
    norms: list[float]
    """As reported. torch sums squares in float32, sequentially on a CPU: rounding may reach 1e-4 of the sum."""
    exact_norms: list[float]
    """The norm of the same gradients, summed in float64."""


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference of two curves, NaN if a value is NaN."""
    a, b = torch.tensor([ours, theirs], dtype=torch.float64)
    return ((a - b) / b).abs().max().item()


def needs_cuda(name: str) -> bool:
    """Return whether the model has flex attention, which has no backward on a CPU."""
    model, flavor = MODELS[name]
    return getattr(get_train_spec(model).model_args[flavor], "attn_type", "sdpa") == "flex"


def add_flavor(name: str) -> None:
    """Add a float32 debug flavor that loops over experts: TorchTitan's grouped matmul on CUDA takes only bfloat16."""
    model, flavor = MODELS[name]
    spec = get_train_spec(model)
    args: Any = copy.deepcopy(spec.model_args[flavor])
    if hasattr(args, "moe_args"):
        args.moe_args.use_grouped_mm = False
    spec.model_args[FLAVOR] = args  # type: ignore[index]
    model_cls = spec.model_cls
    # some of TorchTitan's models build their blocks in bfloat16
    spec.model_cls = lambda args: model_cls(args).float()  # type: ignore[assignment, attr-defined]


def applicable_converters(name: str) -> list[str]:
    """Return the converters that find a target in the model."""
    config = JobConfig()
    config.model.name, config.model.flavor = MODELS[name][0], FLAVOR
    model = build_on_meta(config)
    return [one for one, converter in exact_converters().items() if converter(config, None).targets(model)]  # type: ignore[arg-type]


def job_config(name: str, converters: list[str], steps: int, seq_len: int, lr: float) -> JobConfig:
    """Return a job for one rank. Every run gets the same batches."""
    config = JobConfig()
    config.model.name, config.model.flavor = MODELS[name][0], FLAVOR
    config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
    config.model.converters = converters
    config.training.dataset = "tiny_corpus"
    config.training.local_batch_size = config.training.global_batch_size = GLOBAL_BATCH
    config.training.seq_len, config.training.steps = seq_len, steps
    config.training.mixed_precision_param = "float32"
    config.optimizer.lr = lr
    config.lr_scheduler.warmup_steps = 2
    config.metrics.log_freq = 1
    config.comm.trace_buf_size = 0
    config.activation_checkpoint.mode = "none"
    config.training.max_nonfinite_steps = 0  # a loss that is not finite is part of the verdict
    config.debug.seed = 7
    return config


def exact_norm(trainer: Trainer) -> float:
    """Return the gradient norm over all parameters and ranks, in float64."""
    total = torch.zeros((), dtype=torch.float64, device=trainer.device)
    for parameter in (parameter for part in trainer.model_parts for parameter in part.parameters()):
        if (grad := parameter.grad) is not None:
            total += (grad.full_tensor() if isinstance(grad, DTensor) else grad).double().square().sum()
    if trainer.parallel_dims.pp_enabled:  # each stage holds other layers
        dist.all_reduce(total, group=trainer.parallel_dims.get_mesh("pp").get_group())
    return total.sqrt().item()


def train(config: JobConfig, rank: int = 0, ranks: int = 1, port: int = 0, perturbation: int = 0) -> Curve:
    """Train as one of ``ranks`` and record the metrics. Initial weights are changed by ``perturbation`` ulps."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    check_job(config, ranks)
    with tempfile.TemporaryDirectory() as folder:
        config.job.dump_folder = folder
        curve = _train(config, perturbation)
    dist.destroy_process_group()
    gc.collect()  # TorchTitan disables automatic collection, and a Trainer has reference cycles
    return curve


def _train(config: JobConfig, perturbation: int) -> Curve:
    trainer = Trainer(config)
    curve = Curve([], [], [])
    if perturbation:
        with torch.no_grad():
            for parameter in trainer.model_parts[0].parameters():
                parameter.mul_(1 + perturbation * torch.finfo(torch.float32).eps)

    def log(step: int, loss: float, max_loss: float, norm: float, **kwargs: Any) -> None:
        curve.losses.append(loss)
        curve.norms.append(norm)

    trainer.metrics_processor.log = log  # type: ignore[method-assign]
    trainer.optimizers.register_step_pre_hook(lambda *_: curve.exact_norms.append(exact_norm(trainer)))
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(config.training.steps):
        trainer.step += 1
        trainer.train_step(batches)
    trainer.close()
    return curve
