"""Workspaces of a job's operators on an NPU, and what torch_npu does with them.

With TASK_QUEUE_ENABLE=2, as in train_configs/env/npu.env, torch_npu keeps the largest workspace from call to call,
outside its caching allocator. Otherwise a workspace is a block of the caching allocator, for one call.
"""

from __future__ import annotations

import os
from typing import Any

from torchtitan_npu import platform
from torchtitan_npu.emulator.workspaces import workspace
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema

FUSED_AS = {
    **{f"npu::{name}": name for name in OPS},
    "npu::npu_fusion_attention_v3": "npu_fusion_attention",
    "npu::npu_fusion_attention_grad_v3": "npu_fusion_attention_grad",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "npu_fusion_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "npu_fusion_attention_grad",
}
"""The fused operator that an NPU runs, by the operator of the dry run."""

GRANULARITY = 2 << 20
"""Bytes. A kept workspace is rounded up to a multiple of it."""


def operator_workspace(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, str]:
    """Return the bytes of workspace of a call on an NPU, and the fused operator; 0 if there is none."""
    fused = FUSED_AS.get(op_schema(op).name)
    if fused is None or platform.job_backend() != "npu":
        return 0, ""
    return workspace(fused, **by_name(op, args, kwargs)), fused


def keeps_workspaces() -> bool:
    """Return whether torch_npu keeps the largest workspace; true on other backends, which have none."""
    if platform.job_backend() != "npu":
        return True
    value = os.environ.get("TASK_QUEUE_ENABLE", "2")
    if value not in ("0", "1", "2"):
        raise UsageError(f"TASK_QUEUE_ENABLE={value}: must be 0, 1 or 2")
    return value == "2"


def kept_bytes(workspace: int) -> int:
    """Return the device memory that torch_npu keeps for a largest workspace of so many bytes."""
    return -(-(workspace + 32) // GRANULARITY) * GRANULARITY if workspace else 0
