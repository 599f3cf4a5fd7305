"""Context parallel of DeepSeek-V3.2: each rank keeps its queries and gathers all keys.

A token's latent key, rotated key and indexer key are packed, kv_lora_rank + qk_rope_head_dim + index_head_dim numbers.
A layer without an indexer has no indexer key.
A layer needs one all-gather of them, and one reduce-scatter of their gradients in the backward pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from torchtitan_npu.distributed.context_parallel import ContextParallel
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.models.deepseek_v32.attention import Attention, OwnKeys


class Span(NamedTuple):
    """A run of tokens that is contiguous in the sequence and on a rank."""

    first: int
    """Index of the first token on the rank."""
    place: int
    """Index of the first token in the sequence."""
    length: int


class DSAContextParallel(ContextParallel):
    """Context parallel for the attention of DeepSeek-V3.2, eager or converted by ``npu_dsa``."""

    load_balancers = ("headtail", None)

    @classmethod
    def model_error(cls, model: nn.Module) -> str | None:
        return None if attention_layers(model) else f"{type(model).__name__} has no attention of DeepSeek-V3.2"

    def parallelize(self, model: nn.Module) -> None:
        layers_of = getattr(model, "layers", None)
        stage_without_layers = isinstance(layers_of, nn.ModuleDict) and not len(layers_of)  # of a pipeline
        if not stage_without_layers and (error := self.model_error(model)):
            raise ValueError(error)
        for attention in attention_layers(model):
            attention.exchange = GatheredKeys(self.mesh, self.head_tail)
            attention.inner_attention = AttentionBySpans(attention.inner_attention, self)

    def spans(self, tokens: int) -> list[Span]:
        """Return the spans of this rank, which has ``tokens`` tokens of a sequence."""
        rank, ranks = self.mesh.get_local_rank(), self.mesh.size()
        if not self.head_tail:
            return [Span(0, rank * tokens, tokens)]
        half = tokens // 2
        return [Span(0, rank * half, half), Span(half, (2 * ranks - 1 - rank) * half, half)]

    def masks(self, masks: Any, bsz: int, seqlen: int) -> list[list[tuple[int, Documents]]]:
        """Return for each row and span the first visible key, and the documents of its queries and keys."""
        spans = self.spans(seqlen // self.mesh.size())
        return [[masks.part(row, seqlen, span.place, span.place + span.length) for span in spans] for row in range(bsz)]


def attention_layers(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


class GatheredKeys(OwnKeys):
    """Gathers the keys of all ranks, in the order of the sequence."""

    def __init__(self, mesh: DeviceMesh, head_tail: bool) -> None:
        super().__init__()
        self.mesh = mesh
        self.head_tail = head_tail

    def forward(self, kv: Tensor, k_rope: Tensor, *index_k: Tensor) -> tuple[Tensor, list[int]]:
        """Start the all-gather of keys (bsz, tokens, widths), packed as one tensor (ranks, bsz, tokens, width)."""
        tensors = (kv, k_rope.squeeze(2), *index_k)
        packed = torch.cat(tensors, dim=-1).unsqueeze(0)
        own = DTensor.from_local(packed, self.mesh, [Shard(0)], run_check=False)
        # the first operator on the gathered keys waits for them
        gathered = own.redistribute(placements=[Replicate()], async_op=True)
        return gathered.to_local(grad_placements=[Partial()]), [tensor.shape[-1] for tensor in tensors]

    def wait(self, pending: tuple[Tensor, list[int]]) -> tuple[Tensor, ...]:
        gathered, widths = pending
        kv, k_rope, *index_k = (self.in_order(keys) for keys in gathered.split(widths, dim=-1))
        return kv, k_rope.unsqueeze(2), *index_k

    def in_order(self, keys: Tensor) -> Tensor:
        """Reorder ``keys`` (ranks, bsz, tokens, width) to (bsz, seqlen, width)."""
        if self.head_tail:  # first halves in rank order, then second halves in reverse order
            heads, tails = keys.chunk(2, dim=2)
            keys = torch.cat([heads, tails.flip(0)])
        return keys.transpose(0, 1).flatten(1, 2).contiguous()


class AttentionBySpans(nn.Module):
    """Runs attention once for each span of this rank's queries, with the keys up to the span's end.

    Attention treats its queries as the last tokens of its keys: the fused operators' causal mask assumes that.
    """

    def __init__(self, attention: nn.Module, context: DSAContextParallel) -> None:
        super().__init__()
        self.attention: Any = attention
        self.context = context

    @property
    def indexer_loss(self) -> Any:
        return self.attention.indexer_loss

    def prepare_queries(self, q: Tensor) -> Tensor:
        return q  # the queries of each span are prepared separately

    def query_places(self, bsz: int, queries: int, keys: int, documents: Any, device: torch.device) -> Tensor:
        """Return the places of this rank's queries, (bsz, queries): see :meth:`SparseAttention.query_places`."""

        def places(rows: int, span: Span, start: int, own: Documents | None) -> Tensor:
            return self.attention.query_places(rows, span.length, span.place + span.length - start, own, device)

        spans = self.context.spans(queries)
        if documents is None:
            return torch.cat([places(bsz, span, 0, None) for span in spans], dim=1)
        return torch.cat(
            [
                torch.cat([places(1, span, *part) for span, part in zip(spans, parts, strict=True)], dim=1)
                for parts in documents
            ]
        )

    def forward(
        self,
        *projected: Tensor,
        documents: list[list[tuple[int, Documents]]] | None,
        scale: float,
        selected: Tensor | None = None,
    ) -> Any:
        """Run :class:`SparseAttention` on this rank's queries (bsz, tokens, ...) and all keys.

        The indices of ``selected`` keys count from the first key of the query's span, in each layer alike.
        """
        q, q_rope, k, k_rope, v, *index = projected

        def attend(rows: slice, span: Span, start: int, own: Documents | None) -> Any:
            queries = slice(span.first, span.first + span.length)
            keys = slice(start, span.place + span.length)
            one_k = k[rows, keys]
            one_v = one_k if v is k else v[rows, keys]
            main = q[rows, queries], q_rope[rows, queries], one_k, k_rope[rows, keys], one_v
            one_index = [x[rows, tokens] for x, tokens in zip(index, (queries, keys, queries), strict=False)]
            chosen = None if selected is None else selected[rows, queries]
            return self.attention(*main, *one_index, documents=own, scale=scale, selected=chosen)

        spans = self.context.spans(q.shape[1])
        if documents is None:
            return joined([attend(slice(None), span, 0, None) for span in spans], dim=1)
        rows = [
            joined([attend(slice(row, row + 1), span, *part) for span, part in zip(spans, parts, strict=True)], dim=1)
            for row, parts in enumerate(documents)
        ]
        return joined(rows, dim=0)


def joined(outputs: list[Any], dim: int) -> Any:
    """Concatenate outputs of :class:`SparseAttention`, which may have selected keys too."""
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(tensors, dim=dim) for tensors in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=dim)
