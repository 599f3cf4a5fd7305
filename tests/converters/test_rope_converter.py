"""``npu_rope``: every rotation is ``npu_rotary_mul`` at the given positions; training is the same."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama3.model.model import apply_rotary_emb
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.qwen3.model import model as qwen3
from torchtitan.protocols.train_spec import get_train_spec

from tests._helpers.converted_models import LAYOUT, convert, job
from tests._helpers.rope_models import (
    BATCH,
    EXACT,
    MAX_SEQ_LEN,
    MODELS,
    POSITIONS,
    ROWS,
    SEQUENCE,
    TARGETS,
    DenseAttention,
    Operators,
    assert_as_exact,
    assert_same,
    backward,
    build,
    compute,
    exact_halves,
    exact_pairs,
    exact_rotations,
    gradients,
    references,
    tokens,
)
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.converters.rope import REPLACEMENTS, rotate
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.rotary import HALF, HALF_OF_COMPLEX, INTERLEAVE, Pairing
from torchtitan_npu.layers.rotary import ROTATIONS as REGISTERED
from torchtitan_npu.models.deepseek_v32.indexer import Indexer, apply_rotary_half
from torchtitan_npu.ops import OPS

AS_CONTEXT_PARALLEL = torch.arange(9, 9 + SEQUENCE, dtype=torch.int32).expand(BATCH, SEQUENCE)


@pytest.mark.parametrize("name", TARGETS)
def test_converts_the_attention_of_the_models(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = build(name)
    before, parameters = list(plain.state_dict()), dict(plain.named_parameters())
    with caplog.at_level(logging.INFO):
        model = convert(plain, "npu_rope")
    found = ", ".join(f"{count} {cls}" for cls, count in TARGETS[name].items())
    layers = "1" if name == "llama4" else "0-1"
    ours = [message for message in caplog.messages if message.startswith("npu_rope")]
    assert ours == [f"npu_rope: {found} in layers {layers} -> npu_rotary_mul"]
    for cls, count in TARGETS[name].items():
        types = [type(module).__name__ for module in model.modules()]
        assert types.count(f"Npu{cls}") == str(model).count(f"Npu{cls}(\n") == count
    assert str(model).count("rotation=npu_rotary_mul") == sum(TARGETS[name].values())
    assert type(model.layers["0"].attention) is llama4.Attention or name != "llama4"
    assert list(model.state_dict()) == before
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_trains_the_same(name: str, positions: str) -> None:
    model = build(name, "npu_rope")
    with Operators() as operators:
        ours = compute(model, POSITIONS[positions])
    assert_as_exact(ours, *references(name, positions))
    assert len(operators.rotations()) == 2 * sum(TARGETS[name].values())
    for rotation in operators.rotations():
        assert OPS["npu_rotary_mul"].limit_errors(**rotation) == []  # shapes that an NPU supports
        assert rotation["input"].dtype == rotation["r1"].dtype == rotation["r2"].dtype == torch.float32


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v32"])
def test_accepts_positions_in_every_form_of_torchtitan(name: str) -> None:
    model = build(name, "npu_rope")
    for positions in (POSITIONS["offset"], ROWS):
        assert_same(compute(model, positions.int()), compute(model, positions))
    assert_same(compute(model, AS_CONTEXT_PARALLEL), compute(model, AS_CONTEXT_PARALLEL.long().contiguous()))
    assert_same(compute(model, torch.arange(SEQUENCE)[None]), compute(model))
    logits = model(tokens(), positions=ROWS)
    if name != "deepseek_v32":  # whose stages get tensors of other layers in the places after the tokens
        assert torch.equal(model(tokens(), None, ROWS), logits)
    assert not torch.equal(model(tokens(), positions=None), logits)


@pytest.mark.parametrize("positions", [torch.arange(SEQUENCE + 1)[None], torch.arange(SEQUENCE)], ids=["long", "1-d"])
def test_positions_of_another_shape_are_an_error(positions: Tensor) -> None:
    """TorchTitan's models raise too. Without the check the first angles would be used silently."""
    with pytest.raises(AssertionError):
        build("llama3")(tokens(), positions=positions)
    with pytest.raises((ValueError, IndexError)):
        build("llama3", "npu_rope")(tokens(), positions=positions)


@pytest.mark.parametrize("positions", [ROWS - 6, POSITIONS["offset"] - 8], ids=["rows", "one row"])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_negative_positions_are_an_error(name: str, positions: Tensor) -> None:
    """Indexing would count from the end of the table. TorchTitan's models raise for rows only."""
    with pytest.raises((RuntimeError, IndexError), match="out of"):
        build(name, "npu_rope")(tokens(), positions=positions)
    with pytest.raises((RuntimeError, IndexError), match="out of"):
        rotate(HALF, qwen3.precompute_rope_cache(16, MAX_SEQ_LEN), positions, torch.randn(BATCH, SEQUENCE, 6, 16))


ROTATIONS: dict[str, tuple[Pairing, int, Any, Callable[..., Tensor], Tensor]] = {
    "llama3": (INTERLEAVE, 2, llama3.apply_rotary_emb, exact_pairs, llama3.precompute_freqs_cis(16, MAX_SEQ_LEN)),
    "llama4": (INTERLEAVE, 2, llama4.apply_rotary_emb, exact_pairs, llama4.precompute_freqs_cis(16, MAX_SEQ_LEN)),
    "deepseek_v3": (
        *(INTERLEAVE, 1, deepseek_v3.apply_rotary_emb, exact_pairs),
        llama3.precompute_freqs_cis(16, MAX_SEQ_LEN),
    ),
    "deepseek_v32": (
        *(HALF_OF_COMPLEX, 1, apply_rotary_half, exact_halves),
        llama3.precompute_freqs_cis(16, MAX_SEQ_LEN),
    ),
    "qwen3": (HALF, 2, qwen3.apply_rotary_emb, exact_halves, qwen3.precompute_rope_cache(16, MAX_SEQ_LEN)),
    "gpt_oss": (
        *(HALF, 2, gpt_oss.apply_rotary_emb, exact_halves),
        # YaRN also scales the cosines and sines
        gpt_oss.precompute_rope_cache(16, MAX_SEQ_LEN, 1e4, 32.0, 1.0, 32.0, 4096),
    ),
}
"""By model: its registration, the exact rotation, and a buffer of angles."""


@pytest.mark.parametrize("name", ROTATIONS)
def test_each_model_is_registered_with_what_it_computes(name: str) -> None:
    pairing, tensors, function, exact, cache = ROTATIONS[name]
    registered = [rotation for some in REGISTERED.values() for rotation in some if rotation.function is function]
    assert {(rotation.pairing, rotation.tensors) for rotation in registered} == {(pairing, tensors)}
    inputs = torch.randn(tensors, 2, SEQUENCE, 3, 16)
    outputs = function(*inputs, cache)
    for x, y in zip(inputs, outputs if tensors > 1 else [outputs], strict=True):
        torch.testing.assert_close(y.double(), exact(x, cache, None), rtol=1e-5, atol=1e-5)


def budget(x: Tensor, y: Tensor, exact: Callable[..., Tensor], cache: Tensor) -> Tensor:
    """Return the error budget of a float32 rotation of ``x`` to ``y``: two products and a sum in float32, each at most
    the length of the pair times that of (cosine, sine), and one rounding to the dtype of ``x``."""
    pairs = x.detach().double()
    if exact is exact_pairs:
        length = pairs.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, dim=-1)
    else:
        length = pairs.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 1, 2)
    length = length * cache[0, 0].abs()  # the cosine at position 0: one, or YaRN's scale
    wide, narrow = (torch.finfo(dtype) for dtype in (torch.promote_types(x.dtype, torch.float32), x.dtype))
    return 4 * wide.eps / 2 * length + narrow.eps / 2 * y.abs() + narrow.tiny


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotates_in_float32(name: str, dtype: torch.dtype) -> None:
    """Results and gradients have the dtype of the input."""
    pairing, tensors, _, exact, cache = ROTATIONS[name]
    torch.manual_seed(0)
    shapes = {"query": (BATCH, SEQUENCE, 6, 16), "key": (BATCH, SEQUENCE, 3, 16)}
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes.values()]
    for positions in POSITIONS.values():
        replacement = REPLACEMENTS[pairing, tensors]
        if tensors == 1:
            outputs = [replacement(x, cache, positions) for x in inputs]
        else:
            outputs = replacement(*inputs, cache, positions)
        for x, y in zip(inputs, outputs, strict=True):
            dy = torch.randn_like(y)
            (dx,) = torch.autograd.grad(y, x, dy)
            exact_x = x.detach().double().requires_grad_()
            exact_y = exact(exact_x, cache, positions)
            (exact_dx,) = torch.autograd.grad(exact_y, exact_x, dy.double())
            for got, want, source in ((y, exact_y, x), (dx, exact_dx, dy)):
                assert got.dtype == dtype and got.shape == want.shape
                assert ((got.double() - want).abs() <= budget(source, want, exact, cache)).all()


@pytest.mark.parametrize("name", ROTATIONS)
def test_a_rotation_in_bfloat16_is_detected(name: str) -> None:
    """The error budget of the previous test detects bfloat16 angles."""
    *_, exact, cache = ROTATIONS[name]
    rounded = (torch.view_as_real(cache) if cache.is_complex() else cache).bfloat16().float()
    rounded = torch.view_as_complex(rounded) if cache.is_complex() else rounded
    x = torch.randn(BATCH, SEQUENCE, 6, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = exact(x, cache, None)
    assert ((exact(x, rounded, None) - want).abs() > budget(x, want, exact, cache)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gpt_oss_attention(dtype: torch.dtype) -> None:
    args = copy.deepcopy(get_train_spec("gpt_oss").model_args["debugmodel"])
    args.max_seq_len, args.dim, args.n_heads, args.n_kv_heads = MAX_SEQ_LEN, 32, 4, 2
    cache = gpt_oss.GptOssModel._precompute_rope_cache(SimpleNamespace(model_args=args))  # type: ignore[arg-type]
    assert cache[0, 0] > 1  # YaRN

    def compute_attention(dtype: torch.dtype, *converters: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(gpt_oss.Attention(args))
        with torch.no_grad():
            model[0].init_weights(0.3)
        model[0].inner_attention = DenseAttention()
        # exact in bfloat16, so that all dtypes start from the same values
        model.bfloat16().to(dtype)
        if converters:
            convert(model, *converters)
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, SEQUENCE, SEQUENCE, device="cpu")
        output = model[0](torch.randn(BATCH, SEQUENCE, 32).bfloat16().to(dtype), cache, mask)
        backward(output)
        return {"output": output.detach(), **gradients(model)}

    theirs = compute_attention(dtype)
    with exact_rotations():
        exact = compute_attention(torch.float64)
    assert_as_exact(compute_attention(dtype, "npu_rope"), theirs, exact)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deepseek_v32_indexer(dtype: torch.dtype, positions: str) -> None:
    """Compare the indexer's outputs and gradients: the model's logits show only the selected keys."""
    args = dataclasses.replace(get_train_spec("deepseek_v32").model_args["debugmodel"], **MODELS["deepseek_v32"][2])
    cache = llama3.precompute_freqs_cis(args.qk_rope_head_dim, MAX_SEQ_LEN)

    def compute_indexer(dtype: torch.dtype, *converters: str) -> dict[str, Tensor]:
        torch.manual_seed(0)
        # exact in bfloat16, so that all dtypes start from the same values
        model = nn.Sequential(Indexer(args)).bfloat16().to(dtype)
        inputs = [torch.randn(BATCH, SEQUENCE, size).bfloat16().to(dtype) for size in (args.dim, args.q_lora_rank)]
        if converters:
            convert(model, *converters)
        outputs = dict(zip(("q", "k", "weights"), model[0](*inputs, cache, POSITIONS[positions]), strict=True))
        for output in outputs.values():
            backward(output)
        return {**{name: output.detach() for name, output in outputs.items()}, **gradients(model)}

    theirs = compute_indexer(dtype)
    with exact_rotations():
        exact = compute_indexer(torch.float64)
    with Operators() as operators:
        ours = compute_indexer(dtype, "npu_rope")
    assert_as_exact(ours, theirs, exact)
    assert [rotation["rotary_mode"] for rotation in operators.rotations()] == ["half", "half"]
    assert {rotation["input"].shape[2:] for rotation in operators.rotations()} == {(3, 8), (1, 8)}


def test_leaves_other_models_alone() -> None:
    functions = [getattr(module, name) for module, name in EXACT]
    forward = llama3.Attention.forward
    other = build("llama3")
    before = compute(other, ROWS)
    attention = other.layers["0"].attention
    converted = nn.ModuleDict({"a": attention})
    convert(converted, "npu_rope")  # even if it shares a module
    compute(build("llama3", "npu_rope"), ROWS)
    assert type(converted["a"]).__name__ == "NpuAttention"
    assert other.layers["0"].attention is attention and type(attention) is llama3.Attention
    assert_same(compute(other, ROWS), before)
    assert functions == [getattr(module, name) for module, name in EXACT]
    assert llama3.Attention.forward is forward and llama3.apply_rotary_emb is apply_rotary_emb


class Case:
    """Build a llama3 whose sizes are within the NPU limits or not."""

    def __init__(self, heads: int, head_dim: int, batch: int, **layout: int) -> None:
        args = copy.deepcopy(get_train_spec("llama3").model_args["debugmodel"])
        args.dim, args.n_heads, args.n_kv_heads, args.n_layers = heads * head_dim, heads, 1, 2
        args.max_seq_len = MAX_SEQ_LEN
        with torch.device("meta"):
            self.model = llama3.Transformer(args)
        self.config = job(("npu_rope",))
        self.config.training.local_batch_size = batch
        size = 1
        for degree in layout.values():
            size *= degree
        self.dims = ParallelDims(**LAYOUT | layout | {"world_size": size})

    def convert(self, strict: bool) -> None:
        self.config.npu = SimpleNamespace(strict_limits=strict)
        CONVERTERS["npu_rope"](self.config, self.dims).convert(self.model)


HEAD_DIM = "the last dimension of input is 1024; the NPU kernel supports 0 to 895"
BATCH_HEADS = "the larger of B and N (their product in mode interleave) is 1024; the NPU kernel supports 0 to 999"


@pytest.mark.parametrize(
    ("case", "limit"),
    [((1, 1024, 1), HEAD_DIM), ((32, 2, 32), BATCH_HEADS)],
    ids=["head_dim", "batch times heads"],
)
def test_reports_exceeded_npu_limits(case: tuple[int, int, int], limit: str, caplog: pytest.LogCaptureFixture) -> None:
    refusal = f"npu_rope: not supported by the NPU kernel: layers.0.attention: npu_rotary_mul: {limit} (and 1 more)"
    with caplog.at_level(logging.INFO):
        Case(*case).convert(strict=False)
    assert refusal in caplog.messages
    strict = Case(*case)
    with pytest.raises(UsageError) as error:
        strict.convert(strict=True)
    assert str(error.value) == refusal
    assert type(strict.model.layers["0"].attention) is llama3.Attention


def test_reports_exceeded_npu_limits_of_an_indexer(caplog: pytest.LogCaptureFixture) -> None:
    """The indexer has its own heads, in mode half. In mode interleave the batch alone would exceed the limit."""
    with caplog.at_level(logging.INFO):
        build("deepseek_v32", "npu_rope", index_n_heads=999)
        assert not [message for message in caplog.messages if "not supported" in message]
        build("deepseek_v32", "npu_rope", index_n_heads=1024)
    refusal = (
        "npu_rope: not supported by the NPU kernel: layers.0.attention.indexer: "
        f"npu_rotary_mul: {BATCH_HEADS} (and 1 more)"
    )
    assert refusal in caplog.messages


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_limits_apply_to_one_rank(layout: dict[str, int]) -> None:
    """A rank has half of the heads, or one microbatch."""
    case = Case(32, 2, 32, **layout)
    case.convert(strict=True)
    assert type(case.model.layers["0"].attention).__name__ == "NpuAttention"
