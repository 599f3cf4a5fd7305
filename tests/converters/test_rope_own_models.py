"""``npu_rope`` in a user's own model: the modules that it converts, and those that share tables."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama3.model.model import apply_rotary_emb

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
from torchtitan_npu.layers import rotary
from torchtitan_npu.layers.rotary import HALF_OF_COMPLEX, INTERLEAVE, register_rotation
from torchtitan_npu.models.deepseek_v32 import block as deepseek_v32
from torchtitan_npu.models.deepseek_v32.indexer import apply_rotary_half


class OwnAttention(nn.Module):
    """A user's attention, which rotates queries and keys in both ways, in a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Linear(32, 96)

    def rotated(self, q: Tensor, k: Tensor, angles: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        q, k = apply_rotary_emb(q, k, angles, positions)
        return q, apply_rotary_half(k, angles, positions)

    def forward(self, x: Tensor, freqs_cis: Tensor, positions: Any) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        q, k = self.rotated(q, k, freqs_cis, positions)
        return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)

    def extra_repr(self) -> str:
        return "heads=4"


class Inherits(OwnAttention):
    """A subclass with the registered method."""


class OwnModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = OwnAttention(), Inherits()
        self.register_buffer("freqs_cis", llama3.precompute_freqs_cis(8, MAX_SEQ_LEN), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        for attention in (self.first, self.second):
            x = x + attention(x, self.freqs_cis, positions).flatten(-2)
        return x


@pytest.fixture(autouse=True)
def _registries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    rotations, passes_angles = dict(rotary.ROTATIONS), set(rotary.PASSES_ANGLES)
    yield
    rotary.ROTATIONS.clear()
    rotary.ROTATIONS.update(rotations)
    rotary.PASSES_ANGLES.clear()
    rotary.PASSES_ANGLES.update(passes_angles)


def register(passed_by: tuple[type[nn.Module], ...] = ()) -> None:
    register_rotation(OwnAttention, apply_rotary_emb, INTERLEAVE, 2, methods=("rotated",), passed_by=passed_by)
    register_rotation(OwnAttention, apply_rotary_half, HALF_OF_COMPLEX, 1, methods=("rotated",))


def compute_own(model: nn.Module, dtype: torch.dtype, positions: Tensor | None) -> dict[str, Tensor]:
    torch.manual_seed(3)
    output = model(torch.randn(BATCH, SEQUENCE, 32).to(dtype), positions)
    backward(output)
    return {"output": output.detach(), **gradients(model)}


IN_EACH_LAYER = "npu_rope: modules without shared tables: {}; each looks up its cosines and sines"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("positions", POSITIONS)
def test_a_users_own_model(positions: str, shared: bool, caplog: pytest.LogCaptureFixture) -> None:
    register(passed_by=(OwnModel, OwnAttention, Inherits) if shared else ())
    torch.manual_seed(0)
    plain = OwnModel()
    oracle = copy.deepcopy(plain)._apply(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    with caplog.at_level(logging.INFO):
        converted = convert(copy.deepcopy(plain), "npu_rope")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "apply_rotary_emb", on_both(exact_pairs))
        patch.setitem(globals(), "apply_rotary_half", exact_halves)
        exact = compute_own(oracle, torch.float64, POSITIONS[positions])
    with Operators() as operators:
        ours = compute_own(converted, torch.float32, POSITIONS[positions])
    assert len(operators.rotations()) == 6
    assert_as_exact(ours, compute_own(plain, torch.float32, POSITIONS[positions]), exact)
    assert (IN_EACH_LAYER.format(2) in caplog.messages) != shared
    assert len(converted._forward_pre_hooks) == int(shared)
    assert "(first): NpuOwnAttention(\n    heads=4, rotation=npu_rotary_mul\n" in str(converted)


class Overrides(OwnAttention):
    """A subclass that rotates in its own way, and is not registered."""

    def rotated(self, q: Tensor, k: Tensor, angles: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        return apply_rotary_half(q, angles, positions), apply_rotary_half(k, angles, positions)


def test_logs_modules_that_are_not_registered(caplog: pytest.LogCaptureFixture) -> None:
    register()
    plain = OwnModel()
    plain.second = Overrides()  # type: ignore[assignment]
    with caplog.at_level(logging.INFO):
        converted = convert(copy.deepcopy(plain), "npu_rope")
    assert (
        "npu_rope: not converted: 1 Overrides in second; register what they rotate by with "
        "torchtitan_npu.layers.rotary.register_rotation"
    ) in caplog.messages
    assert type(converted.second) is Overrides
    ours, theirs = (compute_own(model, torch.float32, ROWS) for model in (converted, plain))
    torch.testing.assert_close(ours, theirs)


def test_a_registration_of_another_function_is_an_error() -> None:
    register_rotation(OwnAttention, torch.sin, INTERLEAVE, 2)
    with pytest.raises(ValueError, match=r"OwnAttention\.forward is registered for npu_rope, but does not call its"):
        convert(OwnModel(), "npu_rope")


class ByTheLast(llama3.TransformerBlock):
    def forward(self, x: Tensor, freqs_cis: Tensor, attention_masks: Any, positions: Any = None) -> Tensor:
        return super().forward(x, freqs_cis, attention_masks, positions) + positions.max() / MAX_SEQ_LEN


class OwnNormed(deepseek_v32.Block):
    """Uses positions outside of forward."""

    def pre_attention(self, x: Tensor, freqs_cis: Tensor, positions: Any) -> tuple[Tensor, ...]:
        return super().pre_attention(x + (positions / MAX_SEQ_LEN).unsqueeze(-1), freqs_cis, positions)


class WithLearned(llama3.Transformer):
    def forward(self, tokens: Tensor, attention_masks: Any = None, positions: Any = None) -> Tensor:
        return super().forward(tokens, attention_masks, positions) + positions.unsqueeze(-1) / MAX_SEQ_LEN


def wrap_forward(block: Any) -> None:
    forward = block.forward

    def wrapper(*args: Any, positions: Tensor, **kwargs: Any) -> Tensor:
        return forward(*args, positions=positions, **kwargs) + positions.max() / MAX_SEQ_LEN

    block.forward = wrapper


def retype(module: Any, cls: type[nn.Module]) -> None:
    module.__class__ = cls


CHANGES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "a block": ("llama3", lambda model: retype(model.layers["1"], ByTheLast)),
    "a block's other method": ("deepseek_v32", lambda model: retype(model.layers["1"], OwnNormed)),
    "a wrapped forward": ("llama3", lambda model: wrap_forward(model.layers["1"])),
    "a model": ("llama3", lambda model: retype(model, WithLearned)),
}


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
    with exact_rotations():
        exact = computed(dtype=torch.float64)
    assert_as_exact(ours, computed(), exact)
    # and the change has an effect
    assert not torch.allclose(ours["logits"], references(name, "rows")[0]["logits"], rtol=1e-3)


class Renamed(llama3.TransformerBlock):
    """A subclass with the same computation."""

    def init_weights(self) -> None:
        super().init_weights()


def test_a_users_subclass_with_the_same_computation_shares_tables(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama3")
    retype(model.layers["0"], Renamed)
    retype(model, type("OwnTransformer", (llama3.Transformer,), {}))
    with caplog.at_level(logging.INFO):
        assert_as_exact(compute(convert(model, "npu_rope"), ROWS), *references("llama3", "rows"))
    assert len(model._forward_pre_hooks) == 1 and "without shared tables" not in caplog.text


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
