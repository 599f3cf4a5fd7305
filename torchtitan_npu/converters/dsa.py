"""``npu_dsa``: DeepSeek's sparse attention on the fused operators.

Selecting keys, attending to them, and the loss that trains the selection are one operator each. None of them keeps the
scores of all keys. The loss and its gradients are computed in the backward pass, so activation checkpointing neither
computes nor counts them twice.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu import platform
from torchtitan_npu.converters.base import Converter, register, retyped
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.documents import Documents
from torchtitan_npu.models.sparse_attention.attention import SparseAttention
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.indexer_kl_loss.function import with_indexer_loss
from torchtitan_npu.ops.sparse_flash_attention.op import MLA_ABSORBED

INDEXER, ATTENTION = "npu_lightning_indexer", "npu_sparse_flash_attention"
LOSS = "npu_sparse_lightning_indexer_grad_kl_loss"


class NpuSparseAttention(SparseAttention):
    """Absorbed :class:`SparseAttention` on ``npu_lightning_indexer`` and ``npu_sparse_flash_attention``."""

    supports_strided_queries = False
    """The kernels accept strided queries, as the einsum before stores them: true on a GPU."""

    @property
    def operators(self) -> tuple[str, ...]:
        return (INDEXER, ATTENTION) if self.indexer_loss is None else (INDEXER, ATTENTION, LOSS)

    def prepare_queries(self, q: Tensor) -> Tensor:
        # part of the prolog, so that in a compiled prolog the gradient has the strides that were traced
        return q if self.supports_strided_queries else q.contiguous()

    def forward(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        documents: Documents | None,
        scale: float,
    ) -> Tensor:
        bsz, layout = q.shape[0], "BSND" if documents is None else "TND"
        query_ends, query_end_list = documents.of_queries if documents is not None else (None, None)
        key_ends, key_end_list = documents.of_keys if documents is not None else (None, None)

        def typed(tensor: Tensor) -> Tensor:
            """Cast to the queries' dtype: autocast ignores these operators, and a norm may return float32."""
            return (tensor if documents is None else tensor.flatten(0, 1)).to(q.dtype)

        def prepared(tensor: Tensor) -> Tensor:
            """Also make contiguous, which an NPU requires."""
            return typed(tensor).contiguous()

        query = typed(q) if self.supports_strided_queries else prepared(q)
        query_rope, key, key_rope = map(prepared, (q_rope, k, k_rope))
        value = key if v is k else prepared(v)
        query_index, key_index = prepared(index_q), prepared(index_k.unsqueeze(2))
        weights = (index_weights if documents is None else index_weights.flatten(0, 1)).contiguous()  # in float32

        with torch.no_grad():  # (bsz, seqlen, 1, topk)
            indices, _ = torch.ops.npu.npu_lightning_indexer(
                query_index,
                key_index,
                weights,
                actual_seq_lengths_query=query_ends,
                actual_seq_lengths_key=key_ends,
                layout_query=layout,
                layout_key=layout,
                sparse_count=self.topk,
            )
        output, softmax_max, softmax_sum = torch.ops.npu.npu_sparse_flash_attention(
            query,
            key,
            value,
            indices,
            scale,
            actual_seq_lengths_query=query_ends,
            actual_seq_lengths_kv=key_ends,
            query_rope=query_rope,
            key_rope=key_rope,
            layout_query=layout,
            layout_kv=layout,
            attention_mode=MLA_ABSORBED,
            return_softmax_lse=True,
        )
        if (account := self.account()) is not None:
            output = with_indexer_loss(
                output,
                account,
                query=query.detach(),
                key=key.detach(),
                query_index=query_index,
                key_index=key_index,
                weights=weights,
                sparse_indices=indices,
                softmax_max=softmax_max,
                softmax_sum=softmax_sum,
                scale_value=scale,
                query_rope=query_rope.detach(),
                key_rope=key_rope.detach(),
                actual_seq_qlen=query_end_list,
                actual_seq_klen=key_end_list,
                layout=layout,
            )
        return output if documents is None else output.unflatten(0, (bsz, -1))


@register
class DsaConverter(Converter):
    """Replaces every :class:`SparseAttention`."""

    name = "npu_dsa"
    looks_for = "SparseAttention"
    operators = (INDEXER, ATTENTION, LOSS)

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(fqn, module) for fqn, module in model.named_modules() if type(module) is SparseAttention]

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        targets = super().found_targets(model)
        for fqn, module in targets:
            if not cast(SparseAttention, module).args.absorb:
                raise UsageError(f"model.converters: {self.name} supports latent keys only; {fqn} needs absorb=True")
        return targets

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        attention = retyped(module, NpuSparseAttention)
        attention.supports_strided_queries = platform.job_backend() == "cuda"
        return attention

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        attention = cast(SparseAttention, module)
        args = attention.args
        dtype = self.compute_dtype()

        def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(1, 3, *shape, dtype=dtype, device="meta")

        heads = args.n_heads // self.parallel_dims.tp
        q, q_rope = empty(heads, args.kv_lora_rank), empty(heads, args.qk_rope_head_dim)
        k, k_rope = empty(1, args.kv_lora_rank), empty(1, args.qk_rope_head_dim)
        index_q, index_k = empty(args.index_n_heads, args.index_head_dim), empty(1, args.index_head_dim)
        weights = empty(args.index_n_heads, dtype=torch.float32)  # always float32, see Indexer.queries
        indices = empty(1, attention.topk, dtype=torch.int32)
        sparse: dict[str, Any] = {"query": q, "key": k, "query_rope": q_rope, "key_rope": k_rope}
        sparse["sparse_indices"] = indices
        messages = OPS[INDEXER].limit_errors(query=index_q, key=index_k, weights=weights, sparse_count=attention.topk)
        for operator in (ATTENTION, f"{ATTENTION}_grad"):
            messages += OPS[operator].limit_errors(value=k, **sparse)
        if attention.indexer_loss is not None:
            messages += OPS[LOSS].limit_errors(query_index=index_q, weights=weights, **sparse)
        if args.warmup:  # the warm-up selects all keys, so the limit applies to training.seq_len
            for number in ("sparse_count is", "top-k is"):
                messages = [text.replace(number, f"{number} training.seq_len in the warm-up,") for text in messages]
        training = self.job_config.training
        if dtype != TORCH_DTYPE_MAP[training.mixed_precision_param]:
            why = f"{training.dtype} (training.dtype, because without FSDP tensor parallel has no mixed precision)"
            messages = [text.replace(f"dtype is {training.dtype}", f"dtype is {why}") for text in messages]
        return messages
