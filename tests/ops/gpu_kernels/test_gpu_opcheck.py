"""``torch.library.opcheck`` of every operator with a GPU kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtitan_npu.ops import OPS

Call = tuple[tuple[Any, ...], dict[str, Any]]
CHECKS = {"test_schema", "test_autograd_registration", "test_faketensor"}
# The second output of the inner operator is the argument itself, as in torch_npu, and the schema does not say so. A
# copy would double the cost. torch warns about the alias, and in CI raises.
ALIASING = "npu_moe_token_unpermute", "_npu_moe_token_unpermute"


def calls(gpu: Any, device: str, half: torch.dtype) -> dict[str, Callable[[], Call]]:
    """Return a small call of every operator, with gradients if it has them."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)

    def integers(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    def call(*args: Any, **kwargs: Any) -> Call:
        return args, kwargs

    experts = torch.tensor([[0, 3], [3, 1], [1, 0]], device=device)
    places, probs = integers(0, 4, 5, 2, 3, 1), random(3, 2)
    groups = {"group_list": integers(2, 0, 3, dtype=torch.int64), "group_list_type": 1, "split_item": 3}
    cos, sin = random(1, 3, 1, 8), random(1, 3, 1, 8)
    index = random(1, 3, 2, 4), random(1, 3, 1, 4), random(1, 3, 2)
    selected = integers(0, -1, 1, 0, 2, 0).view(1, 3, 1, 2)
    query, key = random(1, 3, 2, 4), random(1, 3, 1, 4)
    sparse = {"sparse_mode": 3, "attention_mode": 2}
    lse = sparse | {"return_softmax_lse": True}

    def attended() -> tuple[Tensor, ...]:
        return gpu.npu_sparse_flash_attention(query, key, None, selected, 0.3, **lse)

    def scaled_product() -> Call:
        x1, scale1 = gpu.npu_dynamic_mx_quant(random(3, 64), dst_type=24)
        x2, scale2 = gpu.npu_dynamic_mx_quant(random(64, 5), axis=0, dst_type=24)
        dtypes = {"scale_dtype": 293, "pertoken_scale_dtype": 293, "output_dtype": 15}
        return call(x1, x2, scale2, pertoken_scale=scale1, **dtypes)

    dense = {"head_num": 2, "input_layout": "BSND"}
    values = random(1, 3, 2, 4), random(1, 3, 2, 4), random(1, 3, 2, 4)

    def dense_statistics() -> dict[str, Tensor]:
        output, softmax_max, softmax_sum, *_ = gpu.npu_fusion_attention(*values, **dense)
        return {"attention_in": output, "softmax_max": softmax_max, "softmax_sum": softmax_sum}

    return {
        "npu_fusion_attention": lambda: call(*(random(1, 3, 2, 4, grad=True) for _ in range(3)), **dense),
        "npu_fusion_attention_grad": lambda: call(*values, random(1, 3, 2, 4), **dense, **dense_statistics()),
        "npu_rms_norm": lambda: call(random(3, 8, grad=True), random(8, grad=True)),
        "npu_rms_norm_backward": lambda: call(random(3, 8), random(3, 8), random(8), random(3, 1)),
        "npu_add_rms_norm": lambda: call(random(3, 8), random(3, 8), random(8)),
        "npu_swiglu": lambda: call(random(3, 8, grad=True)),
        "npu_swiglu_backward": lambda: call(random(3, 4), random(3, 8)),
        "npu_rotary_mul": lambda: call(random(1, 3, 2, 8, grad=True), cos, sin, "interleave"),
        "npu_rotary_mul_backward": lambda: call(random(1, 3, 2, 8), random(1, 3, 2, 8), cos, sin),
        "npu_moe_token_permute": lambda: call(random(3, 5, grad=True), experts),
        "npu_moe_token_permute_grad_v2": lambda: call(random(6, 5), places, 3, torch.float32, 2),
        "npu_moe_token_unpermute": lambda: call(random(6, 5, grad=True), places, random(3, 2, grad=True)),
        "_npu_moe_token_unpermute": lambda: call(random(6, 5, grad=True), places, random(3, 2, grad=True)),
        "npu_moe_token_unpermute_grad_v2": lambda: call(
            *(random(3, 5), places, 6, torch.float32, probs), permuted_tokens=random(6, 5)
        ),
        "npu_moe_gating_top_k": lambda: call(random(3, 8, grad=True), 2, norm_type=1, out_flag=True),
        "npu_moe_gating_top_k_backward": lambda: call(random(3, 8).sigmoid(), random(3, 2), experts.int(), norm_type=1),
        "npu_grouped_matmul": lambda: call(
            [random(5, 64, dtype=half)], [random(3, 64, 8, dtype=half)], group_type=0, **groups
        ),
        "npu_grouped_matmul_add_": lambda: call(
            random(3, 16, 8), random(5, 16, dtype=half), random(5, 8, dtype=half), integers(2, 2, 5, dtype=torch.int64)
        ),
        "npu_dynamic_mx_quant": lambda: call(random(3, 40), dst_type=24),
        "npu_grouped_dynamic_mx_quant": lambda: call(random(5, 8), integers(2, 2, 5), dst_type=24),
        "npu_quant_matmul": lambda: scaled_product(),
        "npu_lightning_indexer": lambda: call(*index, sparse_count=2),
        "npu_lightning_indexer_grad": lambda: call(*index[:2], random(1, 3, 1, 2), selected, index[2]),
        "npu_sparse_flash_attention": lambda: call(
            query.clone().requires_grad_(), key.clone().requires_grad_(), None, selected, 0.3, **lse
        ),
        "npu_sparse_flash_attention_grad": lambda: call(
            query, key, None, selected, random(1, 3, 2, 4), *attended(), 0.3, 1, **sparse
        ),
        "npu_sparse_lightning_indexer_grad_kl_loss": lambda: call(
            query, key, *index[:2], index[2], selected, *attended()[1:], 0.3, layout="BSND", sparse_mode=3
        ),
    }


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.cuda is not None])
def test_opcheck(gpu: Any, device: str, half: torch.dtype, name: str) -> None:
    args, kwargs = calls(gpu, device, half)[name]()
    checks = set(CHECKS)
    if OPS[name].autograd is not None:
        checks.add("test_aot_dispatch_dynamic")
    if name == "npu_quant_matmul":
        checks -= {"test_schema"}  # torch compares the arguments before and after, which float8 does not support
    if name in ALIASING:
        checks -= {"test_schema", "test_faketensor", "test_aot_dispatch_dynamic"}
    torch.library.opcheck(OPS[name].overload("gpu_kernels"), args, kwargs, test_utils=tuple(sorted(checks)))
