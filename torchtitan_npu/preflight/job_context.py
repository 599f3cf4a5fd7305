"""The values that checks derive from a job, each computed on first use."""

from __future__ import annotations

import copy
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import build_optimizers, build_optimizers_with_moe_load_balancing
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec

from torchtitan_npu.compile.passes import PASSES
from torchtitan_npu.components import corpus
from torchtitan_npu.components.dataloader import build_text_dataloader
from torchtitan_npu.components.optimizers import SwappableOptimizers
from torchtitan_npu.components.replay.install import header_of_model
from torchtitan_npu.components.replay.record_files import header_difference, naming_the_option, read_header
from torchtitan_npu.components.user_data.packing import build_rows
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.pipeline import pipeline_stages
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.base import Converter
from torchtitan_npu.distributed import matmul_sharding
from torchtitan_npu.distributed.context_parallel import ContextParallel, context_class
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.distributed.tied_weights import ties_weights
from torchtitan_npu.errors import UsageError
from torchtitan_npu.titan_internals.converter_registry import build_converter, is_of_torchtitan, known_converters
from torchtitan_npu.torch_internals.dispatch import OpOverload
from torchtitan_npu.torch_internals.dtensor import has_single_dim_strategy
from torchtitan_npu.train_specs.registry import known_models


class JobContext:
    """A job and the values derived from it that several checks use, computed on first use."""

    def __init__(self, config: JobConfig, world_size: int) -> None:
        self.config = config
        self.world_size = world_size
        self.model_names = known_models(config.model.name)
        self.converter_names = known_converters()
        self.datasets = DATASETS
        self.graph_pass_names = list(PASSES)
        self.context_parallel_base = ContextParallel

    @cached_property
    def train_spec(self) -> TrainSpec:
        return get_train_spec(self.config.model.name)

    @property
    def is_adapted(self) -> bool:
        """True if the train spec is one of this package's, with its data, loss and optimizers."""
        return getattr(self.train_spec, "is_adapted", False)

    @property
    def can_swap_optimizers(self) -> bool:
        """False if the train spec builds optimizers itself: then their states stay on the device."""
        return isinstance(self.train_spec.build_optimizers_fn, SwappableOptimizers)

    @property
    def has_titan_optimizers(self) -> bool:
        """False if the train spec builds optimizers itself, and may know other names of them."""
        build = self.train_spec.build_optimizers_fn
        return self.can_swap_optimizers or build in (build_optimizers, build_optimizers_with_moe_load_balancing)

    @property
    def unshardable_matmuls(self) -> list[OpOverload]:
        """The matrix products for which torch prefers its own strategy to this package's."""
        return [op for op in matmul_sharding.OPS if has_single_dim_strategy(op)]

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

    @property
    def titan_converter_names(self) -> list[str]:
        """TorchTitan's converters among those that the job lists."""
        return [name for name in self.config.model.converters if is_of_torchtitan(name)]

    def build_converter(self, name: str) -> object:
        return build_converter(name, self.config, self.dims)

    @cached_property
    def context_parallel_class(self) -> type[ContextParallel] | None:
        """The class for the model's attention; ``None`` if TorchTitan's context parallelism applies."""
        return context_class(self.config, self.model)

    @property
    def context_parallel_without_masks(self) -> type[ContextParallel] | None:
        """The class for the model's attention if the job uses it and it takes no attention masks, else ``None``."""
        cls = self.context_parallel_class if self.dims.cp_enabled else None
        return cls if cls is not None and cls.masks is ContextParallel.masks else None

    def check_user_data(self, name: str) -> None:
        """Raise if the data of section ``name``, a dataset of the user, cannot be read here."""
        build_rows(name, self.tokenizer, self.config, infinite=True)

    @property
    def reads_text(self) -> bool:
        """True if the tokens of a sequence are the model's only input."""
        return self.train_spec.build_dataloader_fn is build_text_dataloader

    @cached_property
    def replay_header(self) -> Any:
        """The header of a record of this job's choices."""
        return header_of_model(self.config, build_on_meta(self.config))

    @property
    def replay_difference(self) -> str | None:
        """A difference between the record to replay and this job, or ``None``."""
        with naming_the_option():
            return header_difference(read_header(Path(self.config.replay.replay)), self.replay_header)

    def check_dataset_path(self, name: str, section: Any) -> None:
        """Raise if ``section.dataset_path`` is not readable by the loader of this package's corpora."""
        dataset = DATASETS[section.dataset.lower()]
        if section.dataset_path and dataset.loader in (corpus.load_texts, corpus.stream_texts):
            corpus.text_files(section.dataset_path, f"{name}.dataset_path")


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
