"""Tiny models with rotations, their float64 results with exact rotations, and the operators they call."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._pytree import tree_leaves
from torchtitan.models.deepseek_v3.model import model as deepseek_v3
from torchtitan.models.gpt_oss.model import model as gpt_oss
from torchtitan.models.llama3.model import model as llama3
from torchtitan.models.llama4.model import model as llama4
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.models.qwen3.model import model as qwen3
from torchtitan.protocols.train_spec import get_train_spec

from tests._helpers.converted_models import assert_no_further, convert, initialise, job
from tests._helpers.layouts import FUSED, TINY
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.models.deepseek_v32 import attention as deepseek_v32_attention
from torchtitan_npu.models.deepseek_v32 import indexer as deepseek_v32_indexer
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.planner import BelowSubclasses

BATCH, SEQUENCE, MAX_SEQ_LEN, VOCABULARY = 2, 12, 48, 64

MODELS = {name: TINY[name] for name in FUSED} | {
    "deepseek_v32": (
        "deepseek_v32",
        "debugmodel",
        # no product with SEQUENCE is MAX_SEQ_LEN; fewer keys than tokens
        TINY["deepseek_v3"][2]
        | {"n_heads": 5, "q_lora_rank": 24, "index_n_heads": 3, "index_head_dim": 18, "index_topk": 5},
    ),
    "gpt_oss": ("gpt_oss", "debugmodel", {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "moe_inter_dim": 16}),
}

MORE = {
    "llama4": {"every_n_layers_nope": 2},  # layer 0 has no rotations
    "deepseek_v3": {"original_seq_len": 16},  # below max_seq_len, which enables YaRN
    "deepseek_v32": {"original_seq_len": 16},
}

TARGETS = {
    "llama3": {"Attention": 2},
    "llama4": {"Attention": 1},
    "qwen3": {"Attention": 2},
    "qwen3_moe": {"Attention": 2},
    "deepseek_v3": {"Attention": 2},
    "deepseek_v32": {"DeepSeekV32Attention": 2, "Indexer": 2},
}
"""Modules with rotations, in two layers. Each rotates queries and keys."""


class DenseAttention(nn.Module):
    """Flex attention in plain PyTorch, with a gradient on a CPU."""

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


def build(name: str, *converters: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Build a tiny model with weights that depend on its name only, not on converters or dtype."""
    spec, flavor, smaller = MODELS[name]
    changes = smaller | {"n_layers": 2, "vocab_size": VOCABULARY} | MORE.get(name, {}) | changes
    args = copy.deepcopy(get_train_spec(spec).model_args[flavor])
    args.update_from_config(job())
    args.max_seq_len = MAX_SEQ_LEN
    for field, value in changes.items():
        assert hasattr(args, field), field
        setattr(args, field, value)
    if name == "qwen3_moe":
        args.moe_args.num_experts, args.moe_args.top_k = 4, 2
    with torch.device("meta"):
        model = get_train_spec(spec).model_cls(args)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = False
        if isinstance(module, gpt_oss.Attention):
            module.inner_attention = DenseAttention()
    if converters:
        convert(model, *converters)
    initialise(model.to_empty(device="cpu"))
    for loss in auxiliary_losses([model]):
        loss.start_batch(torch.tensor(float(BATCH * SEQUENCE)))
    # Module.to would cast complex rotation tables to real
    return model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


ROWS = torch.stack([torch.arange(SEQUENCE) + 5, torch.arange(SEQUENCE).roll(4).mul(3)])
POSITIONS = {
    "none": None,
    "offset": torch.arange(SEQUENCE)[None] + 7,
    "rows": ROWS,  # an offset in one row, parts of documents in the other
}


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def backward(logits: Tensor) -> None:
    """Run the backward pass from a gradient that is exact in every dtype."""
    logits.backward(torch.randint(-4, 5, logits.shape, generator=torch.Generator().manual_seed(2)).to(logits.dtype))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    learning = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = [name for name, parameter in learning.items() if parameter.grad is None]
    assert not missing, f"no gradient: {missing}"
    return {name.replace("_checkpoint_wrapped_module.", ""): parameter.grad for name, parameter in learning.items()}


def compute(model: nn.Module, positions: Tensor | None = None) -> dict[str, Tensor]:
    """Return the logits, and every parameter's gradient by name."""
    model.zero_grad()
    logits = model(tokens()) if positions is None else model(tokens(), positions=positions)
    backward(logits)
    return {"logits": logits.detach(), **gradients(model)}


def assert_as_exact(ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """Check that each tensor is as near to the float64 values as the eager model's."""
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
    """Rotate in float64: neighbouring elements are a complex number that is multiplied by another."""
    factors = rows_of(freqs_cis, positions, x.shape[1]).to(torch.complex128)
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * factors).flatten(-2)


def exact_halves(x: Tensor, cache: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotate in float64: two elements half a head apart are the coordinates of a point."""
    rows = rows_of(cache, positions, x.shape[1])
    cos, sin = (rows.real, rows.imag) if rows.is_complex() else rows.chunk(4, dim=-1)[::2]
    a, b = x.double().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def on_both(exact: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def rotate_both(
        xq: Tensor, xk: Tensor, cache: Any = None, positions: Any = None, freqs_cis: Any = None
    ) -> tuple[Tensor, Tensor]:
        cache = freqs_cis if cache is None else cache
        return exact(xq, cache, positions), exact(xk, cache, positions)

    return rotate_both


EXACT: dict[tuple[Any, str], Callable[..., Any]] = {
    (llama3, "apply_rotary_emb"): on_both(exact_pairs),
    (llama4, "apply_rotary_emb"): on_both(exact_pairs),
    (deepseek_v3, "apply_rotary_emb"): exact_pairs,
    (deepseek_v32_attention, "apply_rotary_emb"): exact_pairs,
    (deepseek_v32_indexer, "apply_rotary_half"): exact_halves,
    (qwen3, "apply_rotary_emb"): on_both(exact_halves),
    (gpt_oss, "apply_rotary_emb"): on_both(exact_halves),
}
"""The exact rotation for each module and global name."""


@contextmanager
def exact_rotations() -> Iterator[None]:
    """Let unconverted models rotate in float64."""
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), function in EXACT.items():
            patch.setattr(module, name, function)
        yield


@functools.cache
def references(name: str, positions: str, **changes: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the results of the unconverted model in float32, and in float64 with exact rotations."""
    theirs = compute(build(name, **changes), POSITIONS[positions])
    with exact_rotations():
        return theirs, compute(build(name, dtype=torch.float64, **changes), POSITIONS[positions])


class Operators(BelowSubclasses):
    """Records the operators and their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((op._schema.name, by_name(op, args, kwargs)))
        return op(*args, **kwargs)

    def rotations(self) -> list[dict[str, Any]]:
        """Return the arguments of each rotation by name."""
        return [arguments for name, arguments in self.calls if name == "npu::npu_rotary_mul"]

    def on_tables(self) -> Counter[str]:
        """Count the operators on tables or angles, without views."""
        views = ("slice", "view", "unsqueeze", "select", "unbind", "detach", "alias", "split", "permute", "as_strided")
        views += ("expand", "view_as_real")
        return Counter(
            name
            for name, arguments in self.calls
            if name not in ("npu::npu_rotary_mul", *(f"aten::{view}" for view in views))
            and any(isinstance(x, Tensor) and x.ndim > 1 and MAX_SEQ_LEN in x.shape for x in tree_leaves(arguments))
        )
