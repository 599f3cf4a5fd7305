"""The imports of every rank, done once in the fork server."""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # without it, is_available() initializes CUDA, which survives no fork

from torchtitan_npu import platform

platform.prepare()

import torchtitan_npu.prover.training  # noqa: E402
import torchtitan_npu.train  # noqa: E402, F401
from torchtitan_npu.config.parser import JobConfigManager  # noqa: E402

JobConfigManager().parse_args(["--model.hf_assets_path", "torchtitan_npu/assets/tokenizer"])  # fills caches of tyro

gc.freeze()  # the ranks need not traverse the imported modules
