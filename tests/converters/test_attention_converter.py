"""``npu_attention``: training is that of TorchTitan's attention, with and without documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_mask
from torchtitan.distributed import ParallelDims
from torchtitan.models.attention import get_causal_mask_mod, get_document_mask_mod
from torchtitan.protocols.model_converter import build_model_converters

from tests._helpers import layouts
from tests._helpers.converted_models import (
    BATCH,
    LAYOUT,
    SEQUENCE,
    Step,
    assert_as_exact,
    build,
    build_on_meta,
    convert,
    job,
    step,
    tokens,
)
from tests._helpers.multirank import run_on_ranks
from tests._helpers.qwen3_vl_models import build as build_qwen3_vl
from tests._helpers.qwen3_vl_models import make_batch, model_args
from tests._helpers.rope_models import Operators
from tests._helpers.training import TOLERANCE, Record, assert_same_gradients, together
from torchtitan_npu.converters.attention import NpuCausalAttention, NpuFlexAttention, NpuVarlenAttention
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.models.qwen3_vl.patch_grids import position_ids
from torchtitan_npu.ops.fusion_attention import op as fusion_attention

EOS = 7


class Tokenizer:
    eos_id = EOS


@pytest.mark.parametrize("name", ["llama3", "qwen3", "deepseek_v3"])
def test_trains_the_same(name: str) -> None:
    converted = build(name, "npu_attention", n_layers=2)
    assert sum(isinstance(module, NpuCausalAttention) for module in converted.modules()) == 2
    assert_as_exact(step(converted), step(build(name, n_layers=2)), step(build(name, n_layers=2, dtype=torch.float64)))


class DenseAttention(nn.Module):
    """TorchTitan's document mask, as a matrix, in scaled dot-product attention."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed  # the output of varlen attention

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
        mask = kwargs.pop("block_mask", mask)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.dense, scale=kwargs.get("scale"), enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).flatten(0, 1) if self.packed else out


def documents_step(model: Any) -> Step:
    batch = tokens()
    batch[0, 3] = batch[0, 4] = batch[1, 9] = batch[1, SEQUENCE - 1] = EOS
    inputs, labels = batch[:, :-1], batch[:, 1:]
    mask = model.get_attention_masks(input_batch=inputs, tokenizer=Tokenizer(), extra_inputs={})
    mask.dense = create_mask(
        and_masks(get_causal_mask_mod(), get_document_mask_mod(inputs, EOS)), BATCH, None, SEQUENCE, SEQUENCE, "cpu"
    )
    loss = F.cross_entropy(model(inputs, attention_masks=mask).flatten(0, 1), labels.flatten())
    loss.backward()
    return Step(loss.detach(), {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("name", "attn_type", "cls"),
    [
        ("llama3", "varlen", NpuVarlenAttention),
        ("llama3", "flex", NpuFlexAttention),
        ("qwen3", "varlen", NpuVarlenAttention),
        ("deepseek_v3", "flex", NpuFlexAttention),
    ],
)
def test_trains_the_same_within_documents(name: str, attn_type: str, cls: type[nn.Module]) -> None:
    changes = {"n_layers": 2, "attn_type": attn_type, "attn_mask_type": "block_causal"}

    def dense(dtype: torch.dtype) -> nn.Module:
        model: Any = build(name, "npu_attention", dtype=dtype, **changes)
        for block in model.layers.values():
            assert type(block.attention.inner_attention) is cls
            block.attention.inner_attention = DenseAttention(packed=attn_type == "varlen")
        return model

    converted = build(name, "npu_attention", **changes)
    assert_as_exact(
        documents_step(converted), documents_step(dense(torch.float32)), documents_step(dense(torch.float64))
    )


def test_a_flex_flavor_with_a_causal_mask_attends_across_documents() -> None:
    model: Any = build("llama3", "npu_attention", n_layers=1, attn_type="flex", attn_mask_type="causal")
    batch = tokens()[:, :-1]
    mask = model.get_attention_masks(input_batch=batch, tokenizer=Tokenizer())
    assert isinstance(mask, BlockMask)
    plain = build("llama3", n_layers=1)
    torch.testing.assert_close(model(batch, attention_masks=mask), plain(batch))


def test_documents_of_microbatches() -> None:
    model: Any = build_on_meta("llama3", n_layers=1, attn_type="varlen", attn_mask_type="block_causal")
    convert(model, "npu_attention")
    model.get_attention_masks.microbatches = 2
    batch = torch.zeros(2, 4, dtype=torch.long)
    batch[1, 1] = EOS
    first, second = model.get_attention_masks(input_batch=batch, tokenizer=Tokenizer()).values
    assert first.documents.cu_seqlens_k.integers == (4,) and second.documents.cu_seqlens_k.integers == (2, 4)


def test_more_documents_than_the_operator_takes() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 3000, 1, 8, dtype=torch.float64)
    ends = list(range(2, 3001, 2))  # 1500 documents of two tokens
    packed = fusion_attention.packed_attention(q, k, v, ends, None, fusion_attention.causal_mask(q.device))
    pairs = (t.view(1500, 2, 1, 8).transpose(1, 2) for t in (q, k, v))
    expected = F.scaled_dot_product_attention(*pairs, is_causal=True).transpose(1, 2).reshape(3000, 1, 8)
    torch.testing.assert_close(packed, expected)


def train_documents(layout: dict[str, int]) -> Record:
    smaller = {"n_layers": 2, "dim": 64, "n_heads": 4}
    layouts.TINY["llama3_varlen"] = ("llama3", "debugmodel_varlen_attn", smaller)
    return layouts.train("llama3_varlen", layout, {"model.converters": ["npu_attention"]})


def test_documents_in_a_pipeline() -> None:
    """The corpus has documents that are shorter than a row."""
    one = run_on_ranks(1, train_documents, {}, process_group=False)
    two = together(run_on_ranks(2, train_documents, {"pp": 2}, process_group=False))
    assert two.losses == pytest.approx(one[0].losses, rel=TOLERANCE)
    assert_same_gradients(two, one[0])


def vision_step(*converters: str, dtype: torch.dtype = torch.float32) -> Step:
    """Train on three rows with images and videos of several sizes, two of them with two documents."""
    model = build_qwen3_vl(model_args())
    if converters:
        convert(model, *converters)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    model.to(dtype)
    batch = make_batch(3, ("iv", "", "ii"))
    positions = position_ids(batch.tokens, batch.grids, model.model_args)
    positions[:, 1, 4:] -= positions[:, 1, 4:5].clone()  # a second document in the row of text
    inputs = batch.ours() | {"patches": batch.patches.to(dtype)}
    logits = model(**inputs, positions=positions)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.tokens[:, 1:].flatten())
    loss.backward()
    return Step(loss.detach(), {name: p.grad for name, p in model.named_parameters()})


def test_the_decoder_and_the_vision_tower_of_qwen3_vl() -> None:
    with Operators() as operators:
        converted = vision_step("npu_attention")
    calls = [name for name, _ in operators.calls if name == "npu::npu_fusion_attention"]
    assert len(calls) == 3 + 3  # layers of the decoder and of the tower
    assert_as_exact(converted, vision_step(), vision_step(dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "cp", "message"),
    [
        ("llama3", 2, "context parallel does not split"),
        ("llama3", 1, "compiled again for each batch"),
        ("qwen3_vl", 1, "compiled again for each batch"),
    ],
)
def test_documents_are_refused(name: str, cp: int, message: str) -> None:
    documents = {"attn_type": "varlen", "attn_mask_type": "block_causal"}
    model = build_qwen3_vl(model_args()) if name == "qwen3_vl" else build_on_meta(name, n_layers=1, **documents)
    config = job(("npu_attention",))
    config.compile.enable = cp == 1
    with pytest.raises(UsageError, match=message):
        build_model_converters(config, ParallelDims(**LAYOUT | {"cp": cp, "world_size": cp})).convert(model)


def test_a_model_without_dense_attention_is_refused() -> None:
    with pytest.raises(UsageError, match="npu_attention found no dense attention of a TorchTitan model"):
        build_on_meta("gpt_oss", "npu_attention")


def test_documents_of_last_tokens_do_not_change_their_argument() -> None:
    is_last = torch.tensor([[False, True, False], [False, False, False]])
    documents = Documents.from_last_tokens(is_last)
    assert documents.cu_seqlens_k.integers == (2, 3, 6) and not is_last[:, -1].any()
