"""``torch.library.opcheck`` of every operator with a GPU kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.test_every_operator import arguments, is_differentiable
from torchtitan_npu.cli.doctor.operator_samples import SAMPLES
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import args_and_kwargs
from torchtitan_npu.ops.core.gpu import kernels

CHECKS = {"test_schema", "test_autograd_registration", "test_faketensor"}
# The second output of the inner operator is the argument itself, as in torch_npu, and the schema does not say so. A
# copy would double the cost. torch warns about the alias, and in CI raises.
ALIASING = "npu_moe_token_unpermute", "_npu_moe_token_unpermute"
UNTRACED = (*ALIASING, "npu_grouped_matmul_add_", "npu_lightning_indexer")
CODES = {"scale_dtype": 293, "pertoken_scale_dtype": 293, "output_dtype": 15}


def call_of(name: str, gpu: Any, device: str, half: torch.dtype) -> dict[str, Any]:
    """Return the arguments of a small call."""
    torch.manual_seed(0)
    x, factor = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    if name not in SAMPLES:  # MXFP8
        (x1, s1), (x2, s2) = (
            gpu.npu_dynamic_mx_quant(x, dst_type=24),
            gpu.npu_dynamic_mx_quant(factor, axis=0, dst_type=24),
        )
        ends = torch.tensor([2, 2, 64], dtype=torch.int32, device=device)
        return OPS[name].complete(
            **{
                "npu_dynamic_mx_quant": {"input": x[:, :40], "dst_type": 24},
                "npu_grouped_dynamic_mx_quant": {"x": x, "group_index": ends, "dst_type": 24},
                "npu_quant_matmul": {"x1": x1, "x2": x2, "scale": s2, "pertoken_scale": s1, **CODES},
            }[name]
        )
    tiles = {"x": [torch.randn(8, 64).bfloat16()], "weight": [torch.randn(4, 64, 8).bfloat16()]}

    dtype = half if "grouped" in name else torch.float32

    def on_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return value.to(device, dtype if value.dtype in (torch.bfloat16, torch.float64) else value.dtype)

    return arguments(name, on_device, **(tiles if name == "npu_grouped_matmul" else {}))


@pytest.mark.parametrize("name", list(kernels()))
def test_opcheck(gpu: Any, device: str, half: torch.dtype, name: str) -> None:
    values = call_of(name, gpu, device, half)
    if is_differentiable(name):
        for tensor in (values[key] for key in ("input", "x", "query", "tokens", "permuted_tokens") if key in values):
            tensor.requires_grad_()
    checks = set(CHECKS) if name in UNTRACED else {*CHECKS, "test_aot_dispatch_dynamic"}
    if name == "npu_quant_matmul":
        checks -= {"test_schema"}  # torch compares the arguments before and after, which float8 does not support
    if name in ALIASING:
        checks = {"test_autograd_registration"}
    args, kwargs = args_and_kwargs(OPS[name].overload(), values)
    torch.library.opcheck(OPS[name].overload("gpu_kernels"), tuple(args), kwargs, test_utils=tuple(sorted(checks)))
