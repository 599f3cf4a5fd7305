"""Dispatch, combine and gating of mixtures of experts."""

from torchtitan_npu.emulator.kernels.fused import fused, or_none


@fused("npu_moe_token_permute", "aclnnMoeTokenPermute")
def permute(tokens, indices, num_out_tokens, padded_mode, permute_tokens_out, sorted_indices_out):
    # torch_npu has resolved None and negative numbers: the output has that many rows
    arguments = {"tokens": tokens, "indices": indices, "num_out_tokens": num_out_tokens, "padded_mode": padded_mode}
    return arguments, (permute_tokens_out, sorted_indices_out)


@fused("npu_moe_token_permute_grad_v2", "aclnnMoeTokenPermuteGrad")
def permute_grad(permuted_output_grad, sorted_indices, num_topk, padded_mode, out):
    arguments = {
        "grad_permuted_tokens": permuted_output_grad,
        "sorted_indices": sorted_indices,
        "tokens_size_0": out.shape[0],
        "tokens_dtype": out.dtype,
        "num_topK": num_topk,
        "padded_mode": padded_mode,
    }
    return arguments, (out,)


@fused("npu_moe_token_unpermute", "aclnnMoeTokenUnpermute")
def unpermute(permuted_tokens, sorted_indices, probs, padded_mode, restore_shape, out):
    arguments = {
        "permuted_tokens": permuted_tokens,
        "sorted_indices": sorted_indices,
        "probs": probs,
        "padded_mode": padded_mode,
    }
    return arguments, (out,)


@fused("npu_moe_token_unpermute_grad_v2", "aclnnMoeTokenUnpermuteGrad")
def unpermute_grad(
    permute_tokens,
    unpermuted_tokens_grad,
    sorted_indices,
    probs,
    padded_mode,
    restore_shape,
    permuted_tokens_grad_out,
    probs_grad_out,
):
    arguments = {
        "grad_unpermuted_tokens": unpermuted_tokens_grad,
        "sorted_indices": sorted_indices,
        "permuted_tokens_size_0": permuted_tokens_grad_out.shape[0],
        "permuted_tokens_dtype": permuted_tokens_grad_out.dtype,
        "probs": probs,
        "padded_mode": padded_mode,
        "permuted_tokens": permute_tokens,
    }
    return arguments, (permuted_tokens_grad_out, probs_grad_out)


@fused("npu_moe_gating_top_k", "aclnnMoeGatingTopK", "aclnnMoeGatingTopKV2")
def gating_top_k(x, bias, y_out, expert_idx_out, out_out, input_ids=None, tid2eid=None, **options):
    tensors = {"x": x, "bias": or_none(bias), "input_ids": or_none(input_ids), "tid2eid": or_none(tid2eid)}
    return {**tensors, **options}, (y_out, expert_idx_out, out_out if options["out_flag"] else None)


@fused("npu_moe_gating_top_k_backward", "aclnnMoeGatingTopKBackward")
def gating_top_k_backward(x_norm, grad_y, expert_idx, out, **options):
    return {"x_norm": x_norm, "grad_y": grad_y, "expertIdx": expert_idx, **options}, (out,)
