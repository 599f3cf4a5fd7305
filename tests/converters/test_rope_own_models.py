"""``npu_rope`` in a user's own model: the modules that it converts, and those that share tables."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama3.model.model import apply_rotary_emb
from torchtitan.models.qwen3.model import model as qwen3
from torchtitan.models.qwen3.model.model import apply_rotary_emb as apply_rotary_emb_on_halves

from tests._helpers.converted_models import convert
from tests._helpers.rope_models import (
    BATCH,
    MAX_SEQ_LEN,
    POSITIONS,
    ROWS,
    SEQUENCE,
    TARGETS,
    Operators,
    assert_as_exact,
    backward,
    build,
    compute,
    exact_halves,
    exact_pairs,
    exact_rotations,
    gradients,
    on_both,
    references,
)
from torchtitan_npu.models.deepseek_v32 import block as deepseek_v32
from torchtitan_npu.models.deepseek_v32.indexer import apply_rotary_half


class OwnAttention(nn.Module):
    """A user's attention: other names, a separate method for the rotation, no grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(32, 96)

    def rotated(self, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_emb(q, k, angles)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        q, k = self.rotated(q, k, angles)
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


def assert_own_model_is_right(build_model: Callable[[], nn.Module], rotations: int, **arguments: Any) -> nn.Module:
    torch.manual_seed(0)
    plain = build_model()
    converted = convert(copy.deepcopy(plain), "npu_rope")
    oracle = copy.deepcopy(plain)._apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "apply_rotary_emb", on_both(exact_pairs))
        patch.setitem(globals(), "apply_rotary_emb_on_halves", on_both(exact_halves))
        patch.setitem(globals(), "apply_rotary_half", exact_halves)
        exact = compute_own(oracle, torch.float64, **arguments)
    with Operators() as operators:
        ours = compute_own(converted, torch.float32, **arguments)
    assert len(operators.rotations()) == rotations
    assert_as_exact(ours, compute_own(plain, torch.float32, **arguments), exact)
    return converted


def test_a_users_own_model() -> None:
    converted = assert_own_model_is_right(OwnModel, rotations=4)
    assert "(first): NpuOwnAttention(\n    heads=4, rotation=npu_rotary_mul\n" in str(converted)


class StaticAttention(OwnAttention):
    @staticmethod
    def rotated(q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return apply_rotary_emb(q, k, angles)


def counted(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any) -> Any:
        self.calls = getattr(self, "calls", 0) + 1
        return method(self, *args)

    return wrapper


class DecoratedAttention(OwnAttention):
    @counted
    def rotated(self, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_emb(q, k, angles)


def local_attention() -> type[nn.Module]:
    rotate = apply_rotary_emb

    class LocalAttention(OwnAttention):
        def rotated(self, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
            return rotate(q, k, angles)

    return LocalAttention


@pytest.mark.parametrize("kind", [StaticAttention, DecoratedAttention, local_attention()])
def test_a_users_static_decorated_or_local_method(kind: type[nn.Module]) -> None:
    plain = OwnModel()
    plain.first, plain.second = kind(), kind()
    converted = convert(copy.deepcopy(plain), "npu_rope")
    with Operators() as operators:
        ours = compute_own(converted, torch.float32)
    assert len(operators.rotations()) == 4
    torch.testing.assert_close(ours, compute_own(plain, torch.float32))
    assert getattr(converted.first, "calls", 1) == 1


class ThroughModule(OwnAttention):
    def rotated(self, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return llama3.apply_rotary_emb(q, k, angles)


class LocalImport(OwnAttention):
    def rotated(self, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        from torchtitan.models.llama3.model.model import apply_rotary_emb as rotation

        return rotation(q, k, angles)


class ByAttribute(OwnAttention):
    def __init__(self) -> None:
        super().__init__()
        self.rotation = apply_rotary_emb

    def rotated(self, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotation(q, k, angles)


class ThroughSuper(OwnAttention):
    def rotated(self, q: Tensor, k: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        return super().rotated(q, k, angles)


UNSEEN = (
    "npu_rope: not converted: 1 {} in second; their code uses the name of a rotation, but no method calls a registered "
    "one by a global name"
)


@pytest.mark.parametrize("kind", [ThroughModule, LocalImport, ByAttribute, ThroughSuper])
def test_logs_modules_that_cannot_be_converted(kind: type[nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    plain = OwnModel()
    plain.second = kind()
    with caplog.at_level(logging.INFO):
        converted = convert(copy.deepcopy(plain), "npu_rope")
    assert UNSEEN.format(kind.__name__) in caplog.messages and type(converted.second) is kind
    torch.testing.assert_close(compute_own(converted, torch.float32), compute_own(plain, torch.float32))


class OwnAttentionOnHalves(OwnAttention):
    def rotated(self, q: Tensor, k: Tensor, angles: Tensor, positions: Any = None) -> tuple[Tensor, Tensor]:
        return apply_rotary_emb_on_halves(q, k, angles, positions)

    def forward(self, x: Tensor, angles: Tensor, positions: Any = None) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        q, k = self.rotated(q, k, angles, positions)
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class MixedModel(OwnModel):
    """A model with both rotations, one of which uses the buffer name of TorchTitan's models."""

    def __init__(self) -> None:
        super().__init__()
        self.second = OwnAttentionOnHalves()
        self.register_buffer("rope_cache", qwen3.precompute_rope_cache(8, MAX_SEQ_LEN), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.first(x, self.angles[positions[0]]).flatten(-2)
        return x + self.second(x, self.rope_cache, positions).flatten(-2)


def test_a_users_own_model_with_both_rotations() -> None:
    assert_own_model_is_right(MixedModel, rotations=4, positions=ROWS)


class BothWays(OwnAttention):
    """Rotates queries and keys in mode interleave, then in mode half, in one method."""

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


def test_a_users_module_with_both_rotations() -> None:
    assert_own_model_is_right(BothWaysModel, rotations=4, positions=ROWS)


class BothWaysOfOneBuffer(OwnAttention):
    """Rotates queries in mode interleave and keys in mode half, by the same angles."""

    def forward(self, x: Tensor, angles: Tensor, positions: Any) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        q, _ = apply_rotary_emb(q, k, angles, positions)
        k = apply_rotary_half(k, angles, positions)
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


class OwnAttentionOnHalvesOfComplex(OwnAttentionOnHalves):
    """Rotates in mode half only."""

    def rotated(self, q: Tensor, k: Tensor, angles: Tensor, positions: Any = None) -> tuple[Tensor, Tensor]:
        return apply_rotary_half(q, angles, positions), apply_rotary_half(k, angles, positions)


class OneBufferModel(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.attention = attention()
        self.register_buffer("freqs_cis", llama3.precompute_freqs_cis(8, MAX_SEQ_LEN), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return x + self.attention(x, self.freqs_cis, positions).flatten(-2)


IN_EACH_LAYER = "npu_rope: modules without shared tables: {}; each looks up its cosines and sines"


@pytest.mark.parametrize("positions", [None, POSITIONS["offset"], ROWS], ids=["none", "offset", "rows"])
@pytest.mark.parametrize(("attention", "rotations"), [(BothWaysOfOneBuffer, 3), (OwnAttentionOnHalvesOfComplex, 2)])
def test_rotations_of_a_users_module_by_one_buffer(
    attention: type[nn.Module], rotations: int, positions: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    build_model = functools.partial(OneBufferModel, attention)
    with caplog.at_level(logging.INFO):
        assert_own_model_is_right(build_model, rotations, positions=positions)
    assert IN_EACH_LAYER.format(1) in caplog.messages


class Learned(nn.Module):
    """Uses positions for something else."""

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


def test_a_users_module_with_positions_gets_positions(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert_own_model_is_right(ModelWithAStranger, rotations=2, positions=ROWS)
    assert IN_EACH_LAYER.format(1) in caplog.messages


class ByTheLast(llama3.TransformerBlock):
    def forward(self, x: Tensor, freqs_cis: Tensor, attention_masks: Any, positions: Any = None) -> Tensor:
        return super().forward(x, freqs_cis, attention_masks, positions) + positions.max() / MAX_SEQ_LEN


class ByDocuments(qwen3.TransformerBlock):
    """Its model passes positions positionally, so they may have another name."""

    def forward(self, x: Tensor, rope_cache: Tensor, masks: Any, places: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, rope_cache, masks, places) + (places == 0).sum(1).view(-1, 1, 1)


class OwnNormed(deepseek_v32.Block):
    """Uses positions outside of forward."""

    def prolog(self, x: Tensor, freqs_cis: Tensor, positions: Any) -> tuple[Tensor, ...]:
        return super().prolog(x + (positions / MAX_SEQ_LEN).unsqueeze(-1), freqs_cis, positions)


class Tempered(llama3.Attention):
    """Rotates, and uses positions for something else."""

    def forward(self, x: Tensor, freqs_cis: Tensor, attention_masks: Any, positions: Any = None) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k = apply_rotary_emb(q, k, freqs_cis, positions)
        q = q * (1 + positions.log1p()).view(*positions.shape, 1, 1).to(q.dtype)
        output = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
        )
        return self.wo(output.transpose(1, 2).flatten(-2))


class WithLearned(llama3.Transformer):
    def forward(self, tokens: Tensor, attention_masks: Any = None, positions: Any = None) -> Tensor:
        return super().forward(tokens, attention_masks, positions) + self.output(self.learned(positions))


class Renamed(llama3.TransformerBlock):
    """A subclass with the same forward."""


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a block that adds": ("llama3", lambda model: retype(model.layers["1"], ByTheLast)),
    "a block that counts": ("qwen3", lambda model: retype(model.layers["1"], ByDocuments)),
    "a block's other method": ("deepseek_v32", lambda model: retype(model.layers["1"], OwnNormed)),
    "attention": ("llama3", lambda model: retype(model.layers["1"].attention, Tempered)),
    "a wrapped forward": ("llama3", lambda model: wrap_forward(model.layers["1"])),
    "a model": ("llama3", lambda model: add_learned(retype(model, WithLearned))),
}


def retype(module: Any, cls: type[nn.Module]) -> Any:
    module.__class__ = cls
    return module


def wrap_forward(block: Any) -> None:
    forward = block.forward

    @functools.wraps(forward)
    def wrapper(*args: Any, positions: Tensor, **kwargs: Any) -> Tensor:
        return forward(*args, positions=positions, **kwargs) + positions.max() / MAX_SEQ_LEN

    block.forward = wrapper


def add_learned(model: Any) -> None:
    weight = torch.randn(MAX_SEQ_LEN, model.model_args.dim, generator=torch.Generator().manual_seed(5))
    model.learned = nn.Embedding.from_pretrained(weight.to(model.output.weight.dtype), freeze=False)


@pytest.mark.parametrize("change", CHANGES)
def test_a_users_subclass_that_uses_positions_gets_positions(change: str, caplog: pytest.LogCaptureFixture) -> None:
    name, apply = CHANGES[change]

    def computed(*converters: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        model = build(name, dtype=dtype)
        apply(model)
        return compute(convert(model, *converters) if converters else model, ROWS)

    with caplog.at_level(logging.INFO):
        ours = computed("npu_rope")
    assert IN_EACH_LAYER.format(sum(TARGETS[name].values())) in caplog.messages
    with exact_rotations(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "apply_rotary_emb", on_both(exact_pairs))
        exact = computed(dtype=torch.float64)
    assert_as_exact(ours, computed(), exact)
    # and the change has an effect
    assert not torch.allclose(ours["logits"], compute(build(name), ROWS)["logits"], rtol=1e-3)


def test_a_users_subclass_with_torchtitans_forward_shares_tables() -> None:
    model = build("llama3")
    retype(model.layers["0"], Renamed)
    assert_as_exact(compute(convert(model, "npu_rope"), ROWS), *references("llama3", "rows"))
    assert len(model._forward_pre_hooks) == 1


class Wrapped(nn.Module):
    """A model that contains one of TorchTitan's."""

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
