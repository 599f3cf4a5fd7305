"""What every rank of ``multirank`` needs, imported once in the server process that the ranks are forked from."""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else asking for GPUs starts CUDA, which survives no fork

from torchtitan_npu import platform

platform.prepare()

import tests._helpers.layouts  # noqa: E402, F401
import torchtitan_npu.train  # noqa: E402, F401

gc.freeze()  # what is imported stays: a rank that collects garbage, as each does after a call, need not walk through it
