"""Checks a job before anything is started or written; what cannot run is one line that names the key to change."""

from __future__ import annotations

import copy
import math
import os
from collections import Counter
from typing import Any

import torch
from torch import nn
from torchtitan.config.job_config import Training, Validation
from torchtitan.experiments import _supported_experiments
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models import _supported_models
from torchtitan.models.moe.moe import MoE
from torchtitan.protocols.train_spec import TrainSpec, _extra_train_specs, get_train_spec

from torchtitan_npu import platform
from torchtitan_npu.compile.passes import GraphPasses
from torchtitan_npu.compile.regions import compiled_here
from torchtitan_npu.config.job_config import JobConfig, Npu
from torchtitan_npu.config.pipeline_check import check_pipeline
from torchtitan_npu.converters import CONVERTERS, known_converters
from torchtitan_npu.distributed.context_parallel import ContextParallel, context_class
from torchtitan_npu.errors import UsageError, nearest
from torchtitan_npu.upstream.adapted_spec import AdaptedTrainSpec
from torchtitan_npu.upstream.parallel_dims import ParallelDims
from torchtitan_npu.upstream.tied_weights import ties_weights


def check_job(config: JobConfig, world_size: int) -> None:
    """Raise :class:`UsageError` for the first thing that keeps ``config`` from running on ``world_size`` ranks."""
    _known("model.name", config.model.name, {*_supported_models, *_supported_experiments, *_extra_train_specs})
    spec = get_train_spec(config.model.name)
    _known("model.flavor", config.model.flavor, spec.model_args)
    if isinstance(spec, AdaptedTrainSpec):  # others may bring data of their own
        _check_data("training", config.training)
        if config.validation.enable:
            _check_data("validation", config.validation)
            if config.validation.seq_len > config.training.seq_len:
                raise UsageError(
                    f"validation.seq_len is {config.validation.seq_len}; it must be at most training.seq_len, "
                    f"{config.training.seq_len}: the model has no angles for later positions"
                )
    _known("optimizer.name", config.optimizer.name, ("Adam", "AdamW"))
    if config.optimizer.swap:
        _check_swap(config, spec)
    if compiled_here(config):
        _check_compile(config, spec)
    elif config.npu.graph_passes:
        raise UsageError("npu.graph_passes needs compile.enable = true")
    _check_used(config)
    _check_converters(config)
    _check_seed_checkpoint(config, world_size)
    dims = _check_layout(config, world_size)
    converters = [CONVERTERS[name](config, dims) for name in config.model.converters if name in CONVERTERS]
    for converter in converters:
        converter.check_job()
    _check_batch(config, dims)
    if platform.job_backend() != "cuda":
        _check_attention(config, spec)
    if platform.job_backend() == "cpu":
        _check_cpu(config)
    if dims.pp_enabled and not isinstance(spec, AdaptedTrainSpec):
        raise UsageError(
            f"parallelism.pipeline_parallel_degree must be 1 for model.name {config.model.name!r} unless its TrainSpec "
            "is registered as torchtitan_npu.upstream.train_specs.adapt(spec): "
            "the gradients would be those of the summed loss"
        )
    model = build_on_meta(config)
    _check_model(config, dims, model)
    _check_options(config, dims, model)
    for converter in converters:
        converter.check_limits(converter.found_targets(model))


def _known(key: str, value: str, known: object) -> None:
    names = sorted(known)  # type: ignore[call-overload]
    if value not in names:
        known_names = ", ".join(name or '""' for name in names)
        raise UsageError(f"{key} {value!r} is not known{nearest(value, names)} (known: {known_names})")


def _check_data(section: str, data: Training | Validation) -> None:
    _known(f"{section}.dataset", data.dataset.lower(), DATASETS)
    for key in ("local_batch_size", "seq_len"):
        if getattr(data, key) < 1:
            raise UsageError(f"{section}.{key} is {getattr(data, key)}; it must be at least 1")
    if data.dataset_path and "tiny_corpus" in data.dataset.lower() and not os.path.exists(data.dataset_path):
        raise UsageError(f"{section}.dataset_path {data.dataset_path}: no such file or folder")


def _check_converters(config: JobConfig) -> None:
    for name, times in Counter(config.model.converters).items():
        _known("model.converters:", name, known_converters())
        if times > 1:
            raise UsageError(f"model.converters lists {name!r} {times} times; once is enough")


def _check_swap(config: JobConfig, spec: TrainSpec) -> None:
    optimizer = config.optimizer
    if optimizer.swap_slice_mib < 1:
        raise UsageError(f"optimizer.swap_slice_mib is {optimizer.swap_slice_mib}; it must be at least 1")
    if not 0 < optimizer.swap_fraction <= 1:
        raise UsageError(f"optimizer.swap_fraction is {optimizer.swap_fraction}; it must be above 0 and at most 1")
    refused = {
        # one parameter at a time, as its gradient comes in: nothing is left to overlap
        "optimizer.early_step_in_backward": optimizer.early_step_in_backward,
        "training.enable_cpu_offload": config.training.enable_cpu_offload,  # the states are in host memory already
        "fault_tolerance.enable": config.fault_tolerance.enable,  # it brings an optimizer container of its own
    }
    for key, asked in refused.items():
        if asked:
            raise UsageError(f"optimizer.swap does not go with {key} = true")
    if not isinstance(spec, AdaptedTrainSpec):
        raise UsageError(
            f"optimizer.swap needs the TrainSpec of model.name {config.model.name!r} to be registered as "
            "torchtitan_npu.upstream.train_specs.adapt(spec)"
        )


def _check_compile(config: JobConfig, spec: TrainSpec) -> None:
    """What a job cannot have that bypasses code generation or has graph passes; without compile.enable all goes."""
    bypassing = config.npu.bypass_codegen
    key, mend = "npu.bypass_codegen", "set it to false or compile.enable to false"
    if not bypassing:
        key, mend = "npu.graph_passes", "set it to []"
    if config.compile.backend != "inductor":
        why = "otherwise a backend of our own does" if bypassing else "with them Inductor does"
        only = "npu.bypass_codegen = false" if bypassing else "npu.graph_passes = []"
        raise UsageError(f"compile.backend {config.compile.backend!r} compiles only with {only}: {why}")
    attention = getattr(spec.model_args[config.model.flavor], "attn_type", "sdpa")
    refused = {
        # its cut between forward and backward is the code generator's, which TorchTitan has to set up
        'activation_checkpoint.mode = "memory_budget"': config.activation_checkpoint.mode == "memory_budget",
        # Inductor's pass; ours is asked for by name
        'parallelism.enable_async_tensor_parallel = true (take npu.graph_passes = ["async_tp"])': (
            config.parallelism.enable_async_tensor_parallel
        ),
        # whose kernel is generated, and which no region of ours was tried with
        f"flex attention (model.flavor {config.model.flavor!r})": attention == "flex",
        f'compile.components {config.compile.components} without "model", which alone is compiled': (
            "model" not in config.compile.components
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise UsageError(f"{key} does not go with {what}; {mend}")
    GraphPasses(config.npu.graph_passes, config.npu.sp_min_tokens)  # which knows the names
    if not isinstance(spec, AdaptedTrainSpec):
        raise UsageError(
            f"{key} needs the TrainSpec of model.name {config.model.name!r} to be registered as "
            f"torchtitan_npu.upstream.train_specs.adapt(spec); {mend}"
        )


def _check_used(config: JobConfig) -> None:
    """A key of a pass that the job does not have would change nothing, and nothing would say so."""
    defaults = Npu()
    for key in ("sp_min_tokens", "sp_whole_inputs"):
        if getattr(config.npu, key) != getattr(defaults, key) and "sequence_parallel" not in config.npu.graph_passes:
            raise UsageError(f'npu.{key} is for the pass "sequence_parallel", which npu.graph_passes does not list')


def _check_seed_checkpoint(config: JobConfig, world_size: int) -> None:
    if config.checkpoint.create_seed_checkpoint:
        if world_size != 1:
            raise UsageError(f"checkpoint.create_seed_checkpoint wants one rank, not {world_size}")
        if not config.checkpoint.enable:
            raise UsageError("checkpoint.create_seed_checkpoint needs checkpoint.enable = true")


def _check_layout(config: JobConfig, world_size: int) -> ParallelDims:
    p = config.parallelism
    shard = p.data_parallel_shard_degree
    degrees = {
        "data_parallel_replicate_degree": p.data_parallel_replicate_degree,
        "data_parallel_shard_degree": shard,
        "context_parallel_degree": p.context_parallel_degree,
        "tensor_parallel_degree": p.tensor_parallel_degree,
        "pipeline_parallel_degree": p.pipeline_parallel_degree,
    }
    ep, etp, tp = p.expert_parallel_degree, p.expert_tensor_parallel_degree, p.tensor_parallel_degree
    experts = {"expert_parallel_degree": ep, "expert_tensor_parallel_degree": etp}
    for name, degree in {**degrees, **experts}.items():
        if degree < 1 and (name, degree) != ("data_parallel_shard_degree", -1):
            raise UsageError(f"parallelism.{name} is {degree}; it must be at least 1")

    fixed = {name: degree for name, degree in degrees.items() if degree != -1}
    product = math.prod(fixed.values())
    if world_size % product if shard == -1 else world_size != product:
        named = " × ".join(f"{name} {degree}" for name, degree in fixed.items() if degree > 1) or "one rank"
        raise UsageError(
            f"{world_size} ranks (torchrun's --nproc_per_node × --nnodes) do not fit the layout: "
            f"{named} takes {'a multiple of ' if shard == -1 else ''}{product}"
        )
    if ep > 1:
        if etp not in (1, tp):
            raise UsageError(
                f"parallelism.expert_tensor_parallel_degree is {etp}; it must be 1 or {tp}, as the tensor's"
            )
        ranks = world_size // (p.pipeline_parallel_degree * p.data_parallel_replicate_degree)
        if ranks % (ep * etp):
            raise UsageError(
                f"parallelism.expert_parallel_degree {ep} × expert_tensor_parallel_degree {etp} does not divide the "
                f"{ranks} ranks of a pipeline stage and replica"
            )
    return ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=shard,
        cp=p.context_parallel_degree,
        tp=tp,
        pp=p.pipeline_parallel_degree,
        ep=ep,
        etp=etp,
        world_size=world_size,
    )


def _check_batch(config: JobConfig, dims: ParallelDims) -> None:
    training = config.training
    data_ranks = dims.dp_replicate * dims.dp_shard
    if training.global_batch_size > 0 and training.global_batch_size % (training.local_batch_size * data_ranks):
        raise UsageError(
            f"training.global_batch_size {training.global_batch_size} is no multiple of "
            f"local_batch_size {training.local_batch_size} × {data_ranks} data-parallel ranks"
        )
    sections = [("training", training.seq_len)]
    if config.validation.enable:
        sections.append(("validation", config.validation.seq_len))
    for section, seq_len in sections:
        if seq_len % dims.seq_len_divisor:
            raise UsageError(
                f"{section}.seq_len {seq_len} is no multiple of {dims.seq_len_divisor} "
                "(2 × tensor_parallel_degree × context_parallel_degree)"
            )


def _check_attention(config: JobConfig, spec: TrainSpec) -> None:
    """Flex and varlen attention have kernels for CUDA only."""
    attention = getattr(spec.model_args[config.model.flavor], "attn_type", "sdpa")
    if attention in ("flex", "varlen"):
        others = [name for name, args in spec.model_args.items() if getattr(args, "attn_type", "sdpa") == "sdpa"]
        raise UsageError(
            f"model.flavor {config.model.flavor!r} has {attention} attention, which trains on CUDA only; "
            f"flavors of {config.model.name} that train here: {', '.join(others) or 'none'}"
        )


def _check_cpu(config: JobConfig) -> None:
    """What TorchTitan can do on accelerators only."""
    refused = {
        "profiling.enable_profiling": config.profiling.enable_profiling,
        "profiling.enable_memory_snapshot": config.profiling.enable_memory_snapshot,
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
        'checkpoint.async_mode = "async_with_pinned_mem"': config.checkpoint.async_mode == "async_with_pinned_mem",
        'parallelism.pipeline_parallel_schedule = "DualPipeV"': (
            config.parallelism.pipeline_parallel_schedule == "DualPipeV"
            and config.parallelism.pipeline_parallel_degree > 1
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise UsageError(f"{what} needs an accelerator; this process runs on the CPU")


def build_on_meta(config: JobConfig) -> nn.Module:
    """The model as the job will build it, on the meta device: no memory, a second or two for the largest."""
    spec = get_train_spec(config.model.name)
    args = copy.deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    with torch.device("meta"):
        return spec.model_cls(args)  # type: ignore[return-value]


def _check_options(config: JobConfig, dims: ParallelDims, model: nn.Module) -> None:
    """Sections that are for some models only, and what they name."""
    args = getattr(model, "model_args", None)
    for section, field in (("dsa", "index_topk"), ("mtp", "n_mtp_layers")):
        options = getattr(config, section)
        if options != type(options)() and not hasattr(args, field):
            raise UsageError(f"[{section}] is for models that have it, and {config.model.name} does not: take it out")
    if dims.cp_enabled:
        _check_context(config, model)


def _check_context(config: JobConfig, model: nn.Module) -> None:
    """How sequences are shared out, and what attention masks there are to share out with them."""
    balancer = config.parallelism.context_parallel_load_balancer
    args = getattr(model, "model_args", None)
    if (context := context_class(config, getattr(args, "context_parallel", None))) is None:
        # TorchTitan's third one rearranges the blocks of flex attention's masks
        flex = ["ptrr"] if getattr(args, "attn_type", "sdpa") == "flex" else []
        return _known("parallelism.context_parallel_load_balancer", balancer or "", ["headtail", "", *flex])
    context.check_load_balancer(balancer)
    if config.dsa.document_mask and context.masks is ContextParallel.masks:
        raise UsageError(f"dsa.document_mask must be false: npu.context_parallel {context.__name__} takes no masks")


def _check_model(config: JobConfig, dims: ParallelDims, model: nn.Module) -> None:
    flavor = f"model.flavor {config.model.flavor!r}"
    if dims.ep_enabled:
        experts = [moe.experts.num_experts for moe in model.modules() if isinstance(moe, MoE)]
        if not experts:
            raise UsageError(
                f"parallelism.expert_parallel_degree must be 1: {flavor} of {config.model.name} has no experts"
            )
        if experts[0] % dims.ep:
            raise UsageError(
                f"parallelism.expert_parallel_degree {dims.ep} does not divide the {experts[0]} experts of {flavor}"
            )
    args: Any = getattr(model, "model_args", None)
    for key in ("n_heads", "n_kv_heads"):
        if (heads := getattr(args, key, None)) and heads % dims.tp:
            raise UsageError(f"parallelism.tensor_parallel_degree {dims.tp} does not divide {key} {heads} of {flavor}")
    if dims.pp_enabled:
        layers = args.n_layers if hasattr(args, "n_layers") else dims.pp
        if layers < dims.pp:
            raise UsageError(f"parallelism.pipeline_parallel_degree {dims.pp} exceeds the {layers} layers of {flavor}")
        check_pipeline(config, layers)
    if dims.cp_enabled and config.validation.enable and not hasattr(model, "freqs_cis"):
        raise UsageError(
            f"validation.enable with context parallel is not offered by TorchTitan for {config.model.name}"
        )
    if dims.pp_enabled and ties_weights(model):
        raise UsageError(
            f"parallelism.pipeline_parallel_degree must be 1: {flavor} ties its output to its embedding, and they "
            "would lie on different stages"
        )
