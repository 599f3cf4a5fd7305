"""``npu_rms_norm``: every ``nn.RMSNorm`` calls the fused operator."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from torchtitan_npu.converters.base import Converter, convert_module, modules_of_type, register
from torchtitan_npu.ops import OPS
from torchtitan_npu.torch_internals.dispatch import has_kernel

# Autocast runs rms_norm in float32 on some devices and in some torch versions (CUDA: in 2.13, not in 2.11).
_AUTOCAST_TO_FLOAT32 = frozenset(
    device_type
    for device_type, key in (("cuda", "AutocastCUDA"), ("npu", "AutocastPrivateUse1"), ("cpu", "AutocastCPU"))
    if has_kernel(torch.ops.aten.rms_norm.default, key)
)


class NpuRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` on ``npu_rms_norm``, with the same parameters, output dtype and meaning of ``eps=None``."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` (..., \\*normalized_shape) over its last dimensions."""
        gamma = x.new_ones(self.normalized_shape) if self.weight is None else self.weight
        # the operator needs one dtype; nn.RMSNorm computes in the wider one and returns the input's
        compute_dtype, output_dtype = torch.promote_types(x.dtype, gamma.dtype), x.dtype
        if x.device.type in _AUTOCAST_TO_FLOAT32 and torch.is_autocast_enabled(x.device.type):
            compute_dtype = output_dtype = torch.promote_types(compute_dtype, torch.float32)
        # no eps means the machine epsilon of float32, in which half precision is computed
        no_eps = torch.finfo(torch.float64 if x.dtype == torch.float64 else torch.float32).eps
        eps = no_eps if self.eps is None else self.eps
        y, _ = torch.ops.npu.npu_rms_norm(x.to(compute_dtype), gamma.to(compute_dtype), eps)
        return y.to(output_dtype)


@register
class RMSNormConverter(Converter):
    """Replaces every module whose class is exactly ``nn.RMSNorm``."""

    name = "npu_rms_norm"
    looks_for = "nn.RMSNorm"
    operators = ("npu_rms_norm",)

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return modules_of_type(model, nn.RMSNorm)

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        return convert_module(module, NpuRMSNorm)

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        gamma = cast(nn.RMSNorm, module).weight
        if gamma is None:
            return []  # gamma then has the dtype and trailing shape of the input
        one_token = torch.empty(1, *gamma.shape, dtype=gamma.dtype, device="meta")
        return OPS["npu_rms_norm"].limit_errors(input=one_token, gamma=gamma)
