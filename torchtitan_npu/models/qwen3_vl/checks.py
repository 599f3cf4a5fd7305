"""Checks of a job's options against Qwen3-VL, before the start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchtitan.config import JobConfig

from torchtitan_npu.config.job_config import npu_options
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.qwen3_vl.shapes_dataset import SEEDS

if TYPE_CHECKING:
    from torchtitan_npu.models.qwen3_vl.args import Qwen3VLModelArgs


def check_parallelism(args: Qwen3VLModelArgs, job_config: JobConfig) -> None:
    parallelism = job_config.parallelism
    if parallelism.context_parallel_degree > 1:
        raise UsageError(
            f"parallelism.context_parallel_degree is {parallelism.context_parallel_degree}; it must be 1 for "
            "qwen3_vl: context parallel does not split images and their three-axis positions"
        )
    if parallelism.pipeline_parallel_degree > 1:
        raise UsageError(
            f"parallelism.pipeline_parallel_degree is {parallelism.pipeline_parallel_degree}; it must be 1 for "
            "qwen3_vl: images are not split into microbatches, and later stages would need their features"
        )
    if args.vision.n_heads % parallelism.tensor_parallel_degree:
        raise UsageError(
            f"parallelism.tensor_parallel_degree {parallelism.tensor_parallel_degree} does not divide the "
            f"{args.vision.n_heads} heads of the vision tower"
        )


def check_pictures(args: Qwen3VLModelArgs, job_config: JobConfig) -> None:
    """Check the options of datasets of pictures."""
    for name in ("training", "validation") if job_config.validation.enable else ("training",):
        dataset = getattr(job_config, name).dataset
        if dataset.lower() in SEEDS and not npu_options(job_config).layout_independent_data:
            raise UsageError(
                f"npu.layout_independent_data must be true with {name}.dataset {dataset!r}: every rank draws its own "
                "rows, and TorchTitan's loader splits a stream"
            )
    validation = job_config.validation
    if validation.enable and validation.dataset.lower() in SEEDS and validation.steps == -1:
        raise UsageError("validation.steps must be at least 1: the dataset of pictures is infinite")
