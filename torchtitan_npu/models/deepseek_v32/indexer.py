"""The lightning indexer's projections: what it scores keys by, for each query.

The release also multiplies queries and keys by a Hadamard matrix, which spreads outliers before they are rounded to
FP8. It is orthogonal, so the scores are the same without it, and without FP8 there is no need for it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model.model import reshape_for_broadcast
from torchtitan.models.utils import trunc_normal_

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is where it is finer."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def apply_rotary_half(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    """``x`` (bsz, seqlen, n_heads, dim), each element rotated with the one half a head away.

    Angles are those of TorchTitan's ``apply_rotary_emb``, which rotates neighbours: ``freqs_cis`` (max_seq_len,
    dim / 2), and ``positions`` (1 or bsz, seqlen) or none for 0, 1, 2, ...
    """
    real, imaginary = x.float().chunk(2, dim=-1)
    y = torch.complex(real, imaginary)  # (bsz, seqlen, n_heads, dim / 2)
    y = y * reshape_for_broadcast(freqs_cis, y, positions)
    return torch.cat([y.real, y.imag], dim=-1).to(x.dtype)


class Indexer(nn.Module):
    """Queries, keys and weights of the heads, of which the scores are Σ_h weight_h · ReLU(query_h · key)."""

    def __init__(self, args: DeepSeekV32ModelArgs) -> None:
        super().__init__()
        self.n_heads = args.index_n_heads
        self.head_dim = args.index_head_dim
        self.qk_rope_head_dim = args.qk_rope_head_dim

        self.wq_b = nn.Linear(args.q_lora_rank, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(args.dim, self.head_dim, bias=False)
        self.k_norm = nn.LayerNorm(self.head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(args.dim, self.n_heads, bias=False)

    def forward(
        self, x: Tensor, q_latent: Tensor, freqs_cis: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Of the attention's input ``x`` (bsz, seqlen, dim) and the normed query latent (bsz, seqlen, q_lora_rank).

        Neither gets a gradient from here: the indexer learns from a loss of its own, and the rest not from that.
        """
        x, q_latent = x.detach(), q_latent.detach()
        bsz, seqlen, _ = x.shape

        q = self.wq_b(q_latent).view(bsz, seqlen, self.n_heads, self.head_dim)
        q = self._rotate(q, freqs_cis, positions)  # (bsz, seqlen, index_n_heads, index_head_dim)

        k = self.k_norm(self.wk(x)).unsqueeze(2)
        k = self._rotate(k, freqs_cis, positions).squeeze(2)  # (bsz, seqlen, index_head_dim)

        # the scale of q · k is positive, so that ReLU lets it through: it may be the weights'
        scale = self.n_heads**-0.5 * self.head_dim**-0.5
        weights = at_least_float32(self.weights_proj(x)) * scale  # (bsz, seqlen, index_n_heads)
        return q, k, weights

    def _rotate(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        """The first ``qk_rope_head_dim`` of each head; in the main attention it is the last, and neighbours rotate."""
        rope, rest = x.split([self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim], dim=-1)
        return torch.cat([apply_rotary_half(rope, freqs_cis, positions), rest], dim=-1)

    def init_weights(self) -> None:
        for linear in (self.wq_b, self.wk, self.weights_proj):
            trunc_normal_(linear.weight, mean=0.0, std=0.02)
        self.k_norm.reset_parameters()
