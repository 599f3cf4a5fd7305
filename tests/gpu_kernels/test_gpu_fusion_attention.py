"""Dense attention on PyTorch's flash attention, against scaled dot-product attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests._helpers.converted_models import assert_no_further
from torchtitan_npu.gpu_kernels import fusion_attention as flash
from torchtitan_npu.gpu_kernels.registry import KERNELS
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core import gpu as core_gpu
from torchtitan_npu.ops.core.gpu import GpuKernel
from torchtitan_npu.ops.fusion_attention import reference
from torchtitan_npu.ops.fusion_attention.op import causal_mask


def documents(starts: Tensor | None, length: int) -> list[slice]:
    ends = [0, length] if starts is None else starts.tolist()
    return [slice(a, b) for a, b in pairwise(ends)]


class Heads(NamedTuple):
    """Queries, keys and values of one document as (B, N, rows, D) in float32, and the scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor


def heads_of(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Heads:
    repeats = q.shape[-2] // k.shape[-2]
    q, k, v = (t.transpose(-3, -2).float() for t in (q, k, v))
    k, v = (t.repeat_interleave(repeats, -3) for t in (k, v))
    scores = q @ k.mT * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + scores.shape[-1] - scores.shape[-2])
        scores = scores.masked_fill(hidden, -torch.inf)
    return Heads(q, k, v, scores)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float, **_: Any) -> Any:
    """Compute ``aten::_flash_attention_forward``: (B, S, N, D) and (B, N, S), with documents (T, N, D) and (N, T)."""
    starts_q, starts_k, _, _, _, causal, _ = args
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = q.new_empty(q.transpose(-3, -2).shape[:-1], dtype=torch.float32)
    for rows, keys in zip(documents(starts_q, q.shape[-3]), documents(starts_k, k.shape[-3]), strict=True):
        one = heads_of(q[..., rows, :, :], k[..., keys, :, :], v[..., keys, :, :], causal, scale)
        lse[..., rows] = one.scores.logsumexp(-1)
        out[..., rows, :, :] = (one.scores.softmax(-1) @ one.v).transpose(-3, -2).to(out.dtype)
    return out, lse, *(q.new_empty(0) for _ in range(3))


def flash_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any, scale: float, **_: Any
) -> Any:
    starts_q, starts_k, _, _, _, causal, _, _ = args
    grads = [torch.empty_like(t) for t in (q, k, v)]
    for rows, keys in zip(documents(starts_q, q.shape[-3]), documents(starts_k, k.shape[-3]), strict=True):
        one = heads_of(q[..., rows, :, :], k[..., keys, :, :], v[..., keys, :, :], causal, scale)
        d_out, o = (t[..., rows, :, :].transpose(-3, -2).float() for t in (dy, out))
        p = (one.scores - lse[..., rows, None]).exp()
        ds = p * (d_out @ one.v.mT - (d_out * o).sum(-1, keepdim=True)) * scale
        for grad, where, value in zip(
            grads, (rows, keys, keys), (ds @ one.k, ds.mT @ one.q, p.mT @ d_out), strict=True
        ):
            value = value.unflatten(-3, (grad.shape[-2], -1)).sum(-3)  # over the query heads of a key head
            grad[..., where, :, :] = value.transpose(-3, -2).to(grad.dtype)
    return tuple(grads)


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2) for t in tensors]


def cudnn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: None,
    with_lse: bool,
    dropout: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Compute ``aten::_scaled_dot_product_cudnn_attention``: (B, N, S, D) and (B, N, S, 1)."""
    out, lse, *_ = flash_forward(*heads_first(q, k, v), None, None, 0, 0, 0.0, causal, False, **kwargs)
    empty = q.new_empty(0)
    return out.transpose(1, 2), lse.unsqueeze(-1), empty, empty, 0, 0, empty, empty, empty


def cudnn_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any, **kwargs: Any
) -> Any:
    causal = args[-1]
    tensors = heads_first(dy, q, k, v, out)
    grads = flash_backward(*tensors, lse.squeeze(-1), None, None, 0, 0, 0.0, causal, None, None, **kwargs)
    return tuple(heads_first(*grads))


@pytest.fixture(scope="module", autouse=True)
def _flash_attention(device: str) -> Iterator[None]:
    """Give a machine without a GPU kernels of these operators: everything around them is tested there."""
    if device == "cuda":
        yield
        return
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", flash_forward, "CPU")
    library.impl("_flash_attention_backward", flash_backward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
    yield
    library._destroy()


CASES = {
    "causal": {"shape": (2, 40, 4, 4, 16)},
    "grouped": {"shape": (2, 40, 8, 2, 16)},
    "smaller values": {"shape": (1, 33, 4, 4, 24), "value": 16},
    "unmasked": {"shape": (2, 17, 4, 2, 16), "causal": False},
    "heads first": {"shape": (2, 40, 4, 2, 16), "layout": "BNSD"},
    "more keys": {"shape": (2, 40, 4, 2, 16), "queries": 13},
    "documents": {"shape": (1, 40, 4, 2, 16), "ends": [7, 8, 40]},
    "documents, statistics by row": {"shape": (1, 40, 4, 2, 16), "ends": [7, 8, 40], "softmax_layout": "TND"},
    "frames": {"shape": (1, 40, 4, 4, 16), "ends": [10, 20, 40], "causal": False},
}
ON_CUDNN = ("causal", "grouped", "smaller values", "unmasked", "heads first")


@pytest.mark.parametrize(
    ("name", "cudnn"), [(name, False) for name in CASES] + [(name, True) for name in CASES if name in ON_CUDNN]
)
def test_agrees_with_scaled_dot_product_attention(
    name: str, cudnn: bool, device: str, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_runs_on_cudnn", lambda *_: cudnn)
    case: dict[str, Any] = CASES[name]
    bsz, seqlen, heads, key_heads, size = case["shape"]
    layout, causal, ends = case.get("layout", "BSND"), case.get("causal", True), case.get("ends")
    torch.manual_seed(0)
    queries, value = case.get("queries", seqlen), case.get("value", size)
    sizes = ((heads, queries, size), (key_heads, seqlen, size), (key_heads, seqlen, value))
    tensors = [torch.randn(bsz, rows, n, d, device=device).bfloat16() for n, rows, d in sizes]
    dy = torch.randn(bsz, queries, heads, value, device=device).bfloat16()

    def expected(dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        outputs = []
        for rows in documents(None if ends is None else torch.tensor([0, *ends]), seqlen):
            q, k, v = (t[:, rows].transpose(1, 2) for t in leaves)
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=device).tril(k.shape[2] - q.shape[2])
            one = F.scaled_dot_product_attention(q, k, v, attn_mask=mask if causal else None, enable_gqa=True)
            outputs.append(one.transpose(1, 2))
        output = torch.cat(outputs, 1)
        return [output.detach(), *torch.autograd.grad(output, leaves, dy.to(dtype))]

    def laid_out(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2) if layout == "BNSD" else tensor.flatten(0, 1) if ends else tensor

    leaves = [laid_out(t).detach().requires_grad_() for t in tensors]
    options: dict[str, Any] = {"scale": size**-0.5, "softmax_layout": case.get("softmax_layout", "")}
    if causal:
        options |= {"atten_mask": causal_mask(torch.device(device)), "sparse_mode": 3}
    if ends:
        options |= {"actual_seq_qlen": ends, "actual_seq_kvlen": ends}

    def flash_attention_runs(op: str, **arguments: Any) -> GpuKernel:
        (kernel,) = KERNELS[op]
        assert kernel.suits(**arguments)
        return kernel

    monkeypatch.setattr(core_gpu, "choose", flash_attention_runs)
    output = gpu.npu_fusion_attention(*leaves, heads, "TND" if ends else layout, **options)[0]
    grads = torch.autograd.grad(output, leaves, laid_out(dy))
    results = zip((output.detach(), *grads), expected(torch.bfloat16), expected(torch.float64), strict=True)
    for what, (result, eager, exact) in zip(("output", "dq", "dk", "dv"), results, strict=True):
        assert_no_further(what, result, laid_out(eager), laid_out(exact))


def test_other_calls_run_the_reference(device: str) -> None:
    query, key, value = (torch.randn(1, 8, 2, 16, device=device) for _ in range(3))
    options = dict.fromkeys(("atten_mask", "actual_seq_qlen", "actual_seq_kvlen"))
    options |= {"head_num": 2, "sparse_mode": 0, "softmax_layout": "", "pre_tockens": 9, "next_tockens": 9}
    arguments = {"query": query, "key": key, "value": value, "input_layout": "BSND", "scale": 0.25, **options}
    got, expected = OPS["npu_fusion_attention"].cuda(**arguments), reference.npu_fusion_attention(**arguments)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
