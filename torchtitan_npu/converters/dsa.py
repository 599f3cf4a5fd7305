"""``npu_dsa``: DeepSeek's sparse attention on the fused operators.

Selecting keys, attending to them, and the loss that trains the selection are one operator each. None of them keeps the
scores of all keys. The loss and its gradients are computed in the backward pass, so activation checkpointing neither
computes nor counts them twice. In the warm-up, which attends to all keys, dense attention and a dense loss replace
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu import platform
from torchtitan_npu.converters.base import Converter, convert_module, register
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


class Queries(NamedTuple):
    """What :class:`SparseAttention` takes for each query."""

    q: Tensor
    q_rope: Tensor
    index_q: Tensor | None
    """None in a layer without an indexer and its loss, like ``index_weights``."""
    index_weights: Tensor | None
    selected: Tensor | None
    """The keys to attend to, in a layer without an indexer or with recorded choices."""


class Keys(NamedTuple):
    """What :class:`SparseAttention` takes for each key."""

    k: Tensor
    k_rope: Tensor
    index_k: Tensor | None
    v: Tensor | None
    """None: the keys are the values."""


class FusedAttention(SparseAttention):
    """:class:`SparseAttention` on fused operators. Documents are packed (TND), at most 256 in a call."""

    def forward(
        self,
        q: Tensor,
        q_rope: Tensor,
        k: Tensor,
        k_rope: Tensor,
        v: Tensor,
        index_q: Tensor | None = None,
        index_k: Tensor | None = None,
        index_weights: Tensor | None = None,
        *,
        documents: Documents | None,
        scale: float,
        selected: Tensor | None = None,
    ) -> Any:
        queries = Queries(q, q_rope, index_q, index_weights, selected)
        keys = Keys(k, k_rope, index_k, None if v is k else v)
        if documents is None:
            output, selected = self.attend(queries, keys, None, scale)
            return (output, selected) if self.returns_selected else output
        packed_queries, packed_keys = ([x if x is None else x.flatten(0, 1) for x in each] for each in (queries, keys))
        results = [
            self.attend(Queries(*rows(packed_queries, of_queries)), Keys(*rows(packed_keys, of_keys)), group, scale)
            for of_queries, of_keys, group in documents.groups(MAX_DOCUMENTS)
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
        self, queries: Queries, keys: Keys, documents: Documents | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as :class:`SparseAttention` does, to tensors without the batch's dimension if there are documents.

        The second result are the selected keys if ``returns_selected``.
        """
        raise NotImplementedError


def rows(tensors: Sequence[Tensor | None], tokens: slice) -> Iterator[Any]:
    """Yield some rows of each tensor. The gradient of a slice is a copy, which all rows do not need."""
    for tensor in tensors:
        yield tensor if tensor is None or tokens == slice(0, len(tensor)) else tensor[tokens]


class NpuSparseAttention(FusedAttention):
    """Absorbed :class:`SparseAttention` on ``npu_lightning_indexer`` and ``npu_sparse_flash_attention``."""

    supports_strided_queries = False
    """The kernels accept strided queries, as the einsum before stores them: true on a GPU."""

    @property
    def operators(self) -> tuple[str, ...]:
        selection, loss = (INDEXER,) * self.has_indexer, (LOSS,) * (self.indexer_loss is not None)
        return (*selection, ATTENTION, *loss)

    def prepare_queries(self, q: Tensor) -> Tensor:
        # part of the pre_attention, so that in a compiled pre_attention the gradient has the strides that were traced
        return q if self.supports_strided_queries else q.contiguous()

    def attend(
        self, queries: Queries, keys: Keys, documents: Documents | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        q, q_rope, index_q, index_weights, selected = queries
        layout = "BSND" if documents is None else "TND"
        cu_seqlens_q, query_end_list = documents.cu_seqlens_q if documents is not None else (None, None)
        cu_seqlens_k, key_end_list = documents.cu_seqlens_k if documents is not None else (None, None)
        # autocast ignores these operators, and a norm may return float32; an NPU requires contiguous tensors
        query = q if self.supports_strided_queries else q.contiguous()
        query_rope, key, key_rope = (x.to(q.dtype).contiguous() for x in (q_rope, keys.k, keys.k_rope))
        value = key if keys.v is None else keys.v.to(q.dtype).contiguous()
        index: dict[str, Tensor] = {}
        if index_q is not None:
            assert keys.index_k is not None and index_weights is not None
            index = {
                "query_index": index_q.to(q.dtype).contiguous(),
                "key_index": keys.index_k.unsqueeze(-2).to(q.dtype).contiguous(),
                "weights": at_least_float32(index_weights).contiguous(),
            }
        best = self.select(index, layout, cu_seqlens_q, cu_seqlens_k) if self.has_indexer else None
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

    @torch.no_grad()
    def select(
        self, index: dict[str, Tensor], layout: str, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
    ) -> Tensor:
        """Return the indices (bsz, seqlen, 1, topk) of the keys that the indexer scores highest, -1 after the last."""
        indices, _ = torch.ops.npu.npu_lightning_indexer(
            index["query_index"],
            index["key_index"],
            index["weights"],
            actual_seq_lengths_query=cu_seqlens_q,
            actual_seq_lengths_key=cu_seqlens_k,
            layout_query=layout,
            layout_key=layout,
            sparse_count=self.topk,
        )
        return indices


class NpuDenseAttention(FusedAttention):
    """Attention to all keys for the warm-up, on ``npu_fusion_attention``. Every head has its own keys and values.

    Attention itself is not trained. The loss covers all keys, of any number up to 131072.
    """

    @property
    def operators(self) -> tuple[str, ...]:
        loss = (DENSE_STATISTICS, DENSE_LOSS) if self.indexer_loss is not None else ()
        return (DENSE_ATTENTION, *loss)

    def attend(
        self, queries: Queries, keys: Keys, documents: Documents | None, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        (q, q_rope, index_q, index_weights, _), (k, k_rope, index_k, v) = queries, keys
        assert v is not None, "keys per head differ from the values"
        layout = "BSND" if documents is None else "TND"
        ends: dict[str, Sequence[int] | None] = {"actual_seq_qlen": None, "actual_seq_klen": None}
        if documents is not None:
            ends = {
                "actual_seq_qlen": documents.cu_seqlens_q.integers,
                "actual_seq_klen": documents.cu_seqlens_k.integers,
            }
        q_rope, k, k_rope, v = (x.to(q.dtype).contiguous() for x in (q_rope, k, k_rope, v))
        output, softmax_max, softmax_sum, *_ = torch.ops.npu.npu_fusion_attention(
            torch.cat([q, q_rope], dim=-1),
            torch.cat([k, k_rope.expand(*k.shape[:-1], -1)], dim=-1),
            v,
            q.shape[-2],
            layout,
            atten_mask=causal_mask(q.device),
            scale=scale,
            actual_seq_qlen=ends["actual_seq_qlen"],
            actual_seq_kvlen=ends["actual_seq_klen"],
            sparse_mode=CAUSAL,
            softmax_layout="" if documents is None else "TND",
        )
        if (loss := self.trained_loss()) is None:
            return output, None
        assert index_q is not None and index_k is not None and index_weights is not None
        index_q, index_k = (x.to(q.dtype).contiguous() for x in (index_q, index_k.unsqueeze(-2)))
        # (bsz, n_heads, seqlen, 1) or (n_heads, tokens, 1), of eight equal copies
        softmax_max, softmax_sum = (
            (x[..., :1] if documents is None else x[..., :1].transpose(0, 1)).contiguous()
            for x in (softmax_max, softmax_sum)
        )
        output = with_indexer_loss(
            output,
            loss,
            dense_loss,
            query=q.contiguous(),
            key=k,
            query_index=index_q,
            key_index=index_k,
            weights=at_least_float32(index_weights).contiguous(),
            softmax_max=softmax_max,
            softmax_sum=softmax_sum,
            scale_value=scale,
            query_rope=q_rope,
            key_rope=k_rope,
            layout=layout,
            **ends,
        )
        return output, None


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
        bsz, tokens = (max(sizes) for sizes in zip(*self.batches(), strict=True))
        dims, dtype = self.parallel_dims, self.compute_dtype()
        limits = DsaLimits(attention, attention.args.n_heads // dims.tp, bsz, tokens, tokens * dims.cp, dtype)
        messages = limits.of_dense_attention() if attention.args.warmup else limits.of_sparse_attention()
        training = self.job_config.training
        if dtype != TORCH_DTYPE_MAP[training.mixed_precision_param]:
            why = f"{training.dtype} (training.dtype, because without FSDP tensor parallel has no mixed precision)"
            messages = [text.replace(f"dtype is {training.dtype}", f"dtype is {why}") for text in messages]
        return messages


@dataclass(frozen=True)
class DsaLimits:
    """The NPU limits that a layer of one rank exceeds, found on tensors without memory."""

    attention: SparseAttention
    heads: int
    """Of this rank."""
    bsz: int
    queries: int
    """Tokens of a sequence on this rank."""
    keys: int
    """Tokens of a sequence on all ranks."""
    dtype: torch.dtype

    def of_sparse_attention(self) -> list[str]:
        args, topk, index = self.attention.args, self.attention.topk, self._index_tensors()
        sparse = {
            "query": self._of_queries(self.heads, args.kv_lora_rank),
            "key": self._of_keys(1, args.kv_lora_rank),
            "query_rope": self._of_queries(self.heads, args.qk_rope_head_dim),
            "key_rope": self._of_keys(1, args.qk_rope_head_dim),
            "sparse_indices": self._of_queries(1, topk, dtype=torch.int32),
        }
        messages = []
        if self.attention.has_indexer:
            messages = OPS[INDEXER].limit_errors(
                query=index["query_index"], key=index["key_index"], weights=index["weights"], sparse_count=topk
            )
        for operator in (ATTENTION, f"{ATTENTION}_grad"):
            messages += OPS[operator].limit_errors(value=sparse["key"], **sparse)
        if self.attention.indexer_loss is not None:
            chunk = {**sparse, "query": sparse["query"][:, :MAX_QUERIES]}
            messages += OPS[LOSS].limit_errors(**index, **chunk)
        return messages

    def of_dense_attention(self) -> list[str]:
        args, heads, index = self.attention.args, self.heads, self._index_tensors()
        size, rope = args.qk_nope_head_dim, args.qk_rope_head_dim
        messages = OPS[DENSE_ATTENTION].limit_errors(
            query=self._of_queries(heads, size + rope),
            key=self._of_keys(heads, size + rope),
            value=self._of_keys(heads, args.v_head_dim),
            head_num=heads,
            input_layout="BSND",
            actual_seq_qlen=None,
        )
        if self.attention.indexer_loss is None:
            return messages
        messages += OPS[DENSE_STATISTICS].limit_errors(**index)
        return messages + OPS[DENSE_LOSS].limit_errors(
            query=self._of_queries(heads, size),
            key=self._of_keys(heads, size),
            query_rope=self._of_queries(heads, rope),
            key_rope=self._of_keys(heads, rope),
            **index,
        )

    def _index_tensors(self) -> dict[str, Tensor]:
        args = self.attention.args
        return {
            "query_index": self._of_queries(args.index_n_heads, args.index_head_dim),
            "key_index": self._of_keys(1, args.index_head_dim),
            "weights": self._of_queries(args.index_n_heads, dtype=torch.float32),  # always float32, see Indexer.queries
        }

    def _of_queries(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(self.bsz, self.queries, *shape, dtype=dtype or self.dtype, device="meta")

    def _of_keys(self, *shape: int) -> Tensor:
        return torch.empty(self.bsz, self.keys, *shape, dtype=self.dtype, device="meta")
