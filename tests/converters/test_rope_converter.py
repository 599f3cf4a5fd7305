"""``npu_rope``: every rotation through ``npu_rotary_mul``, by the positions given, and the same training."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama3.model.model import apply_rotary_emb
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.models.qwen3.model import model as qwen3
from torchtitan.models.qwen3.model.model import apply_rotary_emb as apply_rotary_emb_on_halves
from torchtitan.protocols.train_spec import get_train_spec

from tests.converters.models import LAYOUT, assert_no_further, convert, initialise, job
from tests.layouts import TINY
from tests.multirank import run_on_ranks
from torchtitan_npu.converters import CONVERTERS, known_converters
from torchtitan_npu.converters.rope import ROTATIONS
from torchtitan_npu.converters.rotary_tables import HALF, INTERLEAVE, rotate
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.arguments import by_name
from torchtitan_npu.rehearsal import BelowSubclasses

BATCH, SEQUENCE, MAX_SEQ_LEN, VOCABULARY = 2, 12, 48, 64

MORE = {
    "llama4": {"every_n_layers_nope": 2},  # layer 0 has no rotations
    "deepseek_v3": {"original_seq_len": 16},  # below max_seq_len, hence YaRN
}


def build(name: str, *converters: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """A tiny model with weights: the same for the same name, whatever the converters and the dtype."""
    spec, flavor, smaller = TINY[name]
    changes = smaller | {"n_layers": 2, "vocab_size": VOCABULARY} | MORE.get(name, {}) | changes
    args = dataclasses.replace(copy.deepcopy(get_train_spec(spec).model_args[flavor]), **changes)
    args.update_from_config(job())
    args.max_seq_len = MAX_SEQ_LEN
    if name == "qwen3_moe":
        args.moe_args.num_experts, args.moe_args.top_k = 4, 2
    with torch.device("meta"):
        model = get_train_spec(spec).model_cls(args)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = False
    if converters:
        convert(model, *converters)
    initialise(model.to_empty(device="cpu"))
    # Module.to would make complex rotation tables real
    return model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


COUNTS = {"llama3": 2, "llama4": 1, "qwen3": 2, "qwen3_moe": 2, "deepseek_v3": 2}
"""Layers with rotations, of two."""

ROWS = torch.stack([torch.arange(SEQUENCE) + 5, torch.arange(SEQUENCE).roll(4).mul(3)])
POSITIONS = {
    "none": None,
    "offset": torch.arange(SEQUENCE)[None] + 7,
    "rows": ROWS,  # an offset in one, pieces of documents in the other
}
AS_CONTEXT_PARALLEL = torch.arange(9, 9 + SEQUENCE, dtype=torch.int32).expand(BATCH, SEQUENCE)


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def backward(logits: Tensor) -> None:
    """From a gradient that every dtype holds exactly."""
    logits.backward(torch.randint(-4, 5, logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.dtype))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {
        name.replace("_checkpoint_wrapped_module.", ""): parameter.grad for name, parameter in model.named_parameters()
    }


def compute(model: nn.Module, positions: Tensor | None = None) -> dict[str, Tensor]:
    """The logits, and every parameter's gradient by its name."""
    model.zero_grad()
    logits = model(tokens()) if positions is None else model(tokens(), positions=positions)
    backward(logits)
    return {"logits": logits.detach(), **gradients(model)}


def assert_as_exact(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """As near to the float64 values as the eager model, one by one."""
    assert ours.keys() == theirs.keys() == exact.keys()
    for name in exact:
        assert_no_further(name, ours[name], theirs[name], exact[name])


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different


def rows_of(cache: Tensor, positions: Tensor | None, sequence: int) -> Tensor:
    return cache[(torch.arange(sequence)[None] if positions is None else positions).long()].unsqueeze(2)


def exact_pairs(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    """In float64: neighbours are a complex number, and are multiplied by one."""
    factors = rows_of(freqs_cis, positions, x.shape[1]).to(torch.complex128)
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * factors).flatten(-2)


def exact_halves(x: Tensor, rope_cache: Tensor, positions: Tensor | None = None) -> Tensor:
    """In float64: an element and the one half a head away are the two coordinates of a point."""
    cos, _, sin, _ = rows_of(rope_cache, positions, x.shape[1]).double().chunk(4, dim=-1)
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def on_both(exact: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate_both(
        xq: Tensor, xk: Tensor, cache: Any = None, positions: Any = None, freqs_cis: Any = None
    ) -> tuple[Tensor, Tensor]:
        cache = freqs_cis if cache is None else cache
        return exact(xq, cache, positions), exact(xk, cache, positions)

    return rotate_both


EXACT = {
    llama3: on_both(exact_pairs),
    llama4: on_both(exact_pairs),
    deepseek_v3: exact_pairs,
    qwen3: on_both(exact_halves),
    gpt_oss: on_both(exact_halves),
}


@functools.cache
def references(name: str, positions: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What the unconverted model computes: in float32, and in float64 with rotations in float64 too."""
    theirs = compute(build(name), POSITIONS[positions])
    with pytest.MonkeyPatch.context() as patch:
        for module, function in EXACT.items():
            patch.setattr(module, "apply_rotary_emb", function)
        return theirs, compute(build(name, dtype=torch.float64), POSITIONS[positions])


class Operators(BelowSubclasses):
    """Records what is called, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((op._schema.name, by_name(op, args, kwargs)))
        return op(*args, **kwargs)

    def rotations(self) -> list[dict[str, Any]]:
        """The arguments of each, by name."""
        return [arguments for name, arguments in self.calls if name == "npu::npu_rotary_mul"]

    def on_tables(self) -> Counter[str]:
        """What computes, and no mere views, on the tables or on what they are made from."""
        views = ("slice", "view", "unsqueeze", "select", "unbind", "detach", "alias", "split", "permute", "as_strided")
        return Counter(
            name
            for name, arguments in self.calls
            if name not in ("npu::npu_rotary_mul", *(f"aten::{view}" for view in views))
            and any(isinstance(x, Tensor) and x.ndim > 1 and MAX_SEQ_LEN in x.shape for x in arguments.values())
        )


def test_is_registered() -> None:
    assert "npu_rope" in known_converters() and CONVERTERS["npu_rope"].name == "npu_rope"


@pytest.mark.parametrize("name", COUNTS)
def test_converts_the_attention_of_torchtitan_s_models(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = build(name)
    before, parameters = list(plain.state_dict()), dict(plain.named_parameters())
    with caplog.at_level(logging.INFO):
        model = convert(plain, "npu_rope")
    layers = "1" if name == "llama4" else "0-1"
    assert f"npu_rope: {COUNTS[name]} Attention in layers {layers} -> npu_rotary_mul" in caplog.messages
    attention = [block.attention for block in model.layers.values()]
    assert [type(module).__name__ for module in attention].count("NpuAttention") == COUNTS[name]
    assert str(model).count("NpuAttention(\n") == str(model).count("rotation=npu_rotary_mul") == COUNTS[name]
    assert type(attention[0]) is llama4.Attention or name != "llama4"
    assert list(model.state_dict()) == before
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", COUNTS)
def test_trains_the_same(name: str, positions: str) -> None:
    model = build(name, "npu_rope")
    with Operators() as operators:
        ours = compute(model, POSITIONS[positions])
    assert_as_exact(ours, *references(name, positions))
    assert len(operators.rotations()) == 2 * COUNTS[name]
    for rotation in operators.rotations():
        assert OPS["npu_rotary_mul"].refusals(**rotation) == []  # shapes that an NPU takes
        assert rotation["input"].dtype == rotation["r1"].dtype == rotation["r2"].dtype == torch.float32


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_takes_positions_in_every_form_that_torchtitan_has(name: str) -> None:
    model = build(name, "npu_rope")
    for positions in (POSITIONS["offset"], ROWS):
        assert_same(compute(model, positions.int()), compute(model, positions))
    assert_same(compute(model, AS_CONTEXT_PARALLEL), compute(model, AS_CONTEXT_PARALLEL.long().contiguous()))
    assert_same(compute(model, torch.arange(SEQUENCE)[None]), compute(model))
    # by name, by place, and none given by name
    logits = model(tokens(), positions=ROWS)
    assert torch.equal(model(tokens(), None, ROWS), logits) and not torch.equal(model(tokens(), positions=None), logits)


@pytest.mark.parametrize("positions", [torch.arange(SEQUENCE + 1)[None], torch.arange(SEQUENCE)], ids=["long", "1-d"])
def test_positions_of_another_shape_are_an_error(positions: Tensor) -> None:
    """As they are to TorchTitan's models: here a sequence's first angles would do for it silently."""
    with pytest.raises(AssertionError):
        build("llama3")(tokens(), positions=positions)
    with pytest.raises((ValueError, IndexError)):
        build("llama3", "npu_rope")(tokens(), positions=positions)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor], Tensor]] = {
    "llama3": (llama3.apply_rotary_emb, exact_pairs, llama3.precompute_freqs_cis(16, MAX_SEQ_LEN)),
    "llama4": (llama4.apply_rotary_emb, exact_pairs, llama4.precompute_freqs_cis(16, MAX_SEQ_LEN)),
    "deepseek_v3": (deepseek_v3.apply_rotary_emb, exact_pairs, llama3.precompute_freqs_cis(16, MAX_SEQ_LEN)),
    "qwen3": (qwen3.apply_rotary_emb, exact_halves, qwen3.precompute_rope_cache(16, MAX_SEQ_LEN)),
    "gpt_oss": (
        gpt_oss.apply_rotary_emb,
        exact_halves,
        # YaRN, which scales the cosines and sines too
        gpt_oss.precompute_rope_cache(16, MAX_SEQ_LEN, 1e4, 32.0, 1.0, 32.0, 4096),
    ),
}


def budget(x: Tensor, y: Tensor, exact: Callable[..., Tensor], cache: Tensor) -> Tensor:
    """How far from the exact ``y`` a rotation of ``x`` in float32 may be: by two products and a sum in float32, each
    at most the length of the pair times that of (cosine, sine); and by one rounding to the dtype of ``x``."""
    pairs = x.detach().double()
    if exact is exact_pairs:
        length = pairs.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, dim=-1)
    else:
        length = pairs.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 1, 1, 2)
    length = length * cache[0, 0].abs()  # the cosine of no angle: one, or YaRN's scale
    wide, narrow = (torch.finfo(dtype) for dtype in (torch.promote_types(x.dtype, torch.float32), x.dtype))
    return 4 * wide.eps / 2 * length + narrow.eps / 2 * y.abs() + narrow.tiny


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rotates_in_float32(name: str, dtype: torch.dtype) -> None:
    """Each element, and each of the gradients, in the dtype that came in."""
    upstream, exact, cache = FUNCTIONS[name]
    torch.manual_seed(0)
    shapes = {"query": (BATCH, SEQUENCE, 6, 16), "key": (BATCH, SEQUENCE, 3, 16)}
    inputs = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes.values()]
    for positions in POSITIONS.values():
        if name == "deepseek_v3":
            outputs = [ROTATIONS[upstream](x, cache, positions) for x in inputs]
        else:
            outputs = ROTATIONS[upstream](*inputs, cache, positions)
        for x, y in zip(inputs, outputs, strict=True):
            dy = torch.randn_like(y)
            (dx,) = torch.autograd.grad(y, x, dy)
            exact_x = x.detach().double().requires_grad_()
            exact_y = exact(exact_x, cache, positions)
            (exact_dx,) = torch.autograd.grad(exact_y, exact_x, dy.double())
            for got, want, source in ((y, exact_y, x), (dx, exact_dx, dy)):
                assert got.dtype == dtype and got.shape == want.shape
                assert ((got.double() - want).abs() <= budget(source, want, exact, cache)).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rotation_in_bfloat16_would_show(name: str) -> None:
    """The budget of the test before tells bfloat16 angles, from a rotation that is exact otherwise."""
    _, exact, cache = FUNCTIONS[name]
    rounded = (torch.view_as_real(cache) if cache.is_complex() else cache).bfloat16().float()
    rounded = torch.view_as_complex(rounded) if cache.is_complex() else rounded
    x = torch.randn(BATCH, SEQUENCE, 6, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    want = exact(x, cache, None)
    assert ((exact(x, rounded, None) - want).abs() > budget(x, want, exact, cache)).any()


class DenseAttention(nn.Module):
    """What flex attention computes, with a gradient on a CPU."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_mask: BlockMask,
        scale: float,
        return_lse: bool,
        enable_gqa: bool,
    ) -> tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        allowed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)


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
        # what bfloat16 holds, so that all dtypes start from the same
        model.bfloat16().to(dtype)
        if converters:
            convert(model, *converters)
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, SEQUENCE, SEQUENCE, device="cpu")
        output = model[0](torch.randn(BATCH, SEQUENCE, 32).bfloat16().to(dtype), cache, mask)
        backward(output)
        return {"output": output.detach(), **gradients(model)}

    theirs = compute_attention(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_oss, "apply_rotary_emb", EXACT[gpt_oss])
        exact = compute_attention(torch.float64)
    assert_as_exact(compute_attention(dtype, "npu_rope"), theirs, exact)


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
@pytest.mark.parametrize("n_layers", [2, 4])
def test_tables_are_made_once(name: str, n_layers: int) -> None:
    """In the first forward from the model's buffer; then rows are looked up, once where there are positions."""
    model = build(name, "npu_rope", n_layers=n_layers)
    made = {"llama3": {"aten::repeat_interleave", "aten::clone"}, "qwen3": {"aten::clone"}}[name]

    def forward(positions: Tensor | None) -> Counter[str]:
        with Operators() as operators:
            model(tokens(), positions=positions)
        assert len(operators.rotations()) == 2 * n_layers
        return operators.on_tables()

    first = forward(None)
    assert first and max(first.values()) == 1, first
    assert made & set(first), first
    assert forward(None) == {}
    assert forward(ROWS) == forward(POSITIONS["offset"]) == {"aten::index": 1}


def test_a_new_buffer_is_noticed() -> None:
    """Here of another theta; as ``init_weights`` makes one after the weights have moved."""
    model, plain = build("llama3", "npu_rope"), build("llama3")
    before = compute(model)
    for changed in (model, plain):
        changed.model_args.rope_theta = 50
        initialise(changed)
    after = compute(model)
    assert not torch.equal(before["logits"], after["logits"])
    torch.testing.assert_close(after["logits"], compute(plain)["logits"])


def pipelined(model: nn.Module) -> dict[str, Tensor]:
    """Two forwards with positions of their own, then the backwards in the same order: a pipeline stage's."""
    outputs = [model(tokens(seed), positions=positions) for seed, positions in ((3, ROWS), (4, ROWS.flip(0) + 2))]
    for output in outputs:
        backward(output)
    return gradients(model)


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_forwards_that_overlap_keep_their_own_tables(name: str, mode: str) -> None:
    """Activation checkpointing computes the first forward's layers again after the second forward."""

    def run(*converters: str) -> dict[str, Tensor]:
        model = build(name, *converters)
        if mode == "full":
            apply_ac(model, ActivationCheckpoint(mode="full"), model_compile_enabled=False, op_sac_save_list=set())
        return pipelined(model)

    with pytest.MonkeyPatch.context() as patch:
        for module, function in EXACT.items():
            patch.setattr(module, "apply_rotary_emb", function)
        exact = pipelined(build(name, dtype=torch.float64))
    assert_as_exact(run("npu_rope"), run(), exact)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("positions", ["none", "rows"])
def test_trains_after_a_validation(mode: Any, positions: str) -> None:
    model = build("llama3", "npu_rope")
    with mode():
        logits = model(tokens(), positions=POSITIONS[positions])
    with Operators() as operators:
        ours = compute(model, POSITIONS[positions])
    assert torch.equal(ours["logits"], logits)
    # which autograd in C++, as torch_npu's, does not save for the backward
    assert not any(rotation["r1"].is_inference() for rotation in operators.rotations())
    assert_as_exact(ours, *references("llama3", positions))


def test_a_copy_is_a_model_of_its_own() -> None:
    """As pipeline parallel makes its stages, from a model that was run or not."""
    model = build("llama3", "npu_rope")
    before = compute(model, ROWS)
    twin = copy.deepcopy(model)
    assert_same(compute(twin, ROWS), before)
    twin.model_args.rope_theta = 50
    initialise(twin)
    assert not torch.equal(compute(twin, ROWS)["logits"], before["logits"])
    assert_same(compute(model, ROWS), before)


def test_leaves_other_models_alone() -> None:
    functions = [module.apply_rotary_emb for module in EXACT]
    forward = llama3.Attention.forward
    other = build("llama3")
    before = compute(other, ROWS)
    attention = other.layers["0"].attention
    converted = nn.ModuleDict({"a": attention})
    convert(converted, "npu_rope")  # even one that shares a module
    compute(build("llama3", "npu_rope"), ROWS)
    assert type(converted["a"]).__name__ == "NpuAttention"
    assert other.layers["0"].attention is attention and type(attention) is llama3.Attention
    assert_same(compute(other, ROWS), before)
    assert functions == [module.apply_rotary_emb for module in EXACT]
    assert llama3.Attention.forward is forward and llama3.apply_rotary_emb is apply_rotary_emb


def test_with_the_other_converters() -> None:
    """In either order."""
    for order in (("npu_rms_norm", "npu_rope"), ("npu_rope", "npu_rms_norm")):
        assert_as_exact(compute(build("qwen3", *order), ROWS), *references("qwen3", "rows"))


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_compiles_once(name: str) -> None:
    """As TorchTitan compiles: block by block, whole. Other values of positions compile nothing again."""
    torch._dynamo.reset()
    model, counter = build(name, "npu_rope"), CompileCounterWithBackend("aot_eager")
    for block in model.layers.values():
        block.compile(backend=counter, fullgraph=True)
    assert_as_exact(compute(model, ROWS), *references(name, "rows"))
    compiled = counter.frame_count
    assert compiled
    assert not torch.equal(model(tokens(), positions=ROWS.flip(0)), model(tokens(), positions=ROWS))
    assert counter.frame_count == compiled


def half_precision(name: str) -> tuple[list[dict[str, Any]], Tensor]:
    """On a rank: the rotations under FSDP2 in bfloat16, and the model's own buffer."""
    model = build(name, "npu_rope")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model.layers.values(), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    queries: list[torch.dtype] = []
    model.layers["1"].attention.wq.register_forward_hook(lambda module, args, output: queries.append(output.dtype))
    with Operators() as operators:
        model(tokens(), positions=ROWS)
    assert queries == [torch.bfloat16]
    return operators.rotations(), model.freqs_cis if name == "llama3" else model.rope_cache


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_half_precision_does_not_reach_the_tables(name: str) -> None:
    """FSDP casts a block's floating inputs."""
    for rotations, cache in run_on_ranks(2, half_precision, name):
        assert len(rotations) == 4
        rows = rows_of(cache, ROWS, SEQUENCE)
        if name == "llama3":
            cos, sin = rows.real.repeat_interleave(2, -1), rows.imag.repeat_interleave(2, -1)
        else:
            cos, sin = rows.chunk(2, dim=-1)
        for rotation in rotations:
            assert rotation["input"].dtype == rotation["r1"].dtype == rotation["r2"].dtype == torch.float32
            assert torch.equal(rotation["r1"].flatten(), cos.flatten())
            assert torch.equal(rotation["r2"].flatten(), sin.flatten())


def rotate_shards() -> list[Tensor]:
    """On a rank: heads over two ranks, angles and positions replicated; the results and the gradients, whole."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    results = []
    for pairing, cache in ((INTERLEAVE, FUNCTIONS["llama3"][2]), (HALF, FUNCTIONS["qwen3"][2])):
        for positions in POSITIONS.values():
            x = torch.randn(BATCH, SEQUENCE, 4, 16)
            whole = x.clone().requires_grad_()
            shards = distribute_tensor(x, mesh, [Shard(2)]).requires_grad_()
            replicated = None if positions is None else DTensor.from_local(positions, mesh, [Replicate()])
            y = rotate(pairing, DTensor.from_local(cache, mesh, [Replicate()]), replicated, shards)[0]
            assert isinstance(y, DTensor) and y.placements == (Shard(2),) and y.to_local().shape[2] == 2
            expected = rotate(pairing, cache, positions, whole)[0]
            y.square().sum().backward()
            expected.square().sum().backward()
            assert shards.grad.placements == (Shard(2),)
            results += [y.full_tensor() - expected, shards.grad.full_tensor() - whole.grad]
    return results


def test_rotates_shards_of_heads() -> None:
    for differences in run_on_ranks(2, rotate_shards):
        assert len(differences) == 12 and not any(difference.any() for difference in differences)


class OwnAttention(nn.Module):
    """A user's: other names, a method of its own for the rotation, no grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(32, 96)

    def turned(self, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_emb(q, k, angles)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        q, k = self.turned(q, k, angles)
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)

    def extra_repr(self) -> str:
        return "heads=4"


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OwnAttention(), OwnAttention()
        self.register_buffer("angles", llama3.precompute_freqs_cis(8, MAX_SEQ_LEN), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for attention in (self.first, self.second):
            x = x + attention(x, self.angles[: x.shape[1]]).flatten(-2)
        return x


def compute_own(model: nn.Module, dtype: torch.dtype, **arguments: Any) -> dict[str, Tensor]:
    torch.manual_seed(3)
    output = model(torch.randn(BATCH, SEQUENCE, 32).to(dtype), **arguments)
    backward(output)
    return {"output": output.detach(), **gradients(model)}


def assert_own_model_is_right(cls: type[nn.Module], rotations: int, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    plain = cls()
    converted = convert(copy.deepcopy(plain), "npu_rope")
    oracle = copy.deepcopy(plain)._apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "apply_rotary_emb", EXACT[llama3])
        patch.setitem(globals(), "apply_rotary_emb_on_halves", EXACT[qwen3])
        exact = compute_own(oracle, torch.float64, **arguments)
    with Operators() as operators:
        ours = compute_own(converted, torch.float32, **arguments)
    assert len(operators.rotations()) == rotations
    assert_as_exact(ours, compute_own(plain, torch.float32, **arguments), exact)
    return converted


def test_a_user_s_own_model() -> None:
    converted = assert_own_model_is_right(OwnModel, rotations=4)
    assert "(first): NpuOwnAttention(\n    heads=4, rotation=npu_rotary_mul\n" in str(converted)


class OwnAttentionOnHalves(OwnAttention):
    def turned(self, q: Tensor, k: Tensor, angles: Tensor, positions: Any = None) -> tuple[Tensor, Tensor]:
        return apply_rotary_emb_on_halves(q, k, angles, positions)

    def forward(self, x: Tensor, angles: Tensor, positions: Any = None) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        q, k = self.turned(q, k, angles, positions)
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class MixedModel(OwnModel):
    """Both kinds of rotation, of which one has its angles where TorchTitan's models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.second = OwnAttentionOnHalves()
        self.register_buffer("rope_cache", qwen3.precompute_rope_cache(8, MAX_SEQ_LEN), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.first(x, self.angles[positions[0]]).flatten(-2)
        return x + self.second(x, self.rope_cache, positions).flatten(-2)


def test_a_user_s_own_model_with_both_kinds_of_rotation() -> None:
    assert_own_model_is_right(MixedModel, rotations=4, positions=ROWS)


class BothWays(OwnAttention):
    """Queries and keys on pairs, then on halves, in one method."""

    def forward(self, x: Tensor, angles: Tensor, cache: Tensor, positions: Any) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        q, k = apply_rotary_emb(q, k, angles, positions)
        q, k = apply_rotary_emb_on_halves(q, k, cache, positions)
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class BothWaysModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = BothWays()
        self.register_buffer("freqs_cis", llama3.precompute_freqs_cis(8, MAX_SEQ_LEN), persistent=False)
        self.register_buffer("rope_cache", qwen3.precompute_rope_cache(8, MAX_SEQ_LEN), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.attention(x, self.freqs_cis, self.rope_cache, positions).flatten(-2)


def test_a_user_s_module_with_both_kinds_of_rotation() -> None:
    assert_own_model_is_right(BothWaysModel, rotations=4, positions=ROWS)


class Learned(nn.Module):
    """Uses positions in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(MAX_SEQ_LEN, 32)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.embeddings(positions)


class ModelWithAStranger(BothWaysModel):
    def __init__(self) -> None:
        super().__init__()
        self.attention = OwnAttentionOnHalves()
        self.learned = Learned()

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = self.learned(x, positions)
        return x + self.attention(x, self.rope_cache, positions).flatten(-2)


def test_a_user_s_module_that_takes_positions_too_gets_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert_own_model_is_right(ModelWithAStranger, rotations=2, positions=ROWS)
    assert "npu_rope: 1 of the modules take cosines and sines from the model in each layer" in caplog.messages


class Wrapped(nn.Module):
    """A model of which TorchTitan's is a part."""

    def __init__(self, text: nn.Module) -> None:
        super().__init__()
        self.text = text

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.text(tokens, positions=positions)


def test_a_model_inside_another_makes_its_tables_once() -> None:
    whole = Wrapped(build("llama3"))
    convert(whole, "npu_rope")
    assert len(whole.text._forward_pre_hooks) == 1 and not whole._forward_pre_hooks
    tokens = torch.zeros(BATCH, SEQUENCE, dtype=torch.int64)
    assert torch.equal(whole(tokens, ROWS), build("llama3", "npu_rope")(tokens, positions=ROWS))


def test_a_model_without_rotations_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.MultiheadAttention(4, 2))
    expected = r"model\.converters: npu_rope found no attention that calls TorchTitan's apply_rotary_emb in Sequential"
    with pytest.raises(UsageError, match=expected):
        convert(model, "npu_rope")


def test_listing_it_twice_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"model\.converters: npu_rope is listed twice"):
        build("llama3", "npu_rope", "npu_rope")


class Case:
    """A llama3 of sizes that an NPU would refuse, or not."""

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


HEAD_DIM = "the last dimension of input is 1024, and an NPU takes 0 to 895"
BATCH_HEADS = "the larger of B and N (their product in mode interleave) is 1024, and an NPU takes 0 to 999"


@pytest.mark.parametrize(
    ("case", "limit"),
    [((1, 1024, 1), HEAD_DIM), ((32, 2, 32), BATCH_HEADS)],
    ids=["head_dim", "batch times heads"],
)
def test_what_an_npu_refuses_is_said(case: tuple[int, int, int], limit: str, caplog: pytest.LogCaptureFixture) -> None:
    refusal = f"npu_rope: an NPU would refuse layers.0.attention: npu_rotary_mul: {limit} (and 1 more)"
    with caplog.at_level(logging.INFO):
        Case(*case).convert(strict=False)
    assert refusal in caplog.messages
    strict = Case(*case)
    with pytest.raises(UsageError) as error:
        strict.convert(strict=True)
    assert str(error.value) == refusal
    assert type(strict.model.layers["0"].attention) is llama3.Attention


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_limits_are_of_a_rank_s_share(layout: dict[str, int]) -> None:
    """Half of the heads, or one microbatch."""
    case = Case(32, 2, 32, **layout)
    case.convert(strict=True)
    assert type(case.model.layers["0"].attention).__name__ == "NpuAttention"
