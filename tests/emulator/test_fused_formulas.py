"""Fused operators without a reference kernel in this package, and attention in every layout, against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests._helpers.linear_cross_entropy import chunked, eager, squared_errors
from torchtitan_npu.components import chunked_loss
from torchtitan_npu.emulator.kernels import activations

TOKENS, EXPERTS, HIDDEN, TOP_K = 6, 4, 8, 2
npu = torch.ops.npu


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def on_npu(tensor: Tensor) -> Tensor:
    return tensor.detach().npu().requires_grad_(tensor.requires_grad)


def assert_same_gradients(
    output: Tensor, leaves: list[Tensor], expected: Tensor, expected_leaves: list[Tensor], **tolerance: Any
) -> None:
    torch.testing.assert_close(output.detach().cpu(), expected.detach(), **tolerance)
    grad = torch.randn(expected.shape).to(expected.dtype)
    grads = torch.autograd.grad(output, leaves, grad.npu())
    for actual, reference in zip(grads, torch.autograd.grad(expected, expected_leaves, grad), strict=True):
        torch.testing.assert_close(actual.cpu(), reference, **tolerance)


def routing_map() -> Tensor:
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    return torch.zeros(TOKENS, EXPERTS, dtype=torch.bool).scatter_(1, chosen, True)


def tokens_of_rows(chosen: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """Return the expert and the token of each row."""
    if capacity is None:
        experts, tokens = chosen.t().nonzero(as_tuple=True)
        return experts, tokens
    tokens = chosen.int().t().argsort(dim=1, descending=True, stable=True)[:, :capacity]
    return torch.arange(EXPERTS).repeat_interleave(capacity), tokens.flatten()


@pytest.mark.parametrize("capacity", [None, 2])
def test_permute_and_unpermute_with_a_routing_map(capacity: int | None) -> None:
    torch.manual_seed(0)
    tokens, probs, chosen = leaf(TOKENS, HIDDEN), leaf(TOKENS, EXPERTS), routing_map()
    padded, rows = capacity is not None, TOKENS * TOP_K if capacity is None else EXPERTS * capacity
    t, p, m = on_npu(tokens), on_npu(probs), chosen.npu()
    permuted, row_probs, slots = npu.npu_moe_token_permute_with_routing_map(
        t, m, probs=p, num_out_tokens=rows, drop_and_pad=padded
    )
    experts, of_row = tokens_of_rows(chosen, capacity)
    torch.testing.assert_close(row_probs.detach().cpu(), probs[of_row, experts].detach())
    # torch_npu's backward needs the gradients of both
    expected = tokens[of_row] * probs[of_row, experts][:, None]
    assert_same_gradients(permuted * row_probs[:, None], [t, p], expected, [tokens, probs])

    rows_in, source = permuted.detach().requires_grad_(), tokens[of_row].detach().requires_grad_()
    result = npu.npu_moe_token_unpermute_with_routing_map(
        rows_in, slots, [TOKENS, HIDDEN], probs=p, routing_map=m, drop_and_pad=padded
    )
    expected = torch.zeros(TOKENS, HIDDEN).index_add(0, of_row, source * probs[of_row, experts][:, None])
    assert_same_gradients(result, [rows_in, p], expected, [source, probs])


def test_routing_of_inference() -> None:
    torch.manual_seed(0)
    x, scores = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, EXPERTS)
    y, experts, rows = (t.cpu() for t in npu.npu_moe_gating_top_k_softmax(scores.npu(), k=TOP_K))
    expected, chosen = scores.softmax(-1).topk(TOP_K)
    torch.testing.assert_close(y, expected)
    assert torch.equal(experts, chosen.int())
    expanded, slots, sorted_experts = npu.npu_moe_init_routing(x.npu(), rows.npu(), experts.npu(), TOKENS)
    assert torch.equal(sorted_experts.cpu(), experts.flatten().sort().values)
    result = npu.npu_moe_finalize_routing(
        expanded, x.npu(), None, torch.zeros(EXPERTS, HIDDEN).npu(), y.npu(), slots, experts.npu()
    )
    torch.testing.assert_close(result.cpu(), x + x * y.sum(-1, keepdim=True))
    counts = npu.npu_moe_compute_expert_tokens(sorted_experts, EXPERTS).cpu()
    assert torch.equal(counts, experts.flatten().bincount(minlength=EXPERTS).cumsum(0).to(counts.dtype))


def test_init_routing_v2() -> None:
    torch.manual_seed(0)
    x, experts = torch.randn(TOKENS, HIDDEN), torch.randint(0, EXPERTS, (TOKENS, TOP_K)).int()
    expanded, slots, counts, _ = npu.npu_moe_init_routing_v2(
        x.npu(),
        experts.npu(),
        active_num=TOKENS * TOP_K,
        expert_num=EXPERTS,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, EXPERTS],
    )
    assert torch.equal(expanded.cpu()[slots.cpu().long()], x.repeat_interleave(TOP_K, 0))
    assert torch.equal(counts.cpu(), experts.flatten().bincount(minlength=EXPERTS).to(counts.dtype))


def test_rotary_embeddings_of_inference() -> None:
    torch.manual_seed(0)
    x, cos, sin = torch.randn(2, 4, 3, 64), torch.randn(2, 1, 3, 64), torch.randn(2, 1, 3, 64)
    gathered = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    expected = gathered * cos + torch.cat((-gathered[..., 32:], gathered[..., :32]), dim=-1) * sin
    torch.testing.assert_close(npu.npu_interleave_rope(x.npu(), cos.npu(), sin.npu()).cpu(), expected)
    q, k = torch.randn(2, 3, 4, 128), torch.randn(2, 3, 1, 128)
    cos, sin = torch.randn(2, 3, 1, 128), torch.randn(2, 3, 1, 128)
    for actual, x in zip(npu.npu_apply_rotary_pos_emb(q.npu(), k.npu(), cos.npu(), sin.npu()), (q, k), strict=True):
        rotated = torch.cat((-x[..., 64:], x[..., :64]), dim=-1)
        torch.testing.assert_close(actual.cpu(), x * cos + rotated * sin)


def test_gemma_rms_norm() -> None:
    x, gamma = torch.randn(3, 64), torch.randn(64)
    y, _ = npu.npu_gemma_rms_norm(x.npu(), gamma.npu())
    torch.testing.assert_close(y.cpu(), F.rms_norm(x, (64,), 1 + gamma, 1e-6))


def test_softmax_of_the_dense_indexer() -> None:
    torch.manual_seed(0)
    q, k, w = torch.randn(1, 5, 8, 128), torch.randn(1, 7, 1, 128), torch.randn(1, 5, 8)
    highest, total = npu.npu_dense_lightning_indexer_softmax_lse(*(t.bfloat16().npu() for t in (q, k, w)))
    q, k, w = (t.bfloat16().float() for t in (q, k, w))
    scores = torch.einsum("bqh,bqhk->bqk", w, torch.einsum("bqhd,bknd->bqhk", q, k).relu())
    scores = scores.masked_fill(torch.ones(5, 7, dtype=torch.bool).triu(3), -torch.inf)
    lse = highest.cpu() + total.cpu().log()
    torch.testing.assert_close(lse, scores.logsumexp(-1)[:, None], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(highest.cpu(), scores.amax(-1)[:, None], rtol=1e-5, atol=1e-4)


def test_scaled_masked_softmax() -> None:
    x, mask, scale = leaf(2, 3, 4, 4), torch.ones(4, 4, dtype=torch.bool).triu(1), 0.5
    expected = (x * scale).masked_fill(mask, -10000.0).softmax(-1)
    y, grad, d_x = torch.empty_like(x), torch.randn(x.shape), torch.empty_like(x)
    activations.scaled_masked_softmax(x.detach(), mask.expand(2, 1, 4, 4), scale, False, y)
    torch.testing.assert_close(y, expected.detach())
    activations.scaled_masked_softmax_backward(grad, y, mask.expand(2, 1, 4, 4), scale, False, d_x)
    torch.testing.assert_close(d_x, *torch.autograd.grad(expected, x, grad))


HEADS, KEY_HEADS, SIZE = 4, 2, 16
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("function", ["npu_fusion_attention", "npu_fusion_attention_v2"])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_band_attention(layout: str, function: str) -> None:
    """The band is the emulator's: the operators of this package do not have it."""
    torch.manual_seed(0)
    shapes = (2, HEADS, 6, SIZE), (2, KEY_HEADS, 9, SIZE), (2, KEY_HEADS, 9, SIZE)
    tensors = [torch.randn(shape).bfloat16().float().requires_grad_() for shape in shapes]
    q, k, v = tensors
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    distance = torch.arange(9) - torch.arange(6)[:, None] - 3
    scores = (q @ k.mT * SIZE**-0.5).masked_fill((distance > 1) | (distance < -2), -torch.inf)
    in_layout = {
        "BNSD": lambda x: x,
        "BSND": lambda x: x.transpose(1, 2),
        "BSH": lambda x: x.transpose(1, 2).flatten(2),
        "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
    }[layout]
    leaves = [on_npu(in_layout(t)) for t in tensors]
    tokens = "tockens" if function == "npu_fusion_attention" else "tokens"
    window = {f"pre_{tokens}": 2, f"next_{tokens}": 1}
    options = {"atten_mask": CAUSAL.npu(), "scale": SIZE**-0.5, "sparse_mode": 4, **window}
    output = getattr(npu, function)(*leaves, HEADS, layout, **options)[0]
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(output.detach().cpu(), in_layout(expected).detach())
    grad = torch.randn(expected.shape)
    grads = torch.autograd.grad(output, leaves, in_layout(grad).contiguous().npu())
    for actual, reference in zip(grads, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(actual.cpu(), in_layout(reference))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scaled_dot_product_attention(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, HEADS, 16, 64).to(dtype).requires_grad_() for _ in range(3)]
    leaves = [on_npu(t) for t in tensors]
    expected = F.scaled_dot_product_attention(*tensors, is_causal=True)
    output = F.scaled_dot_product_attention(*leaves, is_causal=True)
    assert_same_gradients(output, leaves, expected, tensors, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_chunked_loss_is_as_accurate_as_eager_on_the_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch_npu's operator adds the chunks of the weight's gradient."""
    monkeypatch.setattr(chunked_loss, "VOCABULARY_STEP", 16)  # as many calls as a large vocabulary needs
    ours, theirs = squared_errors(chunked, dtype, "npu"), squared_errors(eager, dtype)
    # in float32 the order of the sums decides about the last digit
    assert (ours <= (1.01 if dtype == torch.bfloat16 else 2) * theirs).all(), (ours, theirs)
