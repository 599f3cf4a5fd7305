"""A small call of each operator, within the limits of its NPU kernel, on the CPU.

A function of this module has the name of its operator. It receives the options of a recorded call by name, and a
:class:`~torchtitan_npu.cli.doctor.call_description.TensorDescription` for each tensor. Without them, tensors are
bfloat16. It returns the arguments by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.cli.doctor.call_description import TensorDescription
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.fusion_attention.op import causal_mask
from torchtitan_npu.ops.moe_gating import SIGMOID
from torchtitan_npu.ops.sparse_flash_attention.op import MLA_ABSORBED, PASSED_TO_GRAD

TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 256, 8, 2
HEADS, HEAD_SIZE = 4, 64
MATRIX, BATCH = (TensorDescription(torch.bfloat16, dims) for dims in (2, 4))
"""The inputs of a call that no recorded step makes: (tokens, hidden), and (batch, tokens, heads, head size)."""
WEIGHTS, INDICES = TensorDescription(torch.bfloat16, 3), TensorDescription(torch.int32, 2)
GROUP_SIZES = (16, 0, 30, 18)
QUERIES, KEYS, DOCUMENTS = 8, 2048, {"BSND": 1, "TND": 2}
"""Of sparse attention and its indexer: the last queries of each document, and all its keys."""

UNORDERED_INTEGERS = ("npu_lightning_indexer",)
"""Integers in their outputs, such as selected keys, may come in any order."""
UNUSED_OUTPUTS = {"_npu_moe_token_unpermute": (1,), "npu_rotary_mul_backward": (1, 2)}
"""Outputs that no job uses: a copy of the rows, and the gradients of constants. An NPU leaves them undefined in some
calls; CANN 9.1 has no copy of the rows without probs."""


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return a normally distributed tensor on the CPU."""
    return torch.randn(shape).to(dtype)


def randn_like(described: TensorDescription, last: int) -> Tensor:
    """Return a normally distributed tensor of that dtype and number of dimensions, whose last one is ``last``."""
    leading = {2: (TOKENS,), 3: (2, TOKENS), 4: (2, TOKENS, HEADS)}[described.dims]
    return randn(*leading, last, dtype=described.dtype)


def result(op: str, arguments: dict[str, Any]) -> Any:
    """Return what the reference kernel of ``op`` computes."""
    return OPS[op].reference(**OPS[op].complete(**arguments))


# norms, activations, rotations


def npu_rms_norm(input: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    return {"input": randn_like(input, HIDDEN), "gamma": randn(HIDDEN, dtype=input.dtype)}


def npu_rms_norm_backward(input: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    forward = npu_rms_norm(input)
    return {"dy": randn_like(input, HIDDEN), **forward, "rstd": result("npu_rms_norm", forward)[1]}


def npu_add_rms_norm(**_: Any) -> dict[str, Any]:
    return {"x1": randn(TOKENS, HIDDEN), "x2": randn(TOKENS, HIDDEN), "gamma": randn(HIDDEN)}


def npu_swiglu(input: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    return {"input": randn_like(input, 2 * HIDDEN)}


def npu_swiglu_backward(input: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    return {"grad_output": randn_like(input, HIDDEN), **npu_swiglu(input)}


def npu_rotary_mul(input: TensorDescription = BATCH, **_: Any) -> dict[str, Any]:
    cos, sin = _angles(HEAD_SIZE, input.dtype)
    return {"input": randn_like(input, HEAD_SIZE), "r1": cos[None, :, None], "r2": sin[None, :, None]}


def npu_rotary_mul_backward(input: TensorDescription = BATCH, **_: Any) -> dict[str, Any]:
    return {"grad": randn_like(input, HEAD_SIZE), **npu_rotary_mul(input)}


def npu_mrope(query: TensorDescription = MATRIX, **_: Any) -> dict[str, Any]:
    head_size, section = 128, [24, 20, 20]
    cos, sin = _angles(head_size, query.dtype)
    return {
        "positions": torch.stack([torch.randperm(TOKENS) for _ in section]),
        "query": randn_like(query, HEADS * head_size),
        "key": randn_like(query, HEADS // 2 * head_size),
        "cos_sin_cache": torch.cat((cos[:, : head_size // 2], sin[:, : head_size // 2]), dim=1),
        "head_size": head_size,
        "mrope_section": section,
    }


def _angles(size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the tokens' positions for a head of ``size`` channels, (tokens, size) each."""
    frequencies = 10000 ** -torch.linspace(0, 1, size // 2)
    table = torch.outer(torch.arange(TOKENS), frequencies).repeat(1, 2)
    return table.cos().to(dtype), table.sin().to(dtype)


# mixture of experts


def npu_moe_gating_top_k(bias: TensorDescription | None = None, group_count: int = 1, **_: Any) -> dict[str, Any]:
    # scores far apart, so that rounding does not change which experts are best
    experts = max(EXPERTS, 4 * group_count)
    x = torch.stack([torch.randperm(experts) for _ in range(TOKENS)]).to(torch.bfloat16) * (4 / experts)
    call = {"x": x, "k": TOP_K, "norm_type": SIGMOID, "out_flag": True}
    return call if bias is None else call | {"bias": 2 * (torch.arange(experts) % 2)}  # odd experts first


def npu_moe_gating_top_k_backward(**_: Any) -> dict[str, Any]:
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).int()
    scores = torch.randn(TOKENS, EXPERTS).sigmoid()
    return {"x_norm": scores, "grad_y": randn(TOKENS, TOP_K), "expertIdx": experts, "norm_type": SIGMOID}


def npu_moe_token_permute(
    tokens: TensorDescription = MATRIX, indices: TensorDescription = INDICES, **_: Any
) -> dict[str, Any]:
    experts = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(TOKENS)]).to(indices.dtype)
    return {"tokens": randn_like(tokens, HIDDEN), "indices": experts if indices.dims == 2 else experts[:, 0]}


def npu_moe_token_permute_grad_v2(tokens_dtype: torch.dtype = torch.bfloat16, **_: Any) -> dict[str, Any]:
    return {
        "grad_permuted_tokens": randn(TOKENS * TOP_K, HIDDEN, dtype=tokens_dtype),
        "sorted_indices": torch.randperm(TOKENS * TOP_K).int(),
        "tokens_size_0": TOKENS,
        "tokens_dtype": tokens_dtype,
        "num_topK": TOP_K,
    }


def npu_moe_token_unpermute(
    permuted_tokens: TensorDescription = MATRIX, probs: TensorDescription | None = None, **_: Any
) -> dict[str, Any]:
    return {
        "permuted_tokens": randn(TOKENS * TOP_K, HIDDEN, dtype=permuted_tokens.dtype),
        "sorted_indices": torch.randperm(TOKENS * TOP_K).int(),
        "probs": None if probs is None else torch.rand(TOKENS, TOP_K).to(probs.dtype),
    }


def npu_moe_token_unpermute_grad_v2(
    permuted_tokens_dtype: torch.dtype = torch.bfloat16, probs: TensorDescription | None = None, **_: Any
) -> dict[str, Any]:
    rows = TOKENS * TOP_K
    return {
        "grad_unpermuted_tokens": randn(rows if probs is None else TOKENS, HIDDEN, dtype=permuted_tokens_dtype),
        "permuted_tokens_size_0": rows,
        "permuted_tokens_dtype": permuted_tokens_dtype,
        **npu_moe_token_unpermute(TensorDescription(permuted_tokens_dtype, 2), probs),
    }


def npu_grouped_matmul(group_type: int = 0, group_list_type: int = 0, **_: Any) -> dict[str, Any]:
    """Return the products of the groups' rows or, with ``group_type`` 2, the gradient of the weights.

    With ``group_list_type`` 0 there is one group, as on a rank with one expert.
    """
    sizes = GROUP_SIZES if group_list_type == 1 else (TOKENS,)
    x, weight = randn(TOKENS, HIDDEN), randn(len(sizes), HIDDEN, 128)
    if group_type == 2:
        x, weight = x.t(), randn(TOKENS, 128)
    groups = {"group_list": torch.tensor(sizes), "group_list_type": group_list_type, "group_type": group_type}
    return {"x": [x], "weight": [weight], "split_item": 3, **groups}


def npu_grouped_matmul_add_(**_: Any) -> dict[str, Any]:
    return {
        "input": torch.randn(len(GROUP_SIZES), HIDDEN, 128),
        "x": randn(TOKENS, HIDDEN),
        "weight": randn(TOKENS, 128),
        "group_list": torch.tensor(GROUP_SIZES).cumsum(0),
    }


# attention


def npu_fusion_attention(
    query: TensorDescription = BATCH,
    input_layout: str = "BSND",
    atten_mask: TensorDescription | None = None,
    sparse_mode: int = 0,
    **_: Any,
) -> dict[str, Any]:
    tokens = (TOKENS,) if input_layout == "TND" else (2, TOKENS)
    tensors = {name: randn(*tokens, HEADS, HEAD_SIZE, dtype=query.dtype) for name in ("query", "key", "value")}
    if atten_mask is not None:
        tensors["atten_mask"] = causal_mask(torch.device("cpu"))
    ends = [TOKENS // 4, TOKENS] if input_layout == "TND" else None
    options = {"head_num": HEADS, "input_layout": input_layout, "scale": HEAD_SIZE**-0.5, "sparse_mode": sparse_mode}
    return {**tensors, **options, "actual_seq_qlen": ends, "actual_seq_kvlen": ends}


def npu_fusion_attention_grad(**described: Any) -> dict[str, Any]:
    forward = npu_fusion_attention(**described)
    out, softmax_max, softmax_sum, softmax_in, *_ = result("npu_fusion_attention", forward)
    statistics = {"softmax_max": softmax_max, "softmax_sum": softmax_sum, "softmax_in": softmax_in, "attention_in": out}
    scale = forward.pop("scale")
    return {**forward, "dy": randn(*out.shape, dtype=out.dtype), **statistics, "scale_value": scale}


def npu_sparse_flash_attention(layout_query: str = "BSND", **_: Any) -> dict[str, Any]:
    """Return a call in which each query selects every key that it may attend to."""
    heads, size, rope = 32, 512, 64
    key = _tokens(layout_query, KEYS, 1, size)
    ends = {f"actual_seq_lengths_{name}": ends for name, ends in _ends(layout_query, "query", "kv").items()}
    return {
        "query": _tokens(layout_query, QUERIES, heads, size),
        "key": key,
        "value": key,
        "sparse_indices": _selection(layout_query),
        "scale_value": (size + rope) ** -0.5,
        "query_rope": _tokens(layout_query, QUERIES, heads, rope),
        "key_rope": _tokens(layout_query, KEYS, 1, rope),
        **ends,
        "layout_query": layout_query,
        "layout_kv": layout_query,
        "return_softmax_lse": True,
        "attention_mode": MLA_ABSORBED,
    }


def npu_sparse_flash_attention_grad(layout: str = "BSND", **_: Any) -> dict[str, Any]:
    forward = npu_sparse_flash_attention(layout)
    out, softmax_max, softmax_sum = result("npu_sparse_flash_attention", forward)
    statistics = {"out": out, "softmax_max": softmax_max, "softmax_sum": softmax_sum}
    options = {"sparse_block_size": 1, "attention_mode": MLA_ABSORBED, "layout": layout}
    ends = _ends(layout, "actual_seq_qlen", "actual_seq_kvlen")
    inputs = {name: forward[name] for name in PASSED_TO_GRAD if name in forward}
    return {**inputs, "d_out": randn(*out.shape), **statistics, **ends, **options}


def npu_lightning_indexer(weights: TensorDescription = WEIGHTS, layout_query: str = "BSND", **_: Any) -> dict[str, Any]:
    """Return queries that score some keys above 0 and the others 0, so that rounding does not change the selection."""
    inputs = _index(weights, layout_query)
    documents, selected = DOCUMENTS[layout_query], KEYS // 4
    keys = KEYS // documents
    sign = -torch.ones(documents, keys)
    for row in sign:
        row[torch.randperm(keys - QUERIES)[:selected]] = 1  # visible to all queries
    inputs["key"] = inputs["key"].abs() * sign.view(inputs["key"].shape[:-1])[..., None].to(inputs["key"].dtype)
    inputs |= {"query": inputs["query"].abs(), "weights": inputs["weights"].abs()}
    ends = {f"actual_seq_lengths_{name}": ends for name, ends in _ends(layout_query, "query", "key").items()}
    layouts = {"layout_query": layout_query, "layout_key": layout_query}
    return {**inputs, **ends, **layouts, "sparse_count": selected}


def npu_lightning_indexer_grad(**_: Any) -> dict[str, Any]:
    selection = _selection("BSND")
    return {**_index(WEIGHTS, "BSND"), "sparse_indices": selection, "dy": randn(*selection.shape)}


def npu_sparse_lightning_indexer_grad_kl_loss(
    weights: TensorDescription = WEIGHTS, layout: str = "BSND", **_: Any
) -> dict[str, Any]:
    attention = npu_sparse_flash_attention_grad(layout)
    passed = ("query", "key", "sparse_indices", "softmax_max", "softmax_sum", "scale_value", "query_rope", "key_rope")
    return {**{name: attention[name] for name in passed}, **npu_dense_lightning_indexer_softmax_lse(weights, layout)}


def npu_dense_lightning_indexer_softmax_lse(
    weights: TensorDescription = WEIGHTS, layout: str = "BSND", **_: Any
) -> dict[str, Any]:
    inputs = _index(weights, layout)
    index = {"query_index": inputs["query"], "key_index": inputs["key"], "weights": inputs["weights"]}
    ends = _ends(layout, "actual_seq_qlen", "actual_seq_klen")
    return {**index, **{name: tensor.tolist() for name, tensor in ends.items()}, "layout": layout}


def npu_dense_lightning_indexer_grad_kl_loss(
    weights: TensorDescription = WEIGHTS, layout: str = "BSND", **_: Any
) -> dict[str, Any]:
    heads, size, rope = 32, 128, 64
    index = npu_dense_lightning_indexer_softmax_lse(weights, layout)
    query, query_rope = (_tokens(layout, QUERIES, heads, last) for last in (size, rope))
    key, key_rope = (_tokens(layout, KEYS, heads, last) for last in (size, rope))
    scale, documents = (size + rope) ** -0.5, DOCUMENTS[layout]
    queries, keys = QUERIES // documents, KEYS // documents
    visible = torch.block_diag(*[torch.ones(queries, keys).tril(keys - queries)] * documents).bool()
    q, k = (torch.cat(pair, -1).float() for pair in ((query, query_rope), (key, key_rope)))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k).mul(scale).masked_fill(~visible, -torch.inf)
    softmax_max = scores.amax(-1, keepdim=True)
    softmax_max_index, softmax_sum_index = result("npu_dense_lightning_indexer_softmax_lse", index)
    return {
        **{"query": query, "key": key, **index, "query_rope": query_rope, "key_rope": key_rope},
        **{"softmax_max": softmax_max, "softmax_sum": (scores - softmax_max).exp().sum(-1, keepdim=True)},
        **{"softmax_max_index": softmax_max_index, "softmax_sum_index": softmax_sum_index, "scale_value": scale},
    }


def _tokens(layout: str, tokens: int, *shape: int) -> Tensor:
    """Return a bfloat16 tensor of ``tokens``: of one sequence, or of packed documents."""
    return randn(*((tokens,) if layout == "TND" else (1, tokens)), *shape)


def _index(weights: TensorDescription, layout: str) -> dict[str, Any]:
    """Return the indexer's inputs."""
    heads, size = 64, 128
    query, key = _tokens(layout, QUERIES, heads, size), _tokens(layout, KEYS, 1, size)
    return {"query": query, "key": key, "weights": randn(*query.shape[:-1], dtype=weights.dtype)}


def _ends(layout: str, query: str, key: str) -> dict[str, Tensor]:
    """Return the ends of the packed documents under these names, or nothing in BSND: (documents) int32."""
    if layout == "BSND":
        return {}
    parts = torch.arange(1, DOCUMENTS[layout] + 1, dtype=torch.int32)
    return {name: parts * (size // len(parts)) for name, size in ((query, QUERIES), (key, KEYS))}


def _selection(layout: str) -> Tensor:
    """Return all visible keys of each query in random order, then -1: (..., queries, 1, keys) int32."""
    documents = DOCUMENTS[layout]
    queries, keys = QUERIES // documents, KEYS // documents
    rows = []
    for query in [*range(queries)] * documents:
        visible = keys - queries + 1 + query
        rows.append(torch.cat((torch.randperm(visible), torch.full((KEYS - visible,), -1))))
    selection = torch.stack(rows).int()[:, None]
    return selection if layout == "TND" else selection[None]


SAMPLES: dict[str, Callable[..., dict[str, Any]]] = {
    "_npu_moe_token_unpermute": npu_moe_token_unpermute,
    **{name: value for name, value in globals().items() if name in OPS},
}
"""The functions by the name of the operator. Operators that one process cannot call, because they have a collective, or
that only some chips have, are missing."""
