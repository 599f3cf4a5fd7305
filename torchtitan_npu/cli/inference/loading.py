"""Build the model of a job for inference, on one rank or on the job's layout, and load its weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as dist_utils
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools import utils

from torchtitan_npu.cli.arguments import without_log
from torchtitan_npu.cli.inference.kv_cache import CachedTokens, attach_caches
from torchtitan_npu.components.checkpoint.folder import METADATA
from torchtitan_npu.components.checkpoint.loading import load_weights
from torchtitan_npu.components.checkpoint.source import CheckpointSource
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.parser import load_job
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.files import check_source
from torchtitan_npu.preflight.job import check_job
from torchtitan_npu.preflight.model import check_tokenizer

MODELS = ("llama3", "qwen3", "deepseek_v3", "deepseek_v32", "glm_moe_dsa")
DEGREES = ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel", "expert_parallel")
ANGLES = ("freqs_cis", "rope_cache")
"""The models' buffers of rotary angles, (positions, width)."""


class InferenceModel(NamedTuple):
    """A model with weights, and what is needed to run it."""

    model: Any
    args: Any
    tokenizer: BaseTokenizer
    dims: ParallelDims
    device: torch.device
    tokens: CachedTokens
    dtype: str
    """The job's ``training.mixed_precision_param``."""

    @property
    def longest(self) -> int:
        """Number of tokens in the longest sequence: the job's ``training.seq_len``.

        With tensor parallel, the forward pass of the last token is padded to a multiple of the ranks.
        """
        return getattr(self.args, "seq_len", self.args.max_seq_len) - max(0, self.dims.tp - 2)

    @torch.no_grad()
    def logits(self, rows: Tensor, start: int = 0, padding: list[int] | None = None, only_last: bool = False) -> Tensor:
        """Return the logits (bsz, new tokens, vocab_size) in float32.

        Args:
            rows: (bsz, tokens), each padded at the left. The tokens before ``start`` are in the cache.
            start: number of tokens in the cache; 0 clears it
            padding: number of padding tokens of each row, by default none
            only_last: compute the logits of the last token only, (bsz, 1, vocab_size)
        """
        new = rows[:, start:].to(self.device)
        count = new.shape[1]
        # tensor parallel splits the sequence between blocks, so it must divide it; no token sees a later one
        new = torch.nn.functional.pad(new, (0, -count % self.dims.tp))
        documents = self.tokens.prepare(start, new.shape[1], padding or [0] * len(rows), self.device)
        masks = {"attention_masks": documents} if documents and hasattr(self.args, "index_topk") else {}
        amp = dist_utils.maybe_enable_amp(self.dims, self.dtype, self.device.type)
        selected = slice(count - 1, count) if only_last else slice(count)
        with amp, angles_from(self.model, start), logits_of(self.model, selected):
            return self.model(new, **masks).float()


@contextmanager
def angles_from(model: Any, start: int) -> Iterator[None]:
    """Let the model's buffer of rotary angles begin with position ``start``.

    ``positions`` of the models' forward cannot be used: TorchTitan's tensor-parallel plans of qwen3 and deepseek_v3 do
    not accept it without context parallel. All rows have the same positions. Attention depends on their differences.
    """
    name = next(name for name in ANGLES if hasattr(model, name))
    vars(model)[name] = getattr(model, name)[start:]  # an instance attribute hides the buffer, which stays registered
    try:
        yield
    finally:
        del vars(model)[name]


@contextmanager
def logits_of(model: Any, selected: slice) -> Iterator[None]:
    """Compute the logits of the ``selected`` tokens only: those of a long prompt would need gigabytes.

    The hook follows that of tensor parallel, which gathers the sequence.
    """
    hook = model.output.register_forward_pre_hook(lambda _, args: (args[0][:, selected],))
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def quiet_session() -> Iterator[None]:
    """Run a command without TorchTitan's log, and destroy the process group that :func:`load_model` created."""
    with without_log():
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


def read_config(file: str, options: list[str]) -> JobConfig:
    """Return the job's configuration, with further ``--section.key value`` options."""
    return load_job(["--job.config_file", file, *options])


def load_model(config: JobConfig, checkpoint: Path, capacity: int | None = None) -> InferenceModel:
    """Build the model of the job ``config`` with the weights in the folder ``checkpoint``.

    Under torchrun it has the job's layout, otherwise it is on one rank. ``capacity`` is the number of tokens in a row
    of the cache, by default the job's sequence length.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config = for_inference(config, world_size)
    source = find_weights(checkpoint)
    config.checkpoint.initial_load_in_hf_quantized &= source.in_hugging_face_format
    job = check_job(config, world_size)
    check_tokenizer(job)
    check_source(job, source, "--checkpoint")

    device = torch.device(utils.device_type, int(os.environ.get("LOCAL_RANK", "0")))
    utils.device_module.set_device(device)
    if world_size > 1 and not dist.is_initialized():
        dist_utils.init_distributed(config.comm, base_folder=config.job.dump_folder)
    spec, dims = job.train_spec, job.dims
    args: Any = copy.deepcopy(spec.model_args[config.model.flavor])
    args.update_from_config(config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model: Any = spec.model_cls(args)
    build_model_converters(config, dims).convert(model)
    tokens = attach_caches(model)
    model = spec.parallelize_fn(model, dims, config)
    model.to_empty(device=device.type)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    model.eval()
    adapter = spec.state_dict_adapter(args, None) if spec.state_dict_adapter else None
    load_weights(model, source, adapter, config.checkpoint.initial_load_in_hf_quantized)
    assert job.tokenizer is not None
    loaded = InferenceModel(model, args, job.tokenizer, dims, device, tokens, config.training.mixed_precision_param)
    tokens.capacity = (capacity or loaded.longest) + dims.tp  # and the padding of tensor parallel
    return loaded


def for_inference(config: JobConfig, world_size: int) -> JobConfig:
    """Return an inference config: strip training-only options; raise if the model has no KV cache."""
    config = copy.deepcopy(config)
    if config.model.name not in MODELS:
        raise UsageError(
            f"model.name {config.model.name}: there is no cache for this model, only for {', '.join(MODELS)}"
        )
    parallelism = config.parallelism
    if world_size == 1:
        for name in DEGREES:
            setattr(parallelism, f"{name}_degree", 1)
        parallelism.data_parallel_shard_degree = -1
        parallelism.expert_tensor_parallel_degree = 1
    # stages and parts of a sequence cannot compute one token together: their ranks shard the weights as FSDP's do
    if parallelism.data_parallel_shard_degree > 0:  # -1 follows from the other degrees
        parallelism.data_parallel_shard_degree *= parallelism.pipeline_parallel_degree
        parallelism.data_parallel_shard_degree *= parallelism.context_parallel_degree
    parallelism.pipeline_parallel_degree = parallelism.context_parallel_degree = 1
    parallelism.disable_loss_parallel = True  # every rank gets all logits
    parallelism.enable_async_tensor_parallel = False  # needs compile
    config.training.local_batch_size, config.training.global_batch_size = 1, -1
    config.training.enable_cpu_offload = False
    config.activation_checkpoint.mode = "none"
    config.compile.enable = False
    config.checkpoint.enable = config.validation.enable = config.profiling.enable_profiling = False
    config.checkpoint.initial_load_path, config.checkpoint.initial_load_in_hf = "", False
    config.npu.loss_chunk_tokens, config.npu.graph_passes = 0, []
    config.dsa.document_mask = False
    return config


def find_weights(folder: Path) -> CheckpointSource:
    """Return the checkpoint in ``folder``: a job's (DCP), or safetensors files of Hugging Face."""
    if not folder.is_dir():
        raise UsageError(f"--checkpoint {folder} is not a folder")
    if (folder / METADATA).exists():
        return CheckpointSource(folder, model_only=True)
    if any(folder.glob("*.safetensors")):
        return CheckpointSource(folder, model_only=True, in_hugging_face_format=True)
    inside = sorted(found.parent.name for found in folder.glob(f"*/{METADATA}"))
    advice = f"name one of its checkpoints: {', '.join(inside)}" if inside else "it is not a checkpoint"
    raise UsageError(f"--checkpoint {folder} has neither {METADATA} nor .safetensors files: {advice}")
