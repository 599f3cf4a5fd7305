"""Base class for context parallelism of custom attention.

TorchTitan exchanges keys and values inside its scaled dot-product attention. For another attention, the job names
a subclass of :class:`ContextParallel` that defines the communication:

    [npu]
    context_parallel = "my_package.my_module:MyContextParallel"
"""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module, prepare_context_parallel_input

from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.dist_utils import Microbatches, SequenceSplit
from torchtitan_npu.layers.documents import DOCUMENT_ENDS, positions_in_documents


class ContextParallel:
    """Give each rank its tokens of every sequence. A subclass implements :meth:`parallelize`.

    By default a rank has one contiguous chunk, with ``load_balancer`` "headtail" two: see :class:`SequenceSplit`.
    """

    load_balancers: ClassVar[tuple[str | None, ...]] = (None,)
    """The values of ``parallelism.context_parallel_load_balancer`` that a subclass supports."""

    def __init__(self, mesh: DeviceMesh, load_balancer: str | None) -> None:
        if load_balancer not in self.load_balancers:
            raise ValueError(f"{type(self).__name__} has no load balancer {load_balancer!r}")
        self.mesh = mesh
        self.split = SequenceSplit(mesh.size(), head_tail=load_balancer == "headtail")

    @classmethod
    def model_error(cls, model: nn.Module) -> str | None:
        """Return why this class cannot parallelize ``model``, which has all its layers, or ``None``."""
        return None

    def parallelize(self, model: nn.Module) -> None:
        """Change the attention of ``model`` so that it sees all tokens.

        Called before activation checkpointing, compilation and FSDP.
        """
        raise NotImplementedError

    def token_indices(self, seq_len: int) -> Tensor:
        """Return the indices (seq_len / ranks) of this rank's tokens in a sequence, in this rank's order."""
        split = self.split
        if seq_len % split.chunks:
            raise ValueError(f"{seq_len} tokens cannot be split over {split.ranks} context-parallel ranks")
        return split.token_indices(self.mesh.get_local_rank(), seq_len, self.mesh.device_type)

    def prepare(
        self, inputs: Tensor, labels: Tensor, extra_kwargs: dict[str, Any], *_: Any
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return this rank's tokens of ``inputs`` and ``labels`` (bsz, seqlen), with their positions for the model.

        The signature is that of TorchTitan's ``prepare_context_parallel_input``.
        """
        indices = self.token_indices(inputs.shape[1])
        masks = extra_kwargs.get("attention_masks")
        if isinstance(masks, Microbatches):
            bsz, seqlen = inputs.shape[0] // len(masks.values), inputs.shape[1]
            extra_kwargs = extra_kwargs | {"attention_masks": masks.map(lambda each: self.masks(each, bsz, seqlen))}
        elif masks is not None:
            extra_kwargs = extra_kwargs | {"attention_masks": self.masks(masks, *inputs.shape)}
        positions = indices.to(torch.int32).expand(inputs.shape[0], -1)
        return inputs[:, indices], labels[:, indices], extra_kwargs | {"positions": positions}

    def masks(self, masks: Any, bsz: int, seqlen: int) -> Any:
        """Return this rank's form of ``masks``, which are those of full sequences; in a pipeline, of a microbatch."""
        raise NotImplementedError(f"{type(self).__name__} takes no attention masks")


def apply_context_parallel(model: nn.Module, job_config: JobConfig, dims: ParallelDims) -> bool:
    """Parallelize the attention of ``model`` by its :func:`context_class`, if it has one. Return whether it has.

    The instance is ``model.context_parallel``, which :func:`model_inputs` uses for every batch.
    """
    cls = context_class(job_config, model) if dims.cp_enabled else None
    if cls is None:
        return False
    context = cls(dims.get_mesh("cp"), job_config.parallelism.context_parallel_load_balancer)
    context.parallelize(model)
    model.context_parallel = context  # type: ignore[assignment]
    return True


WITHOUT_ATTENTION = {apply_cp_to_attention_module: lambda *args: None}
"""Replacement in a parallel plan: TorchTitan's function parallelizes scaled dot-product attention only."""


def context_class(job_config: JobConfig, model: nn.Module) -> type[ContextParallel] | None:
    """Return the class that ``npu.context_parallel`` names, or else that of the model."""
    if name := with_all_sections(job_config).npu.context_parallel:
        module_name, _, class_name = name.partition(":")
        return getattr(importlib.import_module(module_name), class_name)
    return getattr(model, "context_parallel_class", None)


def model_inputs(
    input_dict: dict[str, Tensor],
    labels: Tensor,
    *,
    model: Any,
    model_args: Any,
    tokenizer: Any,
    dims: ParallelDims,
    job_config: JobConfig,
) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
    """Turn a batch into what the model gets: inputs, labels, and extra inputs and keyword arguments.

    This is ``post_dataloading_process`` of TorchTitan's Trainer, with the model's context parallel, if it has one, in
    place of TorchTitan's. TorchTitan's Validator makes attention masks for scaled dot-product attention too, and models
    refuse them; here they are made only for a model that takes them.
    """
    inputs = input_dict["input"]
    extra_inputs = {name: value for name, value in input_dict.items() if name not in ("input", DOCUMENT_ENDS)}
    document_ends = input_dict.get(DOCUMENT_ENDS)
    extra_kwargs: dict[str, Any] = {}
    if takes_attention_masks(model_args):
        marked = inputs
        if document_ends is not None:
            # models look for eos tokens, and for nothing else; a conversation may have them inside, or none at its end
            marked = torch.where(document_ends, tokenizer.eos_id, tokenizer.eos_id + 1)
        extra_kwargs["attention_masks"] = model.get_attention_masks(
            input_batch=marked, tokenizer=tokenizer, extra_inputs=extra_inputs
        )
    elif document_ends is not None and getattr(model_args, "takes_document_positions", False):
        extra_inputs["positions"] = positions_in_documents(document_ends).expand(3, -1, -1)
    if dims.cp_enabled:
        context: ContextParallel | None = getattr(model, "context_parallel", None)
        prepare = context.prepare if context else prepare_context_parallel_input
        inputs, labels, extra_kwargs = prepare(
            inputs,
            labels,
            extra_kwargs,
            dims.get_mesh("cp"),
            inputs.device,
            job_config.parallelism.context_parallel_load_balancer,
        )
    return inputs, labels, extra_inputs, extra_kwargs


def takes_attention_masks(model_args: Any) -> bool:
    """Return whether the model takes attention masks: its arguments say so, those of TorchTitan by ``attn_type``."""
    by_type = getattr(model_args, "attn_type", "sdpa") in ("flex", "varlen")
    return getattr(model_args, "takes_attention_masks", by_type)
