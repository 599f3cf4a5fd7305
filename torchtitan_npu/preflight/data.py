"""Checks of the section ``[data]``."""

from __future__ import annotations

from typing import Any

from torchtitan_npu.config.data import USER_DATASETS, Data
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.check_helpers import check_adapted
from torchtitan_npu.preflight.job_context import JobContext


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
