"""The imports of every rank of ``multirank``, done once in the fork server."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is imported
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # without it, is_available() initializes CUDA, which survives no fork

from torchtitan_npu import platform

platform.prepare()

# the modules that a test's own module imports, or else every new rank would
import hypothesis  # noqa: E402, F401
import pytest  # noqa: E402, F401

import tests._helpers.layouts  # noqa: E402, F401
import torchtitan_npu.train  # noqa: E402, F401

if find_spec("torch_npu") is None:  # transformers imports it, also into ranks that must not load it
    import transformers.models.llama.modeling_llama  # noqa: F401

gc.freeze()  # the ranks collect garbage after each call, and need not traverse the imported modules
