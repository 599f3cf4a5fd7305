"""What every rank of ``multirank`` needs, imported once in the server process that the ranks are forked from."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else asking for GPUs starts CUDA, which survives no fork

from torchtitan_npu import platform

platform.prepare()

import torchtitan.train  # noqa: E402, F401
