"""The values that checks derive from a job, each computed on first use, and the checks that several sections share."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec

from torchtitan_npu import platform
from torchtitan_npu.components.replay.install import header_of_model
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.pipeline import pipeline_stages
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.base import Converter
from torchtitan_npu.distributed.context_parallel import ContextParallel, context_class
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.distributed.tied_weights import ties_weights
from torchtitan_npu.errors import UsageError


class JobContext:
    """A job and the values derived from it that several checks use."""

    def __init__(self, config: JobConfig, world_size: int) -> None:
        self.config, self.world_size = config, world_size

    @cached_property
    def train_spec(self) -> TrainSpec:
        return get_train_spec(self.config.model.name)

    @property
    def is_adapted(self) -> bool:
        """True if the train spec is one of this package's, with its data, loss and optimizers."""
        return getattr(self.train_spec, "is_adapted", False)

    @property
    def flavor_args(self) -> Any:
        """The arguments of the flavor, before the job's options are applied."""
        return self.train_spec.model_args[self.config.model.flavor]

    @property
    def attention(self) -> str:
        return getattr(self.flavor_args, "attn_type", "sdpa")

    @cached_property
    def dims(self) -> ParallelDims:
        p = self.config.parallelism
        return ParallelDims(
            dp_replicate=p.data_parallel_replicate_degree,
            dp_shard=p.data_parallel_shard_degree,
            cp=p.context_parallel_degree,
            tp=p.tensor_parallel_degree,
            pp=p.pipeline_parallel_degree,
            ep=p.expert_parallel_degree,
            etp=p.expert_tensor_parallel_degree,
            world_size=self.world_size,
        )

    @cached_property
    def tokenizer(self) -> BaseTokenizer | None:
        build = self.train_spec.build_tokenizer_fn
        return build(self.config) if build else None

    @cached_property
    def model(self) -> nn.Module:
        return build_on_meta(self.config)

    @property
    def model_args(self) -> Any:
        return getattr(self.model, "model_args", None)

    @property
    def n_layers(self) -> int:
        return self.model_args.n_layers if hasattr(self.model_args, "n_layers") else self.dims.pp

    @property
    def ties_weights(self) -> bool:
        return ties_weights(self.model)

    @property
    def pipeline_stages(self) -> list[list[str]]:
        return pipeline_stages(self.config, self.n_layers)

    @cached_property
    def converters(self) -> list[Converter]:
        """This package's converters among those that the job lists."""
        names = self.config.model.converters
        return [CONVERTERS[name](self.config, self.dims) for name in names if name in CONVERTERS]

    @cached_property
    def context_parallel_class(self) -> type[ContextParallel] | None:
        """The class for the model's attention; ``None`` if TorchTitan's context parallelism applies."""
        return context_class(self.config, self.model)

    @cached_property
    def replay_header(self) -> Any:
        """The header of a record of this job's routing decisions."""
        return header_of_model(self.config, build_on_meta(self.config))


def build_on_meta(config: JobConfig) -> nn.Module:
    """Return the job's model on the meta device, without memory; at most a second or two for the largest."""
    spec = get_train_spec(config.model.name)
    args = copy.deepcopy(spec.model_args[config.model.flavor])
    try:
        args.update_from_config(config)
    except NotImplementedError as error:  # TorchTitan's error for layouts that a flavor's attention does not have
        raise UsageError(f"model.flavor {config.model.flavor!r} of {config.model.name}: {error}") from error
    with torch.device("meta"):
        return spec.model_cls(args)  # type: ignore[return-value]


def first_set(options: dict[str, bool]) -> str | None:
    """Return the first of ``options`` that is true, if any."""
    return next((option for option, is_set in options.items() if is_set), None)


def check_not_on_cpu(options: dict[str, bool]) -> None:
    """Raise for the first of ``options`` (key to whether the job sets it) that is set in a job for the CPU."""
    if platform.job_backend() == "cpu" and (key := first_set(options)):
        raise UsageError(f"{key} needs an accelerator; this job runs on the CPU")


def check_adapted(job: JobContext, feature: str, remedy: str = "") -> None:
    """Raise unless the model's TrainSpec is one that this package has adapted, which ``feature`` needs."""
    if not job.is_adapted:
        raise UsageError(
            f"{feature} needs the TrainSpec of model.name {job.config.model.name!r} to be registered as "
            f"torchtitan_npu.train_specs.adapt.adapt(spec){remedy}"
        )


def takes_section(job: JobContext, section: str) -> bool:
    """Return whether the model takes ``section``; raise if it does not and the job sets a key there.

    A model lists the sections it takes in ``config_sections`` of its arguments' class.
    """
    options: Any = getattr(job.config, section)
    if section in getattr(type(job.flavor_args), "config_sections", ()):
        return True
    if options != type(options)():
        raise UsageError(f"[{section}] does not apply to model.name {job.config.model.name!r}; remove the section")
    return False
