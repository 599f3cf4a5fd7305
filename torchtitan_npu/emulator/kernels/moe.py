"""Mixtures of experts: dispatch, combine and gating; by a routing map; the routing operators of inference.

Those by a map and of inference have the formulas of CANN's documentation. A *row* is a copy of a token for one of its
experts. Rows are sorted by expert and, within an expert, by token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan_npu.emulator.kernels.fused import fused, is_absent, kernel_by_name, or_none, without
from torchtitan_npu.emulator.kernels.registry import write

NOT_QUANTISED = -1
CUMULATIVE, COUNT = 0, 1
"""Values of ``expert_tokens_num_type``."""


@fused("npu_moe_token_permute", "aclnnMoeTokenPermute")
def permute(permute_tokens_out, sorted_indices_out, **rest):
    # torch_npu has resolved None and negative num_out_tokens: the output has that many rows
    return rest, (permute_tokens_out, sorted_indices_out)


@fused("npu_moe_token_permute_grad_v2", "aclnnMoeTokenPermuteGrad")
def permute_grad(permuted_output_grad, num_topk, out, **rest):
    tokens = {"tokens_size_0": out.shape[0], "tokens_dtype": out.dtype}
    return {**rest, **tokens, "grad_permuted_tokens": permuted_output_grad, "num_topK": num_topk}, (out,)


@fused("npu_moe_token_unpermute", "aclnnMoeTokenUnpermute")
def unpermute(restore_shape, out, **rest):
    return rest, (out,)


@fused("npu_moe_token_unpermute_grad_v2", "aclnnMoeTokenUnpermuteGrad")
def unpermute_grad(
    permute_tokens, unpermuted_tokens_grad, restore_shape, permuted_tokens_grad_out, probs_grad_out, **rest
):
    arguments = {
        "grad_unpermuted_tokens": unpermuted_tokens_grad,
        "permuted_tokens_size_0": permuted_tokens_grad_out.shape[0],
        "permuted_tokens_dtype": permuted_tokens_grad_out.dtype,
        "permuted_tokens": permute_tokens,
    }
    return {**rest, **arguments}, (permuted_tokens_grad_out, probs_grad_out)


@fused("npu_moe_gating_top_k", "aclnnMoeGatingTopK", "aclnnMoeGatingTopKV2")
def gating_top_k(x, bias, y_out, expert_idx_out, out_out, input_ids=None, tid2eid=None, **options):
    tensors = {"x": x, "bias": or_none(bias), "input_ids": or_none(input_ids), "tid2eid": or_none(tid2eid)}
    return {**tensors, **options}, (y_out, expert_idx_out, out_out if options["out_flag"] else None)


@fused("npu_moe_gating_top_k_backward", "aclnnMoeGatingTopKBackward")
def gating_top_k_backward(x_norm, grad_y, expert_idx, out, **options):
    return {"x_norm": x_norm, "grad_y": grad_y, "expertIdx": expert_idx, **options}, (out,)


def _inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))


def _padded_tokens(routing_map: Tensor, capacity: int) -> Tensor:
    """Return the tokens of each expert, those that chose it first: (experts, capacity)."""
    return routing_map.int().t().argsort(dim=-1, descending=True, stable=True)[:, :capacity]


@kernel_by_name("aclnnMoeTokenPermuteWithRoutingMap")
def permute_by_map(
    tokens,
    routing_map,
    probs,
    num_out_tokens,
    drop_and_pad,
    permute_tokens_out,
    permute_probs_out,
    sorted_indices_out,
):
    chosen = routing_map.bool().t()  # (experts, tokens)
    if drop_and_pad:
        rows = _padded_tokens(routing_map, num_out_tokens // len(chosen))
        sorted_indices, row_probs = rows.flatten(), None if probs is None else probs.t().gather(1, rows).flatten()
        of_row = sorted_indices
    else:
        of_row = chosen.nonzero()[:, 1]
        sorted_indices = of_row.argsort(stable=True)
        row_probs = None if probs is None else probs.t()[chosen]
    write(permute_tokens_out, tokens[of_row])
    write(sorted_indices_out, sorted_indices)
    write(permute_probs_out, row_probs)


@kernel_by_name("aclnnMoeTokenPermuteWithRoutingMapGrad")
def permute_grad_by_map(
    permuted_token_output_grad,
    permuted_probs_output_grad,
    sorted_indices,
    routing_map,
    num_experts,
    tokens_num,
    drop_and_pad,
    tokens_grad_out,
    probs_grad_out,
):
    grad, positions = permuted_token_output_grad.float(), sorted_indices.long()
    if drop_and_pad:
        of_row = positions
    else:
        of_row = torch.empty_like(positions)
        of_row[positions] = torch.arange(len(positions)) // (len(positions) // tokens_num)
    write(tokens_grad_out, torch.zeros(tokens_grad_out.shape).index_add_(0, of_row, grad))
    if probs_grad_out is not None:
        probs_grad = torch.zeros(num_experts, tokens_num, dtype=probs_grad_out.dtype)
        if drop_and_pad:
            experts = torch.arange(num_experts).repeat_interleave(len(positions) // num_experts)
            probs_grad[experts, of_row] = permuted_probs_output_grad
        else:
            probs_grad.masked_scatter_(routing_map.bool().t(), permuted_probs_output_grad)
        write(probs_grad_out, probs_grad.t())


@kernel_by_name("aclnnMoeTokenUnpermuteWithRoutingMap")
def unpermute_by_map(
    permuted_tokens,
    sorted_indices,
    routing_map,
    probs,
    padded_mode,
    restore_shape,
    unpermuted_tokens,
    out_index,
    permute_token_id,
    permute_probs,
):
    rows, positions = permuted_tokens.float(), sorted_indices.long()
    if padded_mode:
        tokens, order = positions.sort(stable=True)
        if probs is not None:
            row_probs = probs.t().gather(1, positions.view(probs.shape[1], -1)).flatten()
    else:
        tokens, order = torch.arange(len(positions)) // (len(positions) // restore_shape[0]), positions
        if probs is not None:
            row_probs = probs.t()[routing_map.bool().t()]
    if probs is not None:
        rows = rows * row_probs.float()[:, None]
        write(permute_probs, row_probs)
    write(unpermuted_tokens, torch.zeros(restore_shape).index_add_(0, tokens, rows[order]))
    write(out_index, order)
    write(permute_token_id, tokens)


@kernel_by_name("aclnnMoeTokenUnpermuteWithRoutingMapGrad")
def unpermute_grad_by_map(
    unpermuted_tokens_grad,
    out_index,
    permute_token_id,
    routing_map,
    permuted_tokens,
    probs,
    drop_and_pad,
    restore_shape,
    permuted_tokens_grad_out,
    probs_grad_out,
):
    order, tokens = out_index.long(), permute_token_id.long()
    if not drop_and_pad:  # torch_npu then passes the sorted indices for both
        tokens = torch.arange(len(order)) // (len(order) // len(unpermuted_tokens_grad))
    grad = torch.zeros(permuted_tokens_grad_out.shape)
    grad[order] = unpermuted_tokens_grad.float()[tokens]
    if probs is not None:
        dots = (grad * permuted_tokens.float()).sum(-1)
        probs_grad = torch.zeros(probs.shape[::-1])  # (experts, tokens)
        if drop_and_pad:
            of_row = torch.empty_like(tokens)
            of_row[order] = tokens
            chosen = (torch.arange(len(order)) // (len(order) // probs.shape[1]), of_row)
        else:
            chosen = routing_map.bool().t().nonzero(as_tuple=True)
        probs_grad[chosen] = dots
        grad = grad * probs.t()[chosen].float()[:, None]
        write(probs_grad_out, probs_grad.t())
    write(permuted_tokens_grad_out, grad)


@kernel_by_name("aclnnMoeGatingTopKSoftmax")
def gating_top_k_softmax(x, finished, k, y_out, expert_idx_out, row_idx_out):
    gating_top_k_softmax_v2(x, finished, k, 0, False, y_out, expert_idx_out, None)
    rows = y_out.numel() // k
    write(row_idx_out, torch.arange(rows * k).view(k, rows).t())


@kernel_by_name("aclnnMoeGatingTopKSoftmaxV2")
def gating_top_k_softmax_v2(
    x, finished, k, renorm, output_softmax_result_flag, y_out, expert_idx_out, softmax_result_out
):
    scores = x.float() if renorm else x.float().softmax(-1)
    y, experts = scores.topk(k, dim=-1)
    if not is_absent(finished):
        experts = experts.masked_fill(finished[..., None], x.shape[-1])
    write(y_out, y.softmax(-1) if renorm else y)
    write(expert_idx_out, experts)
    if output_softmax_result_flag and not renorm:
        write(softmax_result_out, scores)


@kernel_by_name("aclnnMoeInitRouting")
def init_routing(x, row_idx, expert_idx, active_num, expanded_x_out, expanded_row_idx_out, expanded_expert_idx_out):
    experts, order = expert_idx.flatten().sort(stable=True)
    slots = row_idx.flatten()[order].long()
    write(expanded_row_idx_out, _inverse(slots))
    write(expanded_expert_idx_out, experts)
    write(expanded_x_out, x[slots[: len(expanded_x_out)] % len(x)])


@kernel_by_name("aclnnMoeInitRoutingV2")
def init_routing_v2(expert_tokens_count_or_cumsum_flag, **rest):
    flag = expert_tokens_count_or_cumsum_flag
    kind = CUMULATIVE if flag == 1 else COUNT
    init_routing_v3(expert_tokens_num_flag=flag, expert_tokens_num_type=kind, **rest)


@kernel_by_name("aclnnMoeInitRoutingV2Grad")
def init_routing_grad(grad_expanded_x, expanded_row_idx, top_k, drop_pad_mode, active_num, out):
    without(drop_pad_mode=drop_pad_mode or None)
    positions = expanded_row_idx.long()
    in_range = positions < len(grad_expanded_x)
    rows = torch.zeros(len(positions), grad_expanded_x.shape[1])
    rows[in_range] = grad_expanded_x.float()[positions[in_range]]
    write(out, rows.view(-1, top_k, rows.shape[1]).sum(1))


@kernel_by_name("aclnnMoeInitRoutingV3")
def init_routing_v3(
    x,
    expert_idx,
    expert_num,
    drop_pad_mode,
    expert_tokens_num_type,
    expert_tokens_num_flag,
    expanded_x_out,
    expanded_row_idx_out,
    expert_tokens_count_or_cumsum_out,
    quant_mode=NOT_QUANTISED,
    active_expert_range=None,
    row_idx_type=0,
    **_,
):
    without(drop_pad_mode=drop_pad_mode or None)
    everyone = [0, expert_num]
    if quant_mode != NOT_QUANTISED or (active_expert_range or everyone) != everyone:
        raise NotImplementedError("the emulator's kernel has no quantisation and no active_expert_range")
    experts = expert_idx.flatten().long()
    order = experts.argsort(stable=True)
    write(expanded_row_idx_out, order if row_idx_type == 1 else _inverse(order))
    write(expanded_x_out, x[order[: len(expanded_x_out)] * len(x) // len(order)])
    if not expert_tokens_num_flag:
        return
    counts = experts.bincount(minlength=expert_num)
    if expert_tokens_num_type == CUMULATIVE:
        write(expert_tokens_count_or_cumsum_out, counts.cumsum(0))
    elif expert_tokens_num_type == COUNT:
        write(expert_tokens_count_or_cumsum_out, counts)
    else:  # the experts that have tokens and their number, then zeros
        used = counts.nonzero()
        pairs = torch.zeros(expert_num, 2, dtype=torch.int64)
        pairs[: len(used)] = torch.cat((used, counts[used]), dim=1)
        write(expert_tokens_count_or_cumsum_out, pairs)


@kernel_by_name("aclnnMoeFinalizeRouting", "aclnnMoeFinalizeRoutingV2", "aclnnMoeFinalizeRoutingV4")
def finalize_routing(
    expanded_x,
    expanded_row_idx,
    scales,
    out,
    x1=None,
    x2=None,
    bias=None,
    expert_idx=None,
    expanded_expert_idx=None,
    drop_pad_mode=0,
    **rest,
):
    without(**{name: rest.get(name) for name in ("x", "a1", "a2", "v")}, drop_pad_mode=drop_pad_mode or None)
    experts = expanded_expert_idx if expert_idx is None else expert_idx
    # slots are stored one choice after another: (k, tokens)
    rows = expanded_x.float()[expanded_row_idx.long()].view(-1, *out.shape)
    if not is_absent(bias):
        rows = rows + bias.float()[experts.long().t()]
    if not is_absent(scales):
        rows = rows * scales.float().t()[..., None]
    write(out, sum(t.float() for t in (x1, x2) if not is_absent(t)) + rows.sum(0))


@kernel_by_name("aclnnMoeComputeExpertTokens")
def compute_expert_tokens(sorted_experts, num_experts, out):
    write(out, torch.searchsorted(sorted_experts, torch.arange(num_experts, dtype=sorted_experts.dtype), right=True))
