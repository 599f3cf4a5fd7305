"""Context parallel of DeepSeek-V3.2: each rank keeps its queries and gathers all keys.

A token's latent key, rotated key and indexer key are packed, kv_lora_rank + qk_rope_head_dim + index_head_dim numbers.
A layer without an indexer has no indexer key.
A layer needs one all-gather of them, and one reduce-scatter of their gradients in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchtitan_npu.dist_utils import SequenceSplit, all_gather_kv
from torchtitan_npu.distributed.context_parallel import ContextParallel
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.models.deepseek_v32.attention import DeepSeekV32Attention, LocalKV


class SequenceChunk(NamedTuple):
    """Tokens of a rank that are contiguous in the sequence and on the rank."""

    first: int
    """Index of the first token on the rank."""
    start: int
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
            attention.kv_gather = AllGatherKV(self.mesh, self.split)
            attention.inner_attention = AttentionByChunks(attention.inner_attention, self)

    def chunks(self, tokens: int) -> list[SequenceChunk]:
        """Return the chunks of this rank, which has ``tokens`` tokens of a sequence."""
        numbers = self.split.chunks_of(self.mesh.get_local_rank())
        length = tokens // len(numbers)
        return [SequenceChunk(i * length, number * length, length) for i, number in enumerate(numbers)]

    def masks(self, masks: Any, bsz: int, seqlen: int) -> list[list[tuple[int, Documents]]]:
        """Return for each row and chunk the first visible key, and the documents of its queries and keys."""
        chunks = self.chunks(seqlen // self.mesh.size())
        return [[masks.part(row, seqlen, c.start, c.start + c.length) for c in chunks] for row in range(bsz)]


def attention_layers(model: nn.Module) -> list[DeepSeekV32Attention]:
    return [module for module in model.modules() if isinstance(module, DeepSeekV32Attention)]


class AllGatherKV(LocalKV):
    """Gathers the keys of all ranks, in the order of the sequence."""

    def __init__(self, mesh: DeviceMesh, split: SequenceSplit) -> None:
        super().__init__()
        self.mesh, self.split = mesh, split

    def forward(self, kv: Tensor, k_rope: Tensor, *index_k: Tensor) -> tuple[Tensor, list[int]]:
        """Start the all-gather of keys (bsz, tokens, widths), packed as one tensor (ranks, bsz, tokens, width)."""
        tensors = (kv, k_rope.squeeze(2), *index_k)
        packed = torch.cat(tensors, dim=-1).unsqueeze(0)
        sharded = DTensor.from_local(packed, self.mesh, [Shard(0)], run_check=False)
        return all_gather_kv(sharded, async_op=True), [tensor.shape[-1] for tensor in tensors]

    def wait(self, pending: tuple[Tensor, list[int]]) -> tuple[Tensor, ...]:
        gathered, widths = pending  # the first operator on the gathered keys waits for them
        kv, k_rope, *index_k = (self.in_order(keys) for keys in gathered.split(widths, dim=-1))
        return kv, k_rope.unsqueeze(2), *index_k

    def in_order(self, keys: Tensor) -> Tensor:
        """Reorder ``keys`` (ranks, bsz, tokens, width) to (bsz, seqlen, width)."""
        return self.split.in_sequence_order(keys.transpose(0, 1).flatten(1, 2), dim=1).contiguous()


class AttentionByChunks(nn.Module):
    """Runs attention once for each chunk of this rank's queries, with the keys up to the chunk's end.

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
        return q  # the queries of each chunk are prepared separately

    def query_positions(self, bsz: int, queries: int, keys: int, documents: Any, device: torch.device) -> Tensor:
        """Return the positions of this rank's queries (bsz, queries): see :meth:`SparseAttention.query_positions`."""
        rows = bsz if documents is None else 1

        def positions(_: slice, chunk: SequenceChunk, start: int, inside: Documents | None) -> Tensor:
            keys = chunk.start + chunk.length - start
            return self.attention.query_positions(rows, chunk.length, keys, inside, device)

        return self.by_chunk(queries, documents, positions)

    def forward(
        self,
        *projected: Tensor,
        documents: list[list[tuple[int, Documents]]] | None,
        scale: float,
        selected: Tensor | None = None,
    ) -> Any:
        """Run :class:`SparseAttention` on this rank's queries (bsz, tokens, ...) and all keys.

        The indices of ``selected`` keys count from the first key of the query's chunk, in each layer alike.
        """
        q, q_rope, k, k_rope, v, *index = projected

        def attend(rows: slice, chunk: SequenceChunk, start: int, inside: Documents | None) -> Any:
            queries = slice(chunk.first, chunk.first + chunk.length)
            keys = slice(start, chunk.start + chunk.length)
            one_k = k[rows, keys]
            one_v = one_k if v is k else v[rows, keys]
            main = q[rows, queries], q_rope[rows, queries], one_k, k_rope[rows, keys], one_v
            one_index = [x[rows, tokens] for x, tokens in zip(index, (queries, keys, queries), strict=False)]
            chosen = None if selected is None else selected[rows, queries]
            return self.attention(*main, *one_index, documents=inside, scale=scale, selected=chosen)

        return self.by_chunk(q.shape[1], documents, attend)

    def by_chunk(
        self, tokens: int, documents: list[list[tuple[int, Documents]]] | None, run: Callable[..., Any]
    ) -> Any:
        """Join the results of ``run(rows, chunk, first visible key, documents)`` for each chunk of this rank's tokens.

        With documents, each row of the batch is a separate call.
        """
        chunks = self.context.chunks(tokens)
        if documents is None:
            return joined([run(slice(None), chunk, 0, None) for chunk in chunks], dim=1)
        rows = [
            joined([run(slice(row, row + 1), chunk, *part) for chunk, part in zip(chunks, parts, strict=True)], dim=1)
            for row, parts in enumerate(documents)
        ]
        return joined(rows, dim=0)


def joined(outputs: list[Any], dim: int) -> Any:
    """Concatenate outputs of :class:`SparseAttention`, which may have selected keys too."""
    if isinstance(outputs[0], tuple):
        return tuple(torch.cat(tensors, dim=dim) for tensors in zip(*outputs, strict=True))
    return torch.cat(outputs, dim=dim)
