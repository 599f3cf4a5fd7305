"""Sparse attention: the lightning indexer, attention over the keys that it selects, and its loss."""

from torchtitan_npu.emulator.kernels.fused import fused, or_none, without


@fused("npu_lightning_indexer", "aclnnLightningIndexer")
def indexer(
    actual_seq_lengths_query,
    actual_seq_lengths_key,
    block_table,
    return_values,
    sparse_indices_out,
    sparse_values_out,
    **rest,
):
    without(block_table=block_table)
    lengths = {
        "actual_seq_lengths_query": or_none(actual_seq_lengths_query),
        "actual_seq_lengths_key": or_none(actual_seq_lengths_key),
    }
    return {**rest, **lengths, "return_value": return_values}, (sparse_indices_out, sparse_values_out)


@fused("npu_lightning_indexer_grad", "aclnnLightningIndexerGrad")
def indexer_grad(
    actual_seq_q_len, actual_seq_kv_len, head_num, input_layout, deterministic, dq_out, dk_out, dweights_out, **rest
):
    lengths = {
        "actual_seq_lengths_query": or_none(actual_seq_q_len),
        "actual_seq_lengths_key": or_none(actual_seq_kv_len),
    }
    return {**rest, **lengths, "layout": input_layout}, (dq_out, dk_out, dweights_out)


@fused("npu_sparse_flash_attention", "aclnnSparseFlashAttention", "aclnnSparseFlashAttentionV2")
def sparse_attention(block_table, attention_out, softmax_max, softmax_sum, sinks=None, **rest):
    without(block_table=block_table, sinks=sinks)
    return {name: _optional(name, value) for name, value in rest.items()}, (attention_out, softmax_max, softmax_sum)


@fused("npu_sparse_flash_attention_grad", "aclnnSparseFlashAttentionGrad")
def sparse_attention_grad(
    actual_seq_lengths_query,
    actual_seq_lengths_kv,
    deterministic,
    d_query_out,
    d_key_out,
    d_value_out,
    d_query_rope_out,
    d_key_rope_out,
    **rest,
):
    arguments = {name: _optional(name, value) for name, value in rest.items()}
    arguments |= {
        "actual_seq_qlen": or_none(actual_seq_lengths_query),
        "actual_seq_kvlen": or_none(actual_seq_lengths_kv),
    }
    return arguments, (d_query_out, d_key_out, d_value_out, d_query_rope_out, d_key_rope_out)


OPTIONAL = ("value", "query_rope", "key_rope", "actual_seq_lengths_query", "actual_seq_lengths_kv")


def _optional(name, value):
    return or_none(value) if name in OPTIONAL else value


@fused("npu_dense_lightning_indexer_grad_kl_loss", "aclnnDenseLightningIndexerGradKLLoss")
@fused("npu_sparse_lightning_indexer_grad_kl_loss", "aclnnSparseLightningIndexerGradKLLoss")
def indexer_loss(
    query_rope,
    key_rope,
    actual_seq_lengths_query,
    actual_seq_lengths_key,
    d_query_index,
    d_key_index,
    d_weights,
    loss,
    deterministic=None,  # of the sparse loss
    **rest,
):
    optional = {
        "query_rope": or_none(query_rope),
        "key_rope": or_none(key_rope),
        "actual_seq_qlen": actual_seq_lengths_query or None,
        "actual_seq_klen": actual_seq_lengths_key or None,
    }
    return {**rest, **optional}, (d_query_index, d_key_index, d_weights, loss)


@fused("npu_dense_lightning_indexer_softmax_lse", "aclnnDenseLightningIndexerSoftmaxLse")
def dense_indexer_softmax(
    weight, actual_seq_lengths_query, actual_seq_lengths_key, softmax_max_out, softmax_sum_out, **rest
):
    lengths = {"actual_seq_qlen": actual_seq_lengths_query or None, "actual_seq_klen": actual_seq_lengths_key or None}
    return {**rest, **lengths, "weights": weight}, (softmax_max_out, softmax_sum_out)
