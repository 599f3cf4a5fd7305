"""Our limits against CANN's public documentation of its operators.

``torchtitan_npu/emulator/cann_limits.json`` has the documented limits; ``torchtitan_npu/emulator/limits.py`` says how.
Our limits are those of the newest version on Atlas A2 and A3. ``DIFFERENCES`` lists where they are not: a test fails if
another difference appears, and if a listed one is gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from tests.contract.test_contract_limits import QUOTES
from torchtitan_npu.emulator.build import ACL_DTYPES, ANY_DTYPE, TENSORS, dtype_set
from torchtitan_npu.emulator.limits import bounds, documented_limits, is_documented
from torchtitan_npu.ops import OPS

ROWS = [row for row in documented_limits() if {"910B", "910_93"} & set(row["chips"])]
DTYPES = ("float16", "bfloat16", "float32", "float64", "int32", "int64")

OURS_IS_NARROWER = "torch_npu's own documentation allows less than CANN's"
NOT_OURS = "our table does not have the limit"
MADE_CONTIGUOUS = f"{NOT_OURS}: the operator's definition makes strided tensors contiguous, whatever its document says"
IN_RELEASES = "our table is that of CANN 9.0 and 9.1; sources after the last release allow more"
NEXT_OPERATOR = "the indexer's loss, which takes these statistics, allows 1 to 131072"

DIFFERENCES = {
    ("npu_fusion_attention", "the number of documents"): OURS_IS_NARROWER,
    ("npu_fusion_attention_grad", "the number of documents"): OURS_IS_NARROWER,
    ("npu_grouped_matmul", "the number of tensors in x"): OURS_IS_NARROWER,
    ("npu_rms_norm", "the number of dimensions of input"): OURS_IS_NARROWER,
    ("npu_moe_gating_top_k", "the number of experts in a group"): OURS_IS_NARROWER,
    ("npu_moe_gating_top_k", "renorm"): OURS_IS_NARROWER,
    ("npu_rotary_mul", "the layout of r1 and r2"): "our operator takes four dimensions, hence not TND",
    ("npu_rotary_mul_backward", "the layout of r1 and r2"): "our operator takes four dimensions, hence not TND",
    ("npu_all_gather_base_mm", "world_size"): "Atlas A2 allows 2, 4 and 8 only; our table is that of Atlas A3",
    ("npu_mm_reduce_scatter_base", "world_size"): "Atlas A2 allows 2, 4 and 8 only; our table is that of Atlas A3",
    ("npu_lightning_indexer_grad", "the number of keys"): f"{NOT_OURS}: no converter calls the operator",
    ("npu_sparse_lightning_indexer_grad_kl_loss", "the number of keys"): "CANN before 9.1 allows 131072",
    ("npu_sparse_lightning_indexer_grad_kl_loss", "the number of queries"): IN_RELEASES,
    ("npu_dense_lightning_indexer_softmax_lse", "the number of queries"): NEXT_OPERATOR,
    ("npu_dense_lightning_indexer_softmax_lse", "the number of keys"): NEXT_OPERATOR,
    ("npu_moe_gating_top_k", "norm_type"): NOT_OURS,
    ("npu_moe_gating_top_k_backward", "norm_type"): NOT_OURS,
    ("npu_rotary_mul_backward", "B * N with gradients for r1 and r2"): f"{NOT_OURS}: that of npu_rotary_mul says it",
    ("npu_rotary_mul_backward", "B with r1 of the layout B1SD or BS1D"): NOT_OURS,
    ("npu_swiglu", "input's memory"): MADE_CONTIGUOUS,
    ("npu_swiglu_backward", "grad_output's memory"): MADE_CONTIGUOUS,
}

NAN = "reported from hardware: the gradient of different dtypes is NaN; CANN's document allows any pair"
COPIED = "CANN's host code takes a transpose as it is, and copies other strided tensors in every call"
UNDOCUMENTED = {
    ("npu_moe_token_unpermute", "the dtype of permuted_tokens and probs"): NAN,
    ("_npu_moe_token_unpermute", "the dtype of permuted_tokens and probs"): NAN,
    ("npu_moe_token_unpermute_grad_v2", "the dtype of grad_unpermuted_tokens, permuted_tokens and probs"): NAN,
    ("npu_grouped_matmul", "whether x (with group_type 2: x.t()) is contiguous"): COPIED,
    ("npu_grouped_matmul", "whether weight (or, but with group_type 2, its transpose) is contiguous"): COPIED,
    (
        "npu_grouped_matmul",
        "x.dtype with scale (on a chip of the series 950 only)",
    ): "only CANN's code has these factors",
    ("npu_swiglu", "the number of dimensions of input"): "tensors of CANN have at most 8 dimensions",
}
"""Our limits that neither CANN's documents nor torch_npu's have, with their reasons."""


DTYPE_COLUMNS = {
    ("npu_fusion_attention", "query.dtype"): ("aclnnFlashAttentionScoreV3", "query"),
    ("npu_fusion_attention_grad", "query.dtype"): ("aclnnFlashAttentionScoreGrad", "query"),
    ("npu_grouped_matmul", "x.dtype"): ("aclnnGroupedMatmulV4", "x"),
    ("npu_grouped_matmul_add_", "x.dtype"): ("aclnnGroupedMatmulAdd", "x"),
    ("npu_sparse_flash_attention", "query.dtype"): ("aclnnSparseFlashAttention", "query"),
    ("npu_sparse_flash_attention_grad", "query.dtype"): ("aclnnSparseFlashAttentionGrad", "query"),
    ("npu_lightning_indexer", "query.dtype"): ("aclnnLightningIndexer", "query"),
    ("npu_lightning_indexer", "weights.dtype"): ("aclnnLightningIndexer", "weights"),
    ("npu_lightning_indexer_grad", "query.dtype"): ("aclnnLightningIndexerGrad", "query"),
    ("npu_sparse_lightning_indexer_grad_kl_loss", "query.dtype"): ("aclnnSparseLightningIndexerGradKLLoss", "query"),
    ("npu_sparse_lightning_indexer_grad_kl_loss", "weights.dtype"): (
        "aclnnSparseLightningIndexerGradKLLoss",
        "weights",
    ),
    ("npu_dense_lightning_indexer_softmax_lse", "query_index.dtype"): (
        "aclnnDenseLightningIndexerSoftmaxLse",
        "queryIndex",
    ),
    ("npu_dense_lightning_indexer_softmax_lse", "weights.dtype"): ("aclnnDenseLightningIndexerSoftmaxLse", "weight"),
    ("npu_moe_gating_top_k", "x.dtype"): ("aclnnMoeGatingTopK", "x"),
    ("npu_moe_gating_top_k_backward", "x_norm.dtype"): ("aclnnMoeGatingTopKBackward", "xNorm"),
    ("npu_moe_token_permute", "tokens.dtype"): ("aclnnMoeTokenPermute", "tokens"),
    ("npu_moe_token_permute_grad_v2", "tokens_dtype"): ("aclnnMoeTokenPermuteGrad", "permutedOutputGrad"),
    ("npu_moe_token_unpermute", "permuted_tokens.dtype"): ("aclnnMoeTokenUnpermute", "permutedTokens"),
    ("_npu_moe_token_unpermute", "permuted_tokens.dtype"): ("aclnnMoeTokenUnpermute", "permutedTokens"),
    ("npu_rotary_mul", "input.dtype"): ("aclnnRotaryPositionEmbedding", "x"),
    ("npu_rotary_mul_backward", "input.dtype"): ("aclnnRotaryPositionEmbeddingGrad", "xOptional"),
    ("npu_mrope", "query.dtype"): ("aclnnRopeWithSinCosCache", "queryIn"),
    ("npu_rms_norm", "input.dtype"): ("aclnnRmsNorm", "x"),
    ("npu_rms_norm_backward", "input.dtype"): ("aclnnRmsNormGrad", "x"),
    ("npu_add_rms_norm", "x1.dtype"): ("aclnnAddRmsNorm", "x1"),
    ("npu_swiglu", "input.dtype"): ("aclnnSwiGlu", "x"),
    ("npu_swiglu_backward", "input.dtype"): ("aclnnSwiGluGrad", "x"),
}
"""Our limits of dtypes, and the columns of CANN's documents that ``cann_tensors.json`` has."""

OTHER_DTYPE_LIMITS = {
    # Their documents have the dtypes in prose or elsewhere; cann_limits.json has them.
    *(("npu_all_gather_base_mm", "input.dtype"), ("npu_mm_reduce_scatter_base", "input.dtype")),
    *(
        ("npu_sparse_flash_attention_grad", "sparse_indices.dtype"),
        ("npu_lightning_indexer_grad", "sparse_indices.dtype"),
    ),
    ("npu_moe_token_unpermute_grad_v2", "permuted_tokens_dtype"),
    *(
        ("npu_dense_lightning_indexer_grad_kl_loss", "query.dtype"),
        ("npu_dense_lightning_indexer_grad_kl_loss", "weights.dtype"),
    ),
    ("npu_grouped_dynamic_mx_quant", "x.dtype"),  # torch_npu's documentation has it
}

ONLY_ON_950 = {"npu_dynamic_mx_quant", "npu_grouped_dynamic_mx_quant", "npu_quant_matmul"}
"""Operators, or their only calls here, that CANN documents for no other chip. Their limits are torch_npu's."""
NOT_ON_950 = {"npu_lightning_indexer_grad", "npu_moe_gating_top_k_backward"}
"""Operators whose documents have no dtypes for the 950."""


@pytest.mark.parametrize(("key", "column"), DTYPE_COLUMNS.items(), ids=lambda item: ": ".join(item))
def test_dtypes_are_those_of_the_documents(key: tuple[str, str], column: tuple[str, str]) -> None:
    """A column also has dtypes of quantized calls. Our operators have some 8-bit floats of them, on the 950 only."""
    (ours,) = (limit.allowed for limit in OPS[key[0]].limits if limit.what == key[1])
    document = json.loads(TENSORS.read_text())[column[0]]["dtypes"]
    for series in ("910B", "910_93", "950"):
        documented = dtype_set(document, column[1], series, "master")
        assert (documented == ANY_DTYPE) == (series == "950" and key[0] in NOT_ON_950)
        found = {name for name in DTYPES if documented >> ACL_DTYPES[name] & 1}
        assert documented == ANY_DTYPE or found == {str(dtype).removeprefix("torch.") for dtype in ours} & set(
            DTYPES
        ), series


def test_every_limit_of_a_dtype_has_its_column() -> None:
    limits = {(name, limit.what) for name, op in OPS.items() for limit in op.limits if limit.what.endswith("dtype")}
    assert limits == DTYPE_COLUMNS.keys() | OTHER_DTYPE_LIMITS


def newest(allowed: dict[str, Any]) -> Any:
    return list(allowed.values())[-1]


@pytest.mark.parametrize("key", sorted({(row["op"], row["what"]) for row in ROWS}), ids=": ".join)
def test_limit_is_that_of_the_newest_version(key: tuple[str, str]) -> None:
    rows = [row for row in ROWS if (row["op"], row["what"]) == key]
    difference = [text for row in rows if (text := compare(*key, newest(row["allowed"])))]
    if key in DIFFERENCES:
        assert difference, f"no longer different ({DIFFERENCES[key]}): remove it from DIFFERENCES"
        assert DIFFERENCES[key].startswith(NOT_OURS) == (difference[0] == NOT_OURS)
    else:
        assert not difference, (difference, rows[0]["source"])


def compare(op: str, what: str, documented: Any) -> str:
    """Return how our limit differs from the documented one."""
    if documented is None:
        return ""
    rows = {limit.what: limit.allowed for limit in OPS[op].limits}
    if what not in rows:
        return NOT_OURS
    ours = rows[what]
    dtypes = set(documented) <= set(DTYPES)
    for value in DTYPES if dtypes else sorted(probes(documented, ours), key=str):
        is_ours = (getattr(torch, value) if dtypes else value) in ours
        if is_ours != is_documented(value, documented):
            return f"{value}: {'only ours' if is_ours else 'only documented'}"
    return ""


def probes(documented: list[Any], ours: Any) -> set[Any]:
    """Return values at and around the ends of every range, where both sides say something."""
    items = list(documented)
    if isinstance(ours, range):
        items.append(f"{ours.start}..{ours.stop - 1}")
    elif isinstance(ours, Iterable):
        items += list(ours)
    values = set(others(items))
    for low, high in filter(None, map(bounds, items)):
        values.update(end + step for end in (low, high) if end is not None for step in (-1, 0, 1))
    lows = [found[0] for item in documented if (found := bounds(item))]
    highs = [found[1] for item in documented if (found := bounds(item))]
    # an open end says nothing about small, or large, values
    if None in lows:
        values = {value for value in values if value >= max(high for high in highs if high is not None) - 1}
    if None in highs:
        values = {value for value in values if value <= min(low for low in lows if low is not None) + 1}
    return values


def others(items: list[Any]) -> Iterator[Any]:
    return (item for item in items if bounds(item) is None and not isinstance(item, range))


def test_every_operator_with_limits_is_documented() -> None:
    documented = {row["op"] for row in ROWS}
    assert {name for name, op in OPS.items() if op.limits} - ONLY_ON_950 == documented


def test_every_limit_of_ours_has_a_source() -> None:
    ours = {(name, limit.what) for name, op in OPS.items() for limit in op.limits}
    documented = {(row["op"], row["what"]) for row in ROWS} | {(quote.op, quote.what) for quote in QUOTES}
    assert ours - documented == UNDOCUMENTED.keys()


def test_the_probes_find_differences() -> None:
    assert compare("npu_rms_norm", "input.dtype", ["float16", "bfloat16"]) == "float32: only ours"
    assert compare("npu_moe_gating_top_k_backward", "the number of experts", ["2..2047"]) == "2048: only ours"
    assert compare("npu_moe_gating_top_k_backward", "the number of experts", ["3..2048"]) == "2: only ours"
    assert compare("npu_moe_gating_top_k_backward", "the number of experts", ["..2048"]) == ""
    assert compare("npu_moe_gating_top_k_backward", "the number of experts", ["..2049"]) == "2049: only documented"
    assert compare("npu_lightning_indexer", "sparse_count", ["1..2048", 3072]).endswith("only ours")
