"""Checks of the section ``[mxfp8]``."""

from __future__ import annotations

from torchtitan_npu.config.mxfp8 import Mxfp8
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job_context import JobContext


def check_mxfp8(job: JobContext) -> None:
    options = job.config.mxfp8
    if "npu_mxfp8" not in job.config.model.converters:
        if options != Mxfp8():
            raise UsageError("section [mxfp8] is for the converter npu_mxfp8, which model.converters does not list")
    elif not (options.linear or options.experts):
        raise UsageError("mxfp8.linear or mxfp8.experts must be true with the converter npu_mxfp8")
