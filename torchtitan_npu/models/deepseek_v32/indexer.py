"""The lightning indexer's projections: what it scores keys by, for each query.

The release also multiplies queries and keys by a Hadamard matrix, which spreads outliers before they are rounded to
FP8. It is orthogonal, so the scores are the same without it, and without FP8 there is no need for it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.deepseek_v3.model.model import reshape_for_broadcast
from torchtitan.models.utils import trunc_normal_

from torchtitan_npu.distributed.local_tensor import local
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


def whole(parameter: Tensor) -> Tensor:
    """A parameter that all tensor-parallel ranks have, each of which will have a part of its gradient's sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    # the first step changes nothing but where the sum over the ranks is taken: here, not in the optimizer
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=[Partial()])


class Indexer(nn.Module):
    """Queries, keys and weights of the heads, of which the scores are Σ_h weight_h · ReLU(query_h · key).

    Tensor parallel does not split it: a score is a sum over all heads, and of every query and key. Each rank computes
    all of it, on tensors of its own.
    """

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
        """Queries, keys and weights, of the attention's input ``x`` (bsz, seqlen, dim) and its normed query latent."""
        q, weights = self.queries(x, q_latent, freqs_cis, positions)
        return q, self.keys(x, freqs_cis, positions), weights

    def keys(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        """(bsz, seqlen, index_head_dim). ``x`` gets no gradient: attention learns nothing from the indexer's loss."""
        k = F.linear(local(x.detach()), whole(self.wk.weight))
        norm = self.k_norm
        k = F.layer_norm(k, norm.normalized_shape, whole(norm.weight), whole(norm.bias), norm.eps)
        return self._rotate(k.unsqueeze(2), freqs_cis, positions).squeeze(2)

    def queries(
        self, x: Tensor, q_latent: Tensor, freqs_cis: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(bsz, seqlen, index_n_heads, index_head_dim), and each head's weight (bsz, seqlen, index_n_heads)."""
        q = F.linear(local(q_latent.detach()), whole(self.wq_b.weight))
        q = self._rotate(q.unflatten(-1, (self.n_heads, self.head_dim)), freqs_cis, positions)

        # the scale of q · k is positive, so that ReLU lets it through: it may be the weights'
        scale = self.n_heads**-0.5 * self.head_dim**-0.5
        weights = F.linear(local(x.detach()), whole(self.weights_proj.weight))
        return q, at_least_float32(weights) * scale

    def _rotate(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        """The first ``qk_rope_head_dim`` of each head; in the main attention it is the last, and neighbours rotate."""
        rope, rest = x.split([self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim], dim=-1)
        positions = None if positions is None else local(positions)
        return torch.cat([apply_rotary_half(rope, local(freqs_cis), positions), rest], dim=-1)

    def init_weights(self) -> None:
        # so that scores differ by about as much at any width; the usual 0.02 would do that at the released one only,
        # and make them nearly equal in a small model
        for linear in (self.wq_b, self.wk, self.weights_proj):
            std = linear.in_features**-0.5
            trunc_normal_(linear.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)
        self.k_norm.reset_parameters()
