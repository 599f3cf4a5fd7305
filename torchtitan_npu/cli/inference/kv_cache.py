"""Caches of the keys of earlier tokens, one class for each kind of attention.

They are attached to the modules through which a model's keys pass, before it is parallelized: dense attention's
``inner_attention``, and the ``kv_gather`` of sparse attention. They have no parameters.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

from torchtitan_npu.dist_utils import local
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import CuSeqlens, Documents
from torchtitan_npu.models.deepseek_v32.attention import DeepSeekV32Attention, LocalKV


class CachedTokens:
    """The tokens that the caches of all layers hold, and those of the next forward pass.

    Rows of different lengths are padded at the left, so that the new tokens are the last ones of every row. Padding is
    a separate document, which no other token sees.
    """

    def __init__(self) -> None:
        self.capacity = self.start = 0
        """Number of tokens that fit in a row, and that it has before the next forward pass."""
        self.padding: list[int] = []
        """Number of padding tokens at the left of each row."""
        self.mask: Tensor | None = None
        """(bsz, 1, queries, keys), True for the keys that a query of the next forward pass sees."""

    @property
    def is_padded(self) -> bool:
        return any(self.padding)

    def prepare(self, start: int, queries: int, padding: list[int], device: torch.device) -> Documents | None:
        """Set the tokens of the next forward pass, and return their documents if rows are padded."""
        self.start, self.padding = start, padding
        keys = start + queries
        position = torch.arange(keys, device=device)
        is_text = position >= torch.tensor(padding, device=device).unsqueeze(1)  # (bsz, keys)
        same = is_text[:, start:].unsqueeze(2) == is_text.unsqueeze(1)  # (bsz, queries, keys)
        self.mask = (same & (position[start:].unsqueeze(1) >= position)).unsqueeze(1)
        if not self.is_padded:
            return None
        cu_seqlens_q, cu_seqlens_k = [], []
        for row, blanks in enumerate(padding):
            cu_seqlens_q += [row * queries + max(0, blanks - start), (row + 1) * queries]
            cu_seqlens_k += [row * keys + blanks, (row + 1) * keys]
        return Documents(CuSeqlens.from_integers(cu_seqlens_q, device), CuSeqlens.from_integers(cu_seqlens_k, device))


class Cache:
    """One tensor of every token, with the tokens in dimension ``dim``."""

    def __init__(self, tokens: CachedTokens, dim: int) -> None:
        self.tokens, self.dim = tokens, dim
        self.stored: Tensor | None = None

    def append(self, new: Tensor) -> Tensor:
        """Store the ``new`` tokens after the cached ones, and return all of them."""
        start, count = self.tokens.start, new.shape[self.dim]
        if start == 0:
            shape = list(new.shape)
            shape[self.dim] = self.tokens.capacity
            self.stored = new.new_empty(shape)
        assert self.stored is not None
        self.stored.narrow(self.dim, start, count).copy_(new)
        return self.stored.narrow(self.dim, 0, start + count)


class CachedAttention(nn.Module):
    """Dense attention to the keys and values of all tokens so far: llama3, qwen3, deepseek_v3."""

    def __init__(self, attention: nn.Module, tokens: CachedTokens) -> None:
        super().__init__()
        self.attention, self.tokens = attention, tokens
        self.keys, self.values = Cache(tokens, dim=2), Cache(tokens, dim=2)
        # a converted module aligns the queries with the last keys, PyTorch's causal mask with the first
        self.takes_more_keys = type(attention) is not ScaledDotProductAttentionWrapper

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attend from ``q`` (bsz, heads, queries, head_dim), under tensor parallel perhaps a DTensor."""
        keys, values = self.keys.append(local(k)), self.values.append(local(v))
        if not self.tokens.is_padded and (self.tokens.start == 0 or self.takes_more_keys):
            out = self.attention(local(q), keys, values, **options)
        else:
            out = F.scaled_dot_product_attention(local(q), keys, values, attn_mask=self.tokens.mask, **options)
        if not isinstance(q, DTensor):
            return out
        return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)


class CachedKeys(LocalKV):
    """The latent, rotated and indexer keys of all tokens so far: deepseek_v32, glm_moe_dsa."""

    def __init__(self, tokens: CachedTokens) -> None:
        super().__init__()
        self.caches = [Cache(tokens, dim=1) for _ in range(3)]

    def forward(self, *keys: Tensor) -> tuple[Tensor, ...]:
        return tuple(cache.append(local(new)) for cache, new in zip(self.caches, keys, strict=False))


def attach_caches(model: Any) -> CachedTokens:
    """Give each attention layer of ``model`` a cache, and return the tokens that they share."""
    tokens = CachedTokens()
    for block in model.layers.values():
        attention = block.attention
        if isinstance(attention, DeepSeekV32Attention):
            attention.kv_gather = CachedKeys(tokens)
        elif isinstance(attention.inner_attention, ScaledDotProductAttentionWrapper):
            attention.inner_attention = CachedAttention(attention.inner_attention, tokens)
        else:
            kind = type(attention.inner_attention).__name__
            raise UsageError(f"there is no cache for {kind}: choose a model.flavor with scaled dot-product attention")
    return tokens
