"""Checks of ``[training]``, ``[validation]`` and ``[data]``."""

from __future__ import annotations

import os
from typing import Any

from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_npu import platform
from torchtitan_npu.components import corpus
from torchtitan_npu.components.dataloader import check_data_workers
from torchtitan_npu.components.user_data.packing import build_rows
from torchtitan_npu.config.allowed import check_known
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.sections import USER_DATASETS, Data
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext, check_adapted, check_not_on_cpu


def check_training(job: JobContext) -> None:
    """Check the keys of ``[training]``, and of ``[validation]`` if it is enabled."""
    training, validation = job.config.training, job.config.validation
    check_not_on_cpu({"training.enable_cpu_offload": training.enable_cpu_offload})
    if training.gc_debug and platform.job_backend() != "cuda":
        raise UsageError(
            f"training.gc_debug must be false on a {platform.job_backend().upper()}: torch finds reference cycles of "
            "CUDA tensors only"
        )
    sections: dict[str, Any] = {"training": training}
    if validation.enable:
        sections["validation"] = validation
    for name, section in sections.items():
        if job.is_adapted:  # other train specs may have their own data
            _check_dataset(job, name, section)
        if section.seq_len % job.dims.seq_len_divisor:
            raise UsageError(
                f"{name}.seq_len {section.seq_len} is not a multiple of {job.dims.seq_len_divisor} "
                "(2 × tensor_parallel_degree × context_parallel_degree)"
            )
    if job.is_adapted and validation.enable and validation.seq_len > training.seq_len:
        raise UsageError(
            f"validation.seq_len is {validation.seq_len}; it must be at most training.seq_len, {training.seq_len}: "
            "the model has no rotary angles for later positions"
        )
    _check_nonfinite_steps(job.config)
    data_ranks = job.dims.dp_replicate * job.dims.dp_shard
    if training.global_batch_size > 0 and training.global_batch_size % (training.local_batch_size * data_ranks):
        raise UsageError(
            f"training.global_batch_size {training.global_batch_size} is not a multiple of "
            f"local_batch_size {training.local_batch_size} × {data_ranks} data-parallel ranks"
        )


def _check_nonfinite_steps(config: JobConfig) -> None:
    limit, skips = config.training.max_nonfinite_steps, config.training.skip_nonfinite_steps
    if skips and limit < 2:
        raise UsageError(
            f"training.skip_nonfinite_steps = true needs training.max_nonfinite_steps of at least 2, not {limit}: the "
            "job stops at that many such steps in a row"
        )
    if limit > 1 and not skips:
        raise UsageError(
            f"training.max_nonfinite_steps is {limit}; without training.skip_nonfinite_steps = true it must be 0 or 1: "
            "a step that is not finite cannot update the weights"
        )
    if limit and config.optimizer.early_step_in_backward:
        raise UsageError(
            "optimizer.early_step_in_backward updates the weights before the gradients are checked: set "
            "training.max_nonfinite_steps = 0, which turns the check off"
        )


def _check_dataset(job: JobContext, name: str, section: Any) -> None:
    check_known(f"{name}.dataset", section.dataset.lower(), DATASETS)
    loads_texts = DATASETS[section.dataset.lower()].loader in (corpus.load_texts, corpus.stream_texts)
    if section.dataset_path and loads_texts:
        corpus.text_files(section.dataset_path, f"{name}.dataset_path")  # raises if it is not readable
    if job.config.npu.layout_independent_data:
        check_data_workers(name, section)


def check_dataset_files(job: JobContext) -> None:
    """Raise if the user's data cannot be read, or for TorchTitan's test dataset, which is not part of its package."""
    sections = {"training": job.config.training, "validation": job.config.validation}
    for name, section in sections.items():
        used = job.is_adapted and (name == "training" or job.config.validation.enable)
        if used and section.dataset.lower() in USER_DATASETS:
            build_rows(name, job.tokenizer, job.config, infinite=True)  # raises if it cannot be read
        path = section.dataset_path or DATASETS["c4_test"].path
        if used and section.dataset.lower() == "c4_test" and not os.path.exists(path):
            raise UsageError(
                f"{name}.dataset 'c4_test' reads {path}, which exists in TorchTitan's checkout only: set "
                f'{name}.dataset = "tiny_corpus", or {name}.dataset_path'
            )


def check_data(job: JobContext) -> None:
    """Check the section against the datasets that the job reads."""
    data, config = job.config.data, job.config
    sections: dict[str, Any] = {"training": config.training}
    if config.validation.enable:
        sections["validation"] = config.validation
    datasets = {name: section.dataset.lower() for name, section in sections.items()}
    used = {name: dataset for name, dataset in datasets.items() if dataset in USER_DATASETS}
    if not used:
        if data != Data():
            raise UsageError(
                f'[data] is for training.dataset "text" or "chat", not {config.training.dataset!r}: remove the section'
            )
        return
    for name, dataset in used.items():
        check_adapted(job, f"{name}.dataset {dataset!r}")
        if not config.npu.layout_independent_data:
            raise UsageError(f"npu.layout_independent_data must be true with {name}.dataset {dataset!r}")
    _check_paths(data, datasets, config)
    only = {"chat_template": "chat", "too_long": "chat", "txt_documents": "text"}
    for key, dataset in only.items():
        if getattr(data, key) != getattr(Data(), key) and dataset not in used.values():
            raise UsageError(f'data.{key} is for dataset "{dataset}", which the job does not read')


def _check_paths(data: Data, datasets: dict[str, str], config: Any) -> None:
    reads_paths = datasets["training"] in USER_DATASETS
    if data.paths and not reads_paths:
        raise UsageError(
            f'data.paths is for training.dataset "text" or "chat", not {config.training.dataset!r}; validation data '
            "is in validation.dataset_path"
        )
    if data.paths and config.training.dataset_path:
        raise UsageError("data.paths and training.dataset_path are both set: remove one")
    if reads_paths and not data.paths and not config.training.dataset_path:
        raise UsageError(
            f"training.dataset {config.training.dataset!r} needs training.dataset_path, or several in data.paths"
        )
    if datasets.get("validation") in USER_DATASETS and not config.validation.dataset_path:
        raise UsageError(f"validation.dataset {config.validation.dataset!r} needs validation.dataset_path")
    if data.weights and len(data.weights) != len(data.paths):
        raise UsageError(
            f"data.weights has {len(data.weights)} numbers for the {len(data.paths)} entries of data.paths"
        )
