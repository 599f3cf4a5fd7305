"""``npu_mrope`` and the differentiable function ``mrope``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding

from tests._helpers.error_budget import assert_within, compute_dtype, rounding_budget
from tests._helpers.rotation import cos_sin, rotated, unrotated
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.mrope import mrope

npu_mrope = torch.ops.npu.npu_mrope


class Oracle:
    """The angle of each channel of each token, and the rotation in float64."""

    def __init__(self, positions: Tensor, cache: Tensor, section: list[int] | None, rotary_mode: str, cache_mode: str):
        pairs = cache.shape[1] // 2
        axes = [self.axis(pair, section, cache_mode) for pair in range(pairs)]
        rows = positions[axes].t() if positions.dim() == 2 else positions[:, None].expand(-1, pairs)
        channels = torch.arange(pairs)
        of_pairs = cache[rows, channels], cache[rows, channels + pairs]  # (T, pairs)
        self.mode = rotary_mode
        # both channels of a pair have its angle
        order = [c // 2 if rotary_mode == "interleave" else c % pairs for c in range(2 * pairs)]
        self.cos, self.sin = (t[:, None, order] for t in of_pairs)

    @staticmethod
    def axis(pair: int, section: list[int] | None, cache_mode: str) -> int:
        if section is None:
            return 0
        if cache_mode == "interleave":
            return pair % 3 if pair < 3 * section[pair % 3] else 0
        return next(axis for axis in range(len(section)) if pair < sum(section[: axis + 1]))

    def __call__(self, x: Tensor, head_size: int, *, back: bool = False) -> tuple[Tensor, Tensor]:
        """Rotate ``x`` (T, heads * head_size), or rotate its gradient back. Return the result and its budget."""
        heads = x.reshape(x.shape[0], x.shape[1] // head_size, head_size)
        turned, passed = heads.tensor_split([self.cos.shape[-1]], dim=-1)
        compute = compute_dtype(x.dtype)
        result, budget = (unrotated if back else rotated)(turned, self.cos, self.sin, self.mode, compute)
        whole = torch.cat((result, passed.double()), dim=-1).flatten(1)
        allowed = torch.cat((budget + rounding_budget(result, x.dtype), torch.zeros_like(passed).double()), dim=-1)
        return whole, allowed.flatten(1)  # channels that are not rotated are exact


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Draw arguments: no, one or several tokens, partial or full rotation, all modes, any strides."""
    tokens, length = draw(st.integers(0, 6)), draw(st.integers(1, 20))
    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
    rotary_mode = draw(st.sampled_from(["half", "interleave"]))
    axes = draw(st.sampled_from([1, 3, 4]))
    section, cache_mode = None, "default"
    if axes == 1:
        pairs = draw(st.integers(1, 7))
    elif axes == 3 and draw(st.booleans()):
        cache_mode = "interleave"
        spatial = draw(st.integers(0, 3))  # height and width have the same number of channels
        section = [draw(st.integers(0 if spatial else 1, 4)), spatial, spatial]
        pairs = sum(section)
    else:
        section = [draw(st.integers(0, 4)) for _ in range(axes - 1)]
        section.append(draw(st.integers(0 if any(section) else 1, 4)))
        pairs = sum(section)
    head_size = 2 * pairs + draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))

    def make(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return values.t().contiguous().t() if draw(st.booleans()) else values

    shape = (tokens,) if axes == 1 else (axes, tokens)
    positions = torch.randint(
        length, shape, generator=generator, dtype=draw(st.sampled_from([torch.int32, torch.int64]))
    )
    query, key = make(tokens, draw(st.integers(1, 3)) * head_size), make(tokens, draw(st.integers(1, 3)) * head_size)
    modes = {"mrope_section": section, "rotary_mode": rotary_mode, "cache_mode": cache_mode}
    return (positions, query, key, make(length, 2 * pairs), head_size), modes


@settings(max_examples=150, deadline=None)
@given(cases())
def test_agrees_with_the_oracle(case: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    (positions, query, key, cache, head_size), modes = case
    oracle = Oracle(positions, cache.double(), *modes.values())
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    results = mrope(positions, query, key, cache, head_size, **modes)
    grads = torch.autograd.grad(results, (query, key), [result.detach().flip(0) for result in results])
    direct = npu_mrope(positions, query.detach(), key.detach(), cache, head_size, **modes)
    for name, x, y, same, dx in zip(("query", "key"), (query, key), results, direct, grads, strict=True):
        assert (y.shape, y.dtype) == (x.shape, x.dtype) and torch.equal(y, same)
        assert_within(name, y, *oracle(x.detach(), head_size))
        assert_within(f"gradient of {name}", dx, *oracle(y.detach().flip(0), head_size, back=True))


HEAD = 32
SECTION = [8, 4, 4]


def example(dtype: torch.dtype = torch.float32, axes: int | None = 3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``(positions, query, key, cache)`` of 5 tokens with different positions on each axis, 3 and 1 heads."""
    torch.manual_seed(0)
    positions = torch.randint(40, (5,) if axes is None else (axes, 5))
    cache = torch.cat(cos_sin(torch.arange(40), HEAD // 2, dtype), dim=-1)
    return positions, torch.randn(5, 3 * HEAD, dtype=dtype), torch.randn(5, HEAD, dtype=dtype), cache


@pytest.mark.parametrize(
    ("embedding", "config", "cache_mode"),
    [
        (Qwen2_5_VLRotaryEmbedding, Qwen2_5_VLTextConfig, "default"),
        (Qwen3VLTextRotaryEmbedding, Qwen3VLTextConfig, "interleave"),
    ],
)
@pytest.mark.parametrize("section", [[8, 4, 4], [6, 5, 5], [4, 6, 6]], ids=str)
def test_agrees_with_qwen(embedding: Any, config: Any, cache_mode: str, section: list[int]) -> None:
    """Qwen2.5-VL has the axes in blocks and Qwen3-VL interleaves them, so their cache_mode differs.

    Two batch rows have different positions. The float32 operations are the same, so the results are bit-identical.
    """
    settings = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": section}
    module = embedding(
        config(
            hidden_size=3 * HEAD, num_attention_heads=3, head_dim=HEAD, rope_parameters=settings, num_hidden_layers=1
        )
    )
    torch.manual_seed(0)
    position_ids = torch.randint(40, (3, 2, 5))
    query, key = torch.randn(2, 3, 5, HEAD), torch.randn(2, 1, 5, HEAD)  # BNSD
    expected = apply_rotary_pos_emb(query, key, *module(query, position_ids))

    angles = torch.arange(40)[:, None].float() * module.inv_freq
    arguments = (
        position_ids.flatten(1),
        *(x.transpose(1, 2).reshape(10, -1) for x in (query, key)),
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        HEAD,
    )
    results = npu_mrope(*arguments, mrope_section=section, cache_mode=cache_mode)
    for result, x in zip(results, expected, strict=True):
        assert torch.equal(result.view(2, 5, -1, HEAD).transpose(1, 2), x)
    wrong = "default" if cache_mode == "interleave" else "interleave"
    assert not torch.equal(npu_mrope(*arguments, mrope_section=section, cache_mode=wrong)[0], results[0])


def test_equal_positions_on_all_axes_are_plain_rope() -> None:
    """With equal positions on all axes, section and cache_mode have no effect: MRoPE is RoPE."""
    positions, query, key, cache = example(axes=None)
    plain = npu_mrope(positions, query, key, cache, HEAD)
    zeros = npu_mrope(positions, query, key, cache, HEAD, mrope_section=[0, 0, 0], rotary_mode=None, cache_mode=None)
    assert all(torch.equal(a, b) for a, b in zip(plain, zeros, strict=True))
    for section, cache_mode in [([8, 4, 4], "default"), ([8, 4, 4], "interleave"), ([4, 4, 4, 4], "default")]:
        rows = positions.expand(len(section), -1)
        for a, b in zip(
            plain, npu_mrope(rows, query, key, cache, HEAD, mrope_section=section, cache_mode=cache_mode), strict=True
        ):
            assert torch.equal(a, b)


def test_agrees_with_rotary_mul() -> None:
    positions, query, key, cache = example(axes=None)
    cos, sin = (t.repeat(1, 2)[None, :, None] for t in cache[positions].chunk(2, dim=-1))
    for x, y in zip((query, key), npu_mrope(positions, query, key, cache, HEAD), strict=True):
        assert torch.equal(y, torch.ops.npu.npu_rotary_mul(x.view(1, 5, -1, HEAD), cos, sin).reshape(y.shape))


@pytest.mark.parametrize(
    ("axes", "modes"),
    [
        (None, {}),
        (3, {"mrope_section": [2, 1, 1], "cache_mode": "interleave", "rotary_mode": "interleave"}),
        (4, {"mrope_section": [1, 1, 1, 1]}),
    ],
)
def test_gradients_in_float64(axes: int | None, modes: dict[str, Any]) -> None:
    """Check first and second derivatives, with unrotated channels and a cache that is not a rotation."""
    positions = torch.randint(9, (2,) if axes is None else (axes, 2))
    query, key = (torch.randn(2, heads * 9, dtype=torch.float64, requires_grad=True) for heads in (2, 1))
    cache = torch.randn(9, 8, dtype=torch.float64)

    def call(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return mrope(positions, query, key, cache, 9, **modes)

    assert torch.autograd.gradcheck(call, (query, key))
    assert torch.autograd.gradgradcheck(call, (query, key))


def test_only_the_function_has_gradients() -> None:
    """As in torch_npu, the operator alone has no gradient."""
    positions, query, key, cache = example()
    query.requires_grad_()
    with pytest.warns(UserWarning, match="npu_mrope"):  # torch warns about an operator without autograd
        npu_mrope(positions, query, key, cache, HEAD, mrope_section=SECTION)[0].sum().backward()
    assert query.grad is None
    rotated_query, rotated_key = mrope(positions, query, key, cache, HEAD, mrope_section=SECTION)
    rotated_query.sum().backward()
    assert query.grad is not None and query.grad.abs().min() > 0 and rotated_key.requires_grad
    with pytest.raises(UsageError, match="mrope: cos_sin_cache has no gradient; detach it"):
        mrope(positions, query, key, cache.clone().requires_grad_(), HEAD, mrope_section=SECTION)


def test_the_gradient_calls_the_operator_and_saves_neither_query_nor_key() -> None:
    positions, query, key, cache = example()
    query.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        result, _ = mrope(positions, query, key, cache, HEAD, mrope_section=SECTION)
    assert {tensor.data_ptr() for tensor in saved} == {positions.data_ptr(), cache.data_ptr()}
    with torch.profiler.profile() as profile:
        result.sum().backward()
    assert [event.name for event in profile.events()].count("npu::npu_mrope") == 1


def test_compiles_fullgraph() -> None:
    positions, query, key, cache = example()
    query.requires_grad_()

    def rotate(query: Tensor, key: Tensor) -> Tensor:
        query, key = mrope(positions, query * 2, key, cache, HEAD, mrope_section=SECTION, cache_mode="interleave")
        return query.sum() + key.sum()

    compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
    outputs = rotate(query, key), compiled(query, key)
    assert torch.equal(*outputs)
    assert torch.equal(*(torch.autograd.grad(output, query)[0] for output in outputs))


@pytest.mark.parametrize("position", [-1, 40])
def test_a_position_outside_the_cache_is_an_error(position: int) -> None:
    positions, query, key, cache = example(axes=None)
    positions[2] = position
    with pytest.raises(IndexError, match="out of range"):
        npu_mrope(positions, query, key, cache, HEAD)
