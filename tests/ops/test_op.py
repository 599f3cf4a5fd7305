"""Operators in general: schemas, registration, autograd and DTensor rules."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS, Op, define
from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.autograd import Autograd
from torchtitan_npu.torch_internals.dtensor import has_rule

TORCH_NPU_2_13 = """\
[NPU,Autograd,Meta] npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)
[NPU,Meta] npu::npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)
[NPU,Autograd,Meta] npu::npu_add_rms_norm(Tensor x1, Tensor x2, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor, Tensor)
[NPU,Autograd,Meta] npu::npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode="half", Tensor? rotate=None) -> Tensor
[NPU,Meta] npu::npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2, str rotary_mode="half") -> (Tensor, Tensor, Tensor)
[NPU,Meta] npu::npu_mrope(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, *, int[]? mrope_section=None, str? rotary_mode="half", str? cache_mode="default") -> (Tensor, Tensor)
[NPU,Autograd,Meta] npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor
[NPU,Meta] npu::npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor
[NPU,Autograd,Meta] npu::npu_lightning_indexer(Tensor query, Tensor key, Tensor weights, *, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, Tensor? block_table=None, str layout_query="BSND", str layout_key="BSND", int sparse_count=2048, int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, bool return_value=False) -> (Tensor, Tensor)
[NPU,Meta] npu::npu_lightning_indexer_grad(Tensor query, Tensor key, Tensor dy, Tensor sparse_indices, Tensor weights, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_key=None, str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor)
[NPU,Autograd,Meta] npu::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, int pre_tokens=9223372036854775807, int next_tokens=9223372036854775807, int attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) -> (Tensor, Tensor, Tensor)
[NPU,Meta] npu::npu_sparse_flash_attention_grad(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, Tensor d_out, Tensor out, Tensor softmax_max, Tensor softmax_sum, float scale_value, int sparse_block_size, Tensor? query_rope=None, Tensor? key_rope=None, Tensor? actual_seq_qlen=None, Tensor? actual_seq_kvlen=None, str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, int? attention_mode=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
[NPU,Meta] npu::npu_sparse_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, Tensor sparse_indices, Tensor softmax_max, Tensor softmax_sum, float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807, Tensor? sinks=None) -> (Tensor, Tensor, Tensor, Tensor)
[NPU,Meta] npu::npu_dense_lightning_indexer_softmax_lse(Tensor query_index, Tensor key_index, Tensor weights, *, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> (Tensor, Tensor)
[NPU,Meta] npu::npu_dense_lightning_indexer_grad_kl_loss(Tensor query, Tensor key, Tensor query_index, Tensor key_index, Tensor weights, Tensor softmax_max, Tensor softmax_sum, Tensor softmax_max_index, Tensor softmax_sum_index, float scale_value, *, Tensor? query_rope=None, Tensor? key_rope=None, SymInt[]? actual_seq_qlen=None, SymInt[]? actual_seq_klen=None, str? layout="BSND", int? sparse_mode=3, int? pre_tokens=9223372036854775807, int? next_tokens=9223372036854775807) -> (Tensor, Tensor, Tensor, Tensor)
[NPU,Autograd,Meta] npu::npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) -> (Tensor, Tensor)
[NPU,Meta] npu::npu_moe_token_permute_grad_v2(Tensor grad_permuted_tokens, Tensor sorted_indices, SymInt tokens_size_0, ScalarType tokens_dtype, SymInt num_topK, bool padded_mode=False) -> Tensor
[NPU,Autograd,Meta] npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> Tensor
[NPU,Autograd,Meta] npu::_npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None) -> (Tensor unpermuted_tokens, Tensor permuted_tokens_for_backward)
[NPU,Meta] npu::npu_moe_token_unpermute_grad_v2(Tensor grad_unpermuted_tokens, Tensor sorted_indices, SymInt permuted_tokens_size_0, ScalarType permuted_tokens_dtype, Tensor? probs=None, bool padded_mode=False, int[]? restore_shape=None, Tensor? permuted_tokens=None) -> (Tensor, Tensor)
[NPU,Autograd,Meta] npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, Tensor? input_ids=None, Tensor? tid2eid=None, int k_group=1, int group_count=1, int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1., float eps=9.9999999999999995e-21) -> (Tensor, Tensor, Tensor)
[NPU] npu::npu_moe_gating_top_k_backward(Tensor x_norm, Tensor grad_y, Tensor expertIdx, *, int renorm=0, int norm_type=0, float routed_scaling_factor=1., float eps=9.9999999999999995e-21) -> Tensor
[NPU,Autograd,Meta] npu::npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)
[NPU,Meta] npu::npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None, Tensor? attention_in=None, float scale_value=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int seed=0, int offset=0, int numels=0, int[]? prefix=None, int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, bool sync=False, str softmax_layout="", Tensor? sink=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)
[NPU,Meta] npu::npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, int? per_token_scale_dtype=None) -> Tensor[]
[NPU,Meta] npu::npu_grouped_matmul_add_(Tensor(a!) input, Tensor x, Tensor weight, Tensor group_list, *, bool transpose_x=True, bool transpose_weight=False, int group_type=2, int? group_list_type=0) -> Tensor(a!)
[NPU,Meta] npu::npu_all_gather_base_mm(Tensor input, Tensor x2, str hcom, int world_size, *, Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, int gather_index=0, bool gather_output=True, int comm_turn=0, ScalarType? output_dtype=None, str? comm_mode=None) -> (Tensor, Tensor)
[NPU,Meta] npu::npu_mm_reduce_scatter_base(Tensor input, Tensor x2, str hcom, int world_size, *, str reduce_op="sum", Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None, int comm_turn=0, ScalarType? output_dtype=None, str? comm_mode=None) -> Tensor
[NPU,Meta] npu::npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, int block_size=32, int? scale_alg=0, float dst_type_max=0., float max_low_bound=0.) -> (Tensor, Tensor)
[NPU,Meta] npu::npu_grouped_dynamic_mx_quant(Tensor x, Tensor group_index, *, str round_mode="rint", int dst_type=23, int blocksize=32, int? scale_alg=0, float? dst_type_max=0.) -> (Tensor, Tensor)
[NPU,Meta] npu::npu_quant_matmul(Tensor x1, Tensor x2, Tensor scale, *, Tensor? offset=None, Tensor? pertoken_scale=None, Tensor? bias=None, int? output_dtype=None, int? x1_dtype=None, int? x2_dtype=None, int? pertoken_scale_dtype=None, int? scale_dtype=None, int[]? group_sizes=None, Tensor? y_scale=None) -> Tensor
"""  # noqa: E501
"""The schemas as torch_npu 2.13.0 prints them, with the dispatch keys that it registers."""

TORCH_NPU_LINES = {line.partition("] npu::")[2].partition("(")[0]: line for line in TORCH_NPU_2_13.splitlines()}


def test_every_operator_is_torch_npu_s() -> None:
    assert set(OPS) == set(TORCH_NPU_LINES)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_schema_and_autograd_are_torch_npu_s(op: Op) -> None:
    keys, _, schema = TORCH_NPU_LINES[op.name].partition(" ")
    assert op.schema == schema
    assert str(op.overload()._schema) == schema  # as PyTorch parses it
    assert (op.autograd is not None) == ("Autograd" in keys)
    assert has_rule(op.overload())


def test_defining_again_defines_nothing() -> None:
    assert define("npu") == []


def test_another_namespace_has_its_own_backward() -> None:
    assert define("npu_elsewhere") == list(OPS)
    x, gamma = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    outputs = [torch.ops.npu.npu_rms_norm(x, gamma), torch.ops.npu_elsewhere.npu_rms_norm(x, gamma)]
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    with torch.profiler.profile() as profile:
        outputs[1][0].sum().backward()
    called = {event.name for event in profile.events() if event.name.startswith("npu")}
    assert called >= {"npu_elsewhere::npu_rms_norm_backward"} and "npu::npu_rms_norm_backward" not in called


def test_an_existing_operator_is_kept() -> None:
    """As if torch_npu were loaded: its operator stays, and gets a DTensor rule; the missing ones are defined."""
    library = torch.library.Library("npu_taken", "FRAGMENT")
    library.define(OPS["npu_rms_norm"].schema.removeprefix("npu::"))
    library.impl("npu_rms_norm", lambda input, gamma, epsilon=1e-6: (input + 1, gamma + 1), "CPU")
    assert define("npu_taken") == [name for name in OPS if name != "npu_rms_norm"]
    assert torch.ops.npu_taken.npu_rms_norm(torch.zeros(2, 2), torch.zeros(2))[0].sum() == 4
    assert has_rule(torch.ops.npu_taken.npu_rms_norm.default)


def test_importing_needs_no_torchtitan_and_changes_only_registries() -> None:
    program = (
        "import sys, torch; dtype = torch.get_default_dtype(); import torchtitan_npu.ops; "
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'torchtitan'), "
        "torch.get_default_dtype() == dtype, hasattr(torch.ops.npu, 'npu_rms_norm'))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] True True"


# An operator with a keyword-only tensor that has a gradient, a layout string and an optional tensor.


def toy_checks(call: Call) -> Iterator[str]:
    if call.layout not in ("rows", "columns"):
        yield f"layout must be rows or columns, not {call.layout!r}"


def toy_kernel(x: Tensor, scale: Tensor | None, layout: str, power: int) -> tuple[Tensor, Tensor]:
    """Return ``(x * scale) ** power`` and its sum over each row (or column)."""
    y = (x if scale is None else x * scale) ** power
    return y.clone(), y.sum(1 if layout == "rows" else 0)


def toy_fake(call: Call) -> tuple[Tensor, Tensor]:
    return torch.empty_like(call.x), call.x.new_empty(call.x.shape[0 if call.layout == "rows" else 1])


def toy_sharding(call: Call) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    dim = Shard(0 if call.layout == "rows" else 1)
    yield [dim, Shard(0)], {"x": dim}


def toy_save(ctx: Any, output: tuple[Tensor, Tensor], call: Call) -> None:
    ctx.save_for_backward(call.x, call.scale)
    ctx.power = call.power
    ctx.mark_non_differentiable(output[1])


def toy_backward(npu: Any, ctx: Any, dy: Tensor, _: None) -> dict[str, Tensor]:
    x, scale = ctx.saved_tensors
    gain = torch.ones((), dtype=x.dtype) if scale is None else scale
    inner = dy * ctx.power * (x * gain) ** (ctx.power - 1)
    return {"x": inner * gain} if scale is None else {"x": inner * gain, "scale": (inner * x).sum()}


TOY = Op(
    schema='npu::npu_toy(Tensor x, *, Tensor? scale=None, str layout="rows", int power=2) -> (Tensor, Tensor)',
    reference=toy_kernel,
    fake=toy_fake,
    checks=toy_checks,
    sharding=toy_sharding,
    autograd=Autograd(toy_save, toy_backward),
)
define("npu_toys", [TOY])


def test_defaults_and_names_come_from_the_schema() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    y, sums = torch.ops.npu_toys.npu_toy(x)
    assert torch.equal(y, x**2) and torch.equal(sums, (x**2).sum(1))
    y, sums = torch.ops.npu_toys.npu_toy(x, power=3, layout="columns")
    assert torch.equal(y, x**3) and torch.equal(sums, (x**3).sum(0))
    with pytest.raises(UsageError, match="npu_toy: layout must be rows or columns, not 'cols'"):
        torch.ops.npu_toys.npu_toy(x, layout="cols")


def test_gradients_reach_keyword_only_tensors() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    toy = torch.ops.npu_toys.npu_toy
    assert torch.autograd.gradcheck(lambda x, scale: toy(x, scale=scale, power=3)[0], (x, scale))
    assert torch.autograd.gradcheck(lambda x: toy(x)[0], (x,))
    torch.library.opcheck(toy.default, (x,), {"scale": scale, "layout": "columns"})


def toy_on_a_rank(layouts: list[str]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
    scale = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()])  # keyword arguments are redistributed too
    return [torch.ops.npu_toys.npu_toy(x, scale=scale, layout=layout)[1].full_tensor() for layout in layouts]


def test_a_sharding_rule_sees_every_argument_each_time() -> None:
    """Two calls that differ only in a string do not share a cache entry."""
    expected = (torch.arange(16.0).view(4, 4) * 2) ** 2  # small integers: exact
    for rows, columns in run_on_ranks(2, toy_on_a_rank, ["rows", "columns"]):
        assert torch.equal(rows, expected.sum(1))
        assert torch.equal(columns, expected.sum(0))


def toy_with_a_plain_tensor_on_a_rank() -> str:
    scale = distribute_tensor(torch.tensor(2.0), init_device_mesh("cpu", (2,)), [Replicate()])
    with pytest.raises(RuntimeError) as error:
        torch.ops.npu_toys.npu_toy(torch.ones(4, 4), scale=scale)
    return str(error.value)


def test_a_plain_tensor_beside_a_dtensor_is_an_error() -> None:
    """Even if the only DTensor is a keyword argument."""
    for message in run_on_ranks(2, toy_with_a_plain_tensor_on_a_rank):
        assert "npu_toy" in message and "got mixed torch.Tensor and DTensor" in message
