"""``npu_dsa``: DeepSeek's sparse attention on the fused operators.

Selecting keys, attending to them, and the loss that trains the selection are one operator each. None of them keeps the
scores of all keys. The loss and its gradients are computed in the backward pass, so activation checkpointing neither
computes nor counts them twice. In the warm-up, which attends to all keys, dense attention and a dense loss replace
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu import platform
from torchtitan_npu.converters.base import Converter, convert_module, modules_of_type, register
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.layers.sparse_attention import SparseAttention, at_least_float32
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.dense_indexer_kl_loss import dense_loss
from torchtitan_npu.ops.fusion_attention.op import CAUSAL, causal_mask
from torchtitan_npu.ops.indexer_kl_loss.op import MAX_QUERIES, loss_in_chunks, with_indexer_loss
from torchtitan_npu.ops.sparse_flash_attention.checks import MAX_DOCUMENTS
from torchtitan_npu.ops.sparse_flash_attention.op import MLA_ABSORBED

INDEXER, ATTENTION = "npu_lightning_indexer", "npu_sparse_flash_attention"
LOSS = "npu_sparse_lightning_indexer_grad_kl_loss"
DENSE_ATTENTION = "npu_fusion_attention"
DENSE_STATISTICS, DENSE_LOSS = "npu_dense_lightning_indexer_softmax_lse", "npu_dense_lightning_indexer_grad_kl_loss"


class FusedAttention(SparseAttention):
    """:class:`SparseAttention` on fused operators. Documents are packed (TND), at most 256 in a call."""

    def forward(  # type: ignore[override]
        self, *projected: Tensor, documents: Documents | None, scale: float, selected: Tensor | None = None
    ) -> Any:
        """Attend as :class:`SparseAttention` does; ``projected`` are its positional arguments."""
        q, q_rope, k, k_rope, v, *index = projected
        index_q, index_k, index_weights = index or (None, None, None)
        queries: Any = (q, q_rope, index_q, index_weights, selected)
        keys: Any = (k, k_rope, index_k, None if v is k else v)
        if documents is None:
            output, selected = self.attend(queries, keys, None, scale)
            return (output, selected) if self.returns_selected else output
        packed_queries, packed_keys = ([x if x is None else x.flatten(0, 1) for x in each] for each in (queries, keys))
        results = [
            self.attend(rows(packed_queries, query_rows), rows(packed_keys, key_rows), group, scale)
            for query_rows, key_rows, group in documents.groups(MAX_DOCUMENTS)
        ]
        packed = [tensors for tensors in zip(*results, strict=True) if tensors[0] is not None]
        unpacked = tuple((x[0] if len(x) == 1 else torch.cat(x)).unflatten(0, (len(q), -1)) for x in packed)
        return unpacked if self.returns_selected else unpacked[0]

    def query_positions(
        self, bsz: int, queries: int, keys: int, documents: Documents | None, device: torch.device
    ) -> Tensor:
        if documents is None:
            return super().query_positions(bsz, queries, keys, documents, device)
        # the operators count from the first key of a document, whose last query is its last key
        lengths = torch.diff(documents.cu_seqlens_k.tensor, prepend=documents.cu_seqlens_k.tensor.new_zeros(1))
        number = documents.cu_seqlens_q.numbers(bsz).flatten()
        from_end = torch.arange(bsz * queries, device=device) - documents.cu_seqlens_q.tensor[number]
        return (from_end + lengths[number]).view(bsz, queries)

    def attend(
        self, queries: Sequence[Any], keys: Sequence[Any], documents: Documents | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as :class:`SparseAttention` does, to tensors without the batch's dimension if there are documents.

        The second result is the selected keys if ``returns_selected``.

        Args:
            queries: q, q_rope, index_q and index_weights (``None`` in a layer without an indexer and its loss), and the
                keys to attend to (``None`` in a layer that selects them)
            keys: k, k_rope, index_k, and v (``None``: the keys are the values)
            documents: the boundaries of packed documents
            scale: factor of the logits
        """
        raise NotImplementedError


def rows(tensors: Sequence[Tensor | None], tokens: slice) -> list[Any]:
    """Return some rows of each tensor. The gradient of a slice is a copy, which all rows do not need."""
    return [x if x is None or tokens == slice(0, len(x)) else x[tokens] for x in tensors]


class NpuSparseAttention(FusedAttention):
    """Absorbed :class:`SparseAttention` on ``npu_lightning_indexer`` and ``npu_sparse_flash_attention``."""

    supports_strided_queries = False
    """The kernels accept strided queries, as the einsum before stores them: true on a GPU."""

    @property
    def operators(self) -> tuple[str, ...]:
        selection, loss = (INDEXER,) * self.has_indexer, (LOSS,) * (self.indexer_loss is not None)
        return (*selection, ATTENTION, *loss)

    def prepare_queries(self, q: Tensor) -> Tensor:
        # part of pre_attention, so that if that is compiled the gradient has the strides that were traced
        return q if self.supports_strided_queries else q.contiguous()

    def attend(
        self, queries: Sequence[Any], keys: Sequence[Any], documents: Documents | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        (q, q_rope, index_q, index_weights, selected), (k, k_rope, index_k, v) = queries, keys
        layout = "BSND" if documents is None else "TND"
        cu_seqlens_q, query_end_list = documents.cu_seqlens_q if documents is not None else (None, None)
        cu_seqlens_k, key_end_list = documents.cu_seqlens_k if documents is not None else (None, None)
        # autocast ignores these operators, and a norm may return float32; an NPU requires contiguous tensors
        query = q if self.supports_strided_queries else q.contiguous()
        query_rope, key, key_rope = (x.to(q.dtype).contiguous() for x in (q_rope, k, k_rope))
        value = key if v is None else v.to(q.dtype).contiguous()
        index = {} if index_q is None else index_arguments(index_q, index_k, index_weights, q.dtype)
        best: Tensor | None = None
        if self.has_indexer:
            with torch.no_grad():  # only the loss trains the indexer
                best, _ = torch.ops.npu.npu_lightning_indexer(
                    index["query_index"],
                    index["key_index"],
                    index["weights"],
                    actual_seq_lengths_query=cu_seqlens_q,
                    actual_seq_lengths_key=cu_seqlens_k,
                    layout_query=layout,
                    layout_key=layout,
                    sparse_count=self.topk,
                )  # (bsz, seqlen, 1, topk), -1 after the last
        indices = best if selected is None else selected
        assert indices is not None
        output, softmax_max, softmax_sum = torch.ops.npu.npu_sparse_flash_attention(
            query,
            key,
            value,
            indices.contiguous(),
            scale,
            actual_seq_lengths_query=cu_seqlens_q,
            actual_seq_lengths_kv=cu_seqlens_k,
            query_rope=query_rope,
            key_rope=key_rope,
            layout_query=layout,
            layout_kv=layout,
            attention_mode=MLA_ABSORBED,
            return_softmax_lse=True,
        )
        if (loss := self.trained_loss()) is not None:
            output = with_indexer_loss(
                output,
                loss,
                loss_in_chunks,
                query=query.detach(),
                key=key.detach(),
                **index,
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
        return output, best if self.returns_selected else None


def index_arguments(q: Tensor, k: Tensor, weights: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the indexer's tensors as arguments of the fused operators, which take contiguous ones."""
    return {
        "query_index": q.to(dtype).contiguous(),
        "key_index": k.unsqueeze(-2).to(dtype).contiguous(),
        "weights": at_least_float32(weights).contiguous(),
    }


class NpuDenseAttention(FusedAttention):
    """Attention to all keys for the warm-up, on ``npu_fusion_attention``. Every head has separate keys and values.

    Attention itself is not trained. The loss covers all keys, of any number up to 131072.
    """

    @property
    def operators(self) -> tuple[str, ...]:
        loss = (DENSE_STATISTICS, DENSE_LOSS) if self.indexer_loss is not None else ()
        return (DENSE_ATTENTION, *loss)

    def attend(
        self, queries: Sequence[Any], keys: Sequence[Any], documents: Documents | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        (q, q_rope, index_q, index_weights, _), (k, k_rope, index_k, v) = queries, keys
        packed = documents is not None
        layout = "TND" if packed else "BSND"
        cu_seqlens_q = documents.cu_seqlens_q.integers if documents is not None else None
        cu_seqlens_k = documents.cu_seqlens_k.integers if documents is not None else None
        q_rope, k, k_rope, v = (x.to(q.dtype).contiguous() for x in (q_rope, k, k_rope, v))
        output, softmax_max, softmax_sum, *_ = torch.ops.npu.npu_fusion_attention(
            torch.cat([q, q_rope], dim=-1),
            torch.cat([k, k_rope.expand(*k.shape[:-1], -1)], dim=-1),
            v,
            q.shape[-2],
            layout,
            atten_mask=causal_mask(q.device),
            scale=scale,
            actual_seq_qlen=cu_seqlens_q,
            actual_seq_kvlen=cu_seqlens_k,
            sparse_mode=CAUSAL,
            softmax_layout="TND" if packed else "",
        )
        if (loss := self.trained_loss()) is None:
            return output, None
        # (bsz, n_heads, seqlen, 1) or (n_heads, tokens, 1), of eight equal copies
        softmax_max, softmax_sum = (
            (x[..., :1].transpose(0, 1) if packed else x[..., :1]).contiguous() for x in (softmax_max, softmax_sum)
        )
        output = with_indexer_loss(
            output,
            loss,
            dense_loss,
            query=q.contiguous(),
            key=k,
            **index_arguments(index_q, index_k, index_weights, q.dtype),
            softmax_max=softmax_max,
            softmax_sum=softmax_sum,
            scale_value=scale,
            query_rope=q_rope,
            key_rope=k_rope,
            layout=layout,
            actual_seq_qlen=cu_seqlens_q,
            actual_seq_klen=cu_seqlens_k,
        )
        return output, None


@register
class DsaConverter(Converter):
    """Replaces every :class:`SparseAttention`."""

    name = "npu_dsa"
    looks_for = "SparseAttention"
    operators = (INDEXER, ATTENTION, LOSS)

    def targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return modules_of_type(model, SparseAttention)

    def found_targets(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        targets = super().found_targets(model)
        for fqn, module in targets:
            args = cast(SparseAttention, module).args
            if not (args.absorb or args.warmup):
                raise UsageError(f"model.converters: {self.name} supports latent keys only; {fqn} needs absorb=True")
        return targets

    def replacement(self, fqn: str, module: nn.Module) -> nn.Module:
        if cast(SparseAttention, module).args.warmup:
            return convert_module(module, NpuDenseAttention)
        attention = convert_module(module, NpuSparseAttention)
        attention.supports_strided_queries = platform.job_backend() == "cuda"
        return attention

    def limit_errors(self, fqn: str, module: nn.Module) -> list[str]:
        attention = cast(SparseAttention, module)
        dtype, training = self.compute_dtype(), self.job_config.training
        messages = [
            message
            for operator, arguments in self.calls(attention, dtype)
            for message in OPS[operator].limit_errors(**arguments)
        ]
        if dtype != TORCH_DTYPE_MAP[training.mixed_precision_param]:
            why = f"{training.dtype} (training.dtype, because without FSDP tensor parallel has no mixed precision)"
            messages = [text.replace(f"dtype is {training.dtype}", f"dtype is {why}") for text in messages]
        return messages

    def calls(self, attention: SparseAttention, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the operators that a layer calls on one rank, with their arguments on the meta device."""
        args, topk, heads = attention.args, attention.topk, attention.args.n_heads // self.parallel_dims.tp
        bsz, tokens = (max(sizes) for sizes in zip(*self.batches(), strict=True))
        trains_indexer = attention.indexer_loss is not None

        def queries(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(bsz, tokens, *shape, dtype=dtype, device="meta")

        def keys(*shape: int) -> Tensor:  # a rank gathers the keys of all tokens
            return torch.empty(bsz, tokens * self.parallel_dims.cp, *shape, dtype=dtype, device="meta")

        index = {
            "query_index": queries(args.index_n_heads, args.index_head_dim),
            "key_index": keys(1, args.index_head_dim),
            "weights": queries(args.index_n_heads, dtype=torch.float32),  # always float32, see Indexer.queries
        }
        rope = args.qk_rope_head_dim
        if args.warmup:
            size, v = args.qk_nope_head_dim, keys(heads, args.v_head_dim)
            query, key = queries(heads, size + rope), keys(heads, size + rope)
            layout = {"head_num": heads, "input_layout": "BSND", "actual_seq_qlen": None}
            yield DENSE_ATTENTION, {"query": query, "key": key, "value": v, **layout}
            if trains_indexer:
                yield DENSE_STATISTICS, index
                ropes = {"query_rope": queries(heads, rope), "key_rope": keys(heads, rope)}
                yield DENSE_LOSS, {"query": queries(heads, size), "key": keys(heads, size), **ropes, **index}
            return
        sparse = {
            "query": queries(heads, args.kv_lora_rank),
            "key": keys(1, args.kv_lora_rank),
            "query_rope": queries(heads, rope),
            "key_rope": keys(1, rope),
            "sparse_indices": queries(1, topk, dtype=torch.int32),
        }
        if attention.has_indexer:
            names = {"query": "query_index", "key": "key_index", "weights": "weights"}
            yield INDEXER, {**{name: index[of_loss] for name, of_loss in names.items()}, "sparse_count": topk}
        for operator in (ATTENTION, f"{ATTENTION}_grad"):
            yield operator, {"value": sparse["key"], **sparse}
        if trains_indexer:
            yield LOSS, {**index, **sparse, "query": sparse["query"][:, :MAX_QUERIES]}
