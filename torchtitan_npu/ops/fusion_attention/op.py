"""``npu_fusion_attention`` and ``npu_fusion_attention_grad``: softmax attention, dense or causal, packed or not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.ops.core.op import Op, declare
from torchtitan_npu.ops.core.sharding import Way
from torchtitan_npu.ops.fusion_attention import reference as reference
from torchtitan_npu.ops.fusion_attention.checks import LIMITS, NOT_TAKEN, contract


def fake(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, **_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    output, statistic = reference.output_shapes(query, key, value, head_num, input_layout)
    dtype = reference.compute_dtype(query)  # float64 only for float64 input, which the NPU does not take
    softmax_max, softmax_sum = (query.new_empty(statistic, dtype=dtype) for _ in range(2))
    return query.new_empty(output), softmax_max, softmax_sum, query.new_empty(0), 0, 0, 0


def _shardings(input_layout: str, atten_mask: Any, **rest: Any) -> Iterator[tuple[Shard, Shard, Placement]]:
    """By batch and by heads: how tensors in the layout, the statistics (B, N, S, 8) and the mask are sharded.

    As torch_npu does it: not with documents or any other argument that tells batch rows or heads apart.
    """
    if any(rest.get(name) is not None for name in (*NOT_TAKEN, "actual_seq_qlen", "actual_seq_kvlen")):
        return
    for dim, name in enumerate("BN"):
        if name in input_layout:
            per_shard = atten_mask is not None and atten_mask.ndim == 4 and atten_mask.shape[dim] != 1
            yield Shard(input_layout.index(name)), Shard(dim), Shard(dim) if per_shard else Replicate()


def sharding(**arguments: Any) -> Iterator[Way]:
    for rows, statistics, mask in _shardings(**arguments):
        yield (
            [rows, statistics, statistics, Replicate(), None, None, None],
            {"query": rows, "key": rows, "value": rows, "atten_mask": mask},
        )


def localize(whole: Mapping[str, Any], query: Tensor, key: Tensor, input_layout: str, **_: Any) -> dict[str, Any]:
    """The heads that a rank holds."""
    if "N" not in input_layout:
        return {}
    dim = input_layout.index("N")
    if query.shape[dim] * whole["key"].shape[dim] != key.shape[dim] * whole["query"].shape[dim]:
        raise UsageError(
            f"npu_fusion_attention: the {whole['key'].shape[dim]} heads of key must divide evenly among the ranks"
        )
    return {"head_num": query.shape[dim]}


FOR_BACKWARD = (
    *("keep_prob", "pre_tockens", "next_tockens", "inner_precise", "prefix", "actual_seq_qlen", "actual_seq_kvlen"),
    *("sparse_mode", "gen_mask_parallel", "sync", "softmax_layout"),
)


def save(
    ctx: Any, output: tuple[Any, ...], query: Tensor, key: Tensor, value: Tensor, atten_mask: Tensor | None, **rest: Any
) -> None:
    ctx.save_for_backward(query, key, value, atten_mask, *output[:4])
    ctx.positional = rest["head_num"], rest["input_layout"]
    ctx.keywords = {name: rest[name] for name in FOR_BACKWARD}
    ctx.keywords |= {"scale_value": rest["scale"]} | dict(zip(("seed", "offset", "numels"), output[4:], strict=True))


def backward(npu: Any, ctx: Any, dy: Tensor | None, *_: Any) -> dict[str, Tensor]:
    query, key, value, atten_mask, output, softmax_max, softmax_sum, softmax_in = ctx.saved_tensors
    grads = npu.npu_fusion_attention_grad(
        *(query, key, value, torch.zeros_like(output) if dy is None else dy, *ctx.positional),
        atten_mask=atten_mask,
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        softmax_in=softmax_in,
        attention_in=output,
        **ctx.keywords,
    )
    return dict(zip(("query", "key", "value"), grads, strict=False))


declare(
    Op(
        schema="npu::npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
        "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
        "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, '
        "int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
        reference=reference.npu_fusion_attention,
        fake=fake,
        contract=contract,
        sharding=sharding,
        localize=localize,
        autograd=Autograd(save, backward),
        limits=LIMITS,
    )
)


def grad_contract(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, **rest: Any
) -> Iterator[str]:
    yield from contract(query, key, value, head_num, input_layout, **rest)
    output, statistic = (tuple(s) for s in reference.output_shapes(query, key, value, head_num, input_layout))
    wanted = {
        "dy": (dy, output, query.dtype),
        "attention_in": (rest["attention_in"], output, query.dtype),
        "softmax_max": (rest["softmax_max"], statistic, reference.compute_dtype(query)),
        "softmax_sum": (rest["softmax_sum"], statistic, reference.compute_dtype(query)),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor is None:
            yield f"{name} must be given, as the forward returned it"
        elif (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
            yield f"{name} must be {dtype} of shape {shape}, not {tensor.dtype} of shape {tuple(tensor.shape)}"


def grad_fake(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
    return dq, dk, dv, None, query.new_empty(0, dtype=torch.float32)


def grad_sharding(**arguments: Any) -> Iterator[Way]:
    yield [Replicate(), Replicate(), Replicate(), None, Replicate()], {}  # no gradient of pse
    for rows, statistics, mask in _shardings(**arguments):
        inputs: dict[str, Placement] = dict.fromkeys(("query", "key", "value", "dy", "attention_in"), rows)
        inputs |= {"softmax_max": statistics, "softmax_sum": statistics, "atten_mask": mask}
        yield [rows, rows, rows, None, Replicate()], inputs


declare(
    Op(
        schema="npu::npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, "
        "str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
        "Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, "
        "float scale_value=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, "
        "int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? prefix=None, "
        "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
        'bool sync=False, str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)',
        reference=reference.npu_fusion_attention_grad,
        fake=grad_fake,
        contract=grad_contract,
        sharding=grad_sharding,
        localize=localize,
        limits=LIMITS,
    )
)
