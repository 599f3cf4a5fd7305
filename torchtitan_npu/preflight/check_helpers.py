"""Checks that several sections share. Each raises :class:`UsageError` with the key, its value and the limit."""

from __future__ import annotations

from typing import Any

from torchtitan_npu import platform
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext


def check_not_on_cpu(options: dict[str, bool]) -> None:
    """Raise for the first of ``options`` (key to whether the job sets it) that is set in a job for the CPU."""
    if platform.job_backend() != "cpu":
        return
    for key, is_set in options.items():
        if is_set:
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
