"""``npu_fusion_attention`` and ``npu_fusion_attention_grad``: softmax attention, dense or causal, packed or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd, save_by_name, saved_by_name
from torchtitan_npu.ops.core.checks import FLOATS, NPU_FLOATS, check_dtype, check_is, longest_document
from torchtitan_npu.ops.core.dtypes import compute_dtype
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Strategy
from torchtitan_npu.ops.fusion_attention import reference

CAUSAL, UNMASKED = 3, 0
"""Values of ``sparse_mode``. The last query of a causal call is at its last key."""
LAYOUTS = {"BSND": 4, "BNSD": 4, "TND": 3, "BSH": 3, "SBH": 3}
"""The layouts, and the number of dimensions of each."""
COMPRESSED = 2048
"""The side of the causal mask of sparse_mode 2 and 3, whatever the size of the scores."""
MAX_DOCUMENTS = 1024
"""The documented number of sequences of a call in TND."""
NOT_IMPLEMENTED = ("pse", "padding_mask", "prefix", "sink", "dropout_mask")
"""Arguments of the schema that only torch_npu implements."""


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _tokens(tensor: Tensor, layout: str) -> int:
    return tensor.shape[layout.index("T" if layout == "TND" else "S")]


def checks(call: Call) -> Iterator[str]:
    for name in NOT_IMPLEMENTED:
        # the gradient has no dropout_mask
        if getattr(call, name, None) is not None:
            yield f"{name} must be None: only torch_npu implements it"
    if call.keep_prob != 1.0:
        yield f"keep_prob must be 1, since only torch_npu implements dropout, not {call.keep_prob}"
    if call.input_layout not in LAYOUTS:
        yield f"input_layout must be one of {', '.join(LAYOUTS)}, not {call.input_layout!r}"
        return
    if call.softmax_layout not in ("", "TND") or (call.softmax_layout == "TND" and call.input_layout != "TND"):
        yield f"softmax_layout must be '' or, if input_layout is TND, 'TND', not {call.softmax_layout!r}"
    yield from check_dtype("query", call.query, *FLOATS)
    for name, tensor in call.pick("query", "key", "value").items():
        if tensor.dtype != call.query.dtype:
            yield f"{name} must have the dtype of query, {call.query.dtype}, not {tensor.dtype}"
        if tensor.dim() != LAYOUTS[call.input_layout]:
            yield f"{name} must have {LAYOUTS[call.input_layout]} dimensions ({call.input_layout}), not {tensor.dim()}"
            return
    yield from _check_shapes(call)
    yield from _check_lengths(call)
    yield from _check_mask(call)


def _check_shapes(call: Call) -> Iterator[str]:
    query, key, value, head_num, layout = call.query, call.key, call.value, call.head_num, call.input_layout
    if key.shape[:-1] != value.shape[:-1]:
        yield f"value must have the shape of key {_shape(key)} except for the last dimension, not {_shape(value)}"
    if "B" in layout and query.shape[layout.index("B")] != key.shape[layout.index("B")]:
        yield f"key must have the batch size of query {_shape(query)}, not {_shape(key)} ({layout})"
    if head_num <= 0:
        yield f"head_num must be positive, not {head_num}"
        return
    if "N" in layout:
        heads, key_heads = query.shape[layout.index("N")], key.shape[layout.index("N")]
        if head_num != heads:
            yield f"head_num must be the number of heads of query {_shape(query)}, {heads}, not {head_num}"
        if not key_heads or heads % key_heads:
            yield f"key must have a number of heads that divides that of query, {heads}, not {key_heads}"
        if query.shape[-1] != key.shape[-1] or value.shape[-1] > key.shape[-1]:
            yield (
                "query and key must have the same head size, and value no larger one, "
                f"not {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}"
            )
        return
    size, remainder = divmod(query.shape[2], head_num)
    if remainder or not size or not key.shape[2] or key.shape[2] % size or head_num % (key.shape[2] // size):
        yield (
            f"query and key must hold complete heads in the last dimension, key a divisor of head_num {head_num}, "
            f"not {query.shape[2]} and {key.shape[2]}"
        )
    elif value.shape[2] > key.shape[2] or value.shape[2] % (key.shape[2] // size):
        yield f"value must hold as many heads as key in the last dimension, {key.shape[2] // size}, not {_shape(value)}"


def _check_lengths(call: Call) -> Iterator[str]:
    layout, cu_seqlens_q, cu_seqlens_k = call.input_layout, call.actual_seq_qlen, call.actual_seq_kvlen
    if layout != "TND":
        for name, ends in call.pick("actual_seq_qlen", "actual_seq_kvlen").items():
            if ends is not None:
                yield f"{name} must be None if input_layout is {layout}: it is for TND"
        return
    if not cu_seqlens_q or not cu_seqlens_k or len(cu_seqlens_q) != len(cu_seqlens_k):
        yield (
            "actual_seq_qlen and actual_seq_kvlen must be given in TND, with the same length, not empty, "
            f"not {cu_seqlens_q} and {cu_seqlens_k}"
        )
        return
    for name, ends, rows in (
        ("actual_seq_qlen", cu_seqlens_q, call.query),
        ("actual_seq_kvlen", cu_seqlens_k, call.key),
    ):
        if sorted(ends) != list(ends) or ends[0] < 0 or ends[-1] != rows.shape[0]:
            yield f"{name} must be the documents' ends: never decreasing, the last {rows.shape[0]}, not {list(ends)}"


def _check_mask(call: Call) -> Iterator[str]:
    mask, layout, sparse_mode = call.atten_mask, call.input_layout, call.sparse_mode
    if sparse_mode not in (0, 1, 2, 3):
        yield f"sparse_mode must be 0 or 1 (mask), 2 (causal) or 3 (causal, ends aligned), not {sparse_mode}"
        return
    if mask is None:
        if sparse_mode:
            yield f"atten_mask must be given if sparse_mode is {sparse_mode}: without it an NPU masks nothing"
        return
    if mask.dtype not in (torch.bool, torch.uint8):
        yield f"atten_mask must be bool or uint8, not {mask.dtype}"
    if sparse_mode in (2, 3):
        shapes: tuple[tuple[int, ...], ...] = ((COMPRESSED, COMPRESSED),)
    elif layout == "TND":
        both = call.actual_seq_qlen, call.actual_seq_kvlen
        shapes = (tuple(longest_document(ends) if ends else 0 for ends in both),)
    else:
        batch = call.query.shape[layout.index("B")]
        scores = _tokens(call.query, layout), _tokens(call.key, layout)
        shapes = (scores, (1, 1, *scores), (batch, 1, *scores), (batch, call.head_num, *scores))
    if _shape(mask) not in shapes:
        allowed = " or ".join(map(str, dict.fromkeys(shapes)))
        yield f"atten_mask must have shape {allowed} if sparse_mode is {sparse_mode}, not {_shape(mask)}"


def fake(call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    output, statistic = reference.output_shapes(call.query, call.key, call.value, call.head_num, call.input_layout)
    dtype = compute_dtype(call.query)
    softmax_max, softmax_sum = (call.query.new_empty(statistic, dtype=dtype) for _ in range(2))
    return call.query.new_empty(output), softmax_max, softmax_sum, call.query.new_empty(0), 0, 0, 0


def _shardings(call: Call) -> Iterator[tuple[Shard, Shard, Placement]]:
    """Yield the placements of the tensors in the layout, of the statistics (B, N, S, 8) and of the mask.

    The batch and the heads may be sharded. As in torch_npu, neither is with documents or any other argument that
    differs between batch rows or heads.
    """
    if any(getattr(call, name, None) is not None for name in (*NOT_IMPLEMENTED, "actual_seq_qlen", "actual_seq_kvlen")):
        return
    for dim, name in enumerate("BN"):
        if name in call.input_layout:
            per_shard = call.atten_mask is not None and call.atten_mask.ndim == 4 and call.atten_mask.shape[dim] != 1
            yield Shard(call.input_layout.index(name)), Shard(dim), Shard(dim) if per_shard else Replicate()


def sharding(call: Call) -> Iterator[Strategy]:
    for rows, statistics, mask in _shardings(call):
        yield (
            [rows, statistics, statistics, Replicate(), None, None, None],
            {"query": rows, "key": rows, "value": rows, "atten_mask": mask},
        )


def localize(full: Call, call: Call) -> dict[str, Any]:
    """Return the number of heads on this rank."""
    if "N" not in call.input_layout:
        return {}
    dim = call.input_layout.index("N")
    if call.query.shape[dim] * full.key.shape[dim] != call.key.shape[dim] * full.query.shape[dim]:
        raise UsageError(
            f"npu_fusion_attention: the {full.key.shape[dim]} heads of key must divide evenly among the ranks"
        )
    return {"head_num": call.query.shape[dim]}


PASSED_TO_GRAD = (
    *("query", "key", "value", "atten_mask", "head_num", "input_layout", "keep_prob", "pre_tockens", "next_tockens"),
    *("inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen", "sparse_mode", "gen_mask_parallel", "sync"),
    "softmax_layout",
)


def save(ctx: Any, output: tuple[Any, ...], call: Call) -> None:
    names = ("attention_in", "softmax_max", "softmax_sum", "softmax_in", "seed", "offset", "numels")
    save_by_name(ctx, scale_value=call.scale, **call.pick(*PASSED_TO_GRAD), **dict(zip(names, output, strict=True)))


def backward(npu: Any, ctx: Any, dy: Tensor | None, *_: Any) -> dict[str, Tensor]:
    saved = saved_by_name(ctx)
    grads = npu.npu_fusion_attention_grad(dy=torch.zeros_like(saved["attention_in"]) if dy is None else dy, **saved)
    return dict(zip(("query", "key", "value"), grads, strict=False))


def flops(query: Tensor, key: Tensor, value: Tensor, input_layout: str, **_: Any) -> int:
    """Return the FLOPs of the scores and of their product with the values, without regard to the mask."""
    return 2 * _tokens(key, input_layout) * (query.numel() + query.numel() * value.shape[-1] // key.shape[-1])


LIMITS = (
    Limit("query.dtype", lambda call: call.query.dtype, NPU_FLOATS),
    Limit("head_num", lambda call: call.head_num, range(1, 257)),
    Limit(
        "the head size",
        lambda call: call.query.shape[-1] // (1 if "N" in call.input_layout else call.head_num),
        range(1, 769),
    ),
    Limit("the number of queries", lambda call: _tokens(call.query, call.input_layout), range(1, (1 << 20) + 1)),
    Limit("the number of keys", lambda call: _tokens(call.key, call.input_layout), range(1, (1 << 20) + 1)),
    Limit(
        "the batch size",
        lambda call: 1 if call.input_layout == "TND" else call.query.shape[call.input_layout.index("B")],
        range(1, 2 * (1 << 20) + 1),
    ),
    Limit("the number of documents", lambda call: len(call.actual_seq_qlen or [0]), range(1, MAX_DOCUMENTS + 1)),
)

declare(
    schema="npu::npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, '
    "int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    reference=reference.npu_fusion_attention,
    fake=fake,
    checks=checks,
    sharding=sharding,
    localize=localize,
    autograd=Autograd(save, backward),
    limits=LIMITS,
    flops=flops,
)


def grad_checks(call: Call) -> Iterator[str]:
    yield from checks(call)
    output, statistic = reference.output_shapes(call.query, call.key, call.value, call.head_num, call.input_layout)
    for name, tensor in call.pick("dy", "attention_in", "softmax_max", "softmax_sum").items():
        if tensor is None:
            yield f"{name} must be given, as the forward returned it"
        elif name.startswith("softmax"):
            yield from check_is(name, tensor, compute_dtype(call.query), statistic)
        else:
            yield from check_is(name, tensor, call.query.dtype, output)


def grad_fake(call: Call) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (call.query, call.key, call.value))
    return dq, dk, dv, None, call.query.new_empty(0, dtype=torch.float32)


def grad_sharding(call: Call) -> Iterator[Strategy]:
    yield [Replicate(), Replicate(), Replicate(), None, Replicate()], {}  # pse has no gradient
    for rows, statistics, mask in _shardings(call):
        inputs: dict[str, Placement] = dict.fromkeys(("query", "key", "value", "dy", "attention_in"), rows)
        inputs |= {"softmax_max": statistics, "softmax_sum": statistics, "atten_mask": mask}
        yield [rows, rows, rows, None, Replicate()], inputs


declare(
    schema="npu::npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, "
    "str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
    "Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, "
    "float scale_value=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
    "int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
    reference=reference.npu_fusion_attention_grad,
    fake=grad_fake,
    checks=grad_checks,
    sharding=grad_sharding,
    localize=localize,
    limits=LIMITS,
    flops=lambda **arguments: 5 * flops(**arguments) // 2,
)


# attention as models call it


def causal_mask(device: torch.device) -> Tensor:
    """Return the mask that the operator needs for causal attention, whatever the number of queries and keys."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu_(1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    mask: Tensor | None,
    layout: str = "BSND",
    ends: Sequence[int] | None = None,
) -> Tensor:
    """Return the attention of ``query`` (bsz, queries, heads, head_dim), in that layout.

    ``key`` and ``value`` are (bsz, keys, key heads, head_dim). ``mask`` is :func:`causal_mask`; without it every query
    attends to all keys.
    """
    return torch.ops.npu.npu_fusion_attention(
        query,
        key,
        value,
        head_num=query.shape[-2],
        input_layout=layout,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        atten_mask=mask,
        sparse_mode=UNMASKED if mask is None else CAUSAL,
        actual_seq_qlen=ends,
        actual_seq_kvlen=ends,
    )[0]


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Sequence[int], scale: float | None, mask: Tensor | None
) -> Tensor:
    """Return the attention of ``query`` (tokens, heads, head_dim) within documents that end at ``ends``.

    Like :func:`attention`. More documents than the operator takes are several calls.
    """
    outputs, start = [], 0
    for first in range(0, len(ends), MAX_DOCUMENTS):
        part = ends[first : first + MAX_DOCUMENTS]
        q, k, v = (x[start : part[-1]] for x in (query, key, value))
        outputs.append(attention(q, k, v, scale, mask, "TND", [end - start for end in part]))
        start = part[-1]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
