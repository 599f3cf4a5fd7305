"""Importing this module adds the tiny flavors to TorchTitan's registry.

A job imports it by ``experimental.custom_import = "torchtitan_npu.prover.tiny_flavors"``.
"""

from __future__ import annotations

from torchtitan_npu.prover.tiny_models import add_flavors

add_flavors()
