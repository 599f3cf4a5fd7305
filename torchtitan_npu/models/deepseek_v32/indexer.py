"""The projections of the lightning indexer, which scores every key for every query.

The released code also multiplies queries and keys by a Hadamard matrix, to spread outliers before rounding to FP8. The
matrix is orthogonal and does not change the scores. Without FP8 it is not needed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb, reshape_for_broadcast
from torchtitan.models.utils import trunc_normal_

from torchtitan_npu.dist_utils import local
from torchtitan_npu.layers.rotary import HALF_OF_COMPLEX, INTERLEAVE, register_rotation
from torchtitan_npu.layers.sparse_attention import at_least_float32
from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs


def apply_rotary_half(x: Tensor, freqs_cis: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotate ``x`` (bsz, seqlen, n_heads, dim); elements half a head apart form a pair.

    The angles are those of TorchTitan's ``apply_rotary_emb``, which rotates neighbouring elements: ``freqs_cis``
    (max_seq_len, dim / 2), and ``positions`` (1 or bsz, seqlen) or none for 0, 1, 2, ...
    """
    real, imaginary = x.float().chunk(2, dim=-1)
    y = torch.complex(real, imaginary)  # (bsz, seqlen, n_heads, dim / 2)
    y = y * reshape_for_broadcast(freqs_cis, y, positions)
    return torch.cat([y.real, y.imag], dim=-1).to(x.dtype)


def replicated(parameter: Tensor) -> Tensor:
    """Return a replicated parameter as a local tensor whose gradient is summed over the tensor-parallel ranks."""
    if not isinstance(parameter, DTensor):
        return parameter
    # redistribute to the same placements: its backward sums the gradient here, not in the optimizer
    return parameter.redistribute(placements=parameter.placements).to_local(grad_placements=[Partial()])


class Indexer(nn.Module):
    """Computes queries, keys and head weights; a key's score is Σ_h weight_h · ReLU(query_h · key).

    Tensor parallel does not split it, because a score is a sum over all heads. Each rank computes all of it on local
    tensors.
    """

    weights_read_directly = ("wq_b", "wk", "weights_proj")
    """The linear modules whose weights are multiplied here, without a call of the module."""

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
        """Return queries, keys and weights from attention's input ``x`` (bsz, seqlen, dim) and normed query latent."""
        q, weights = self.queries(x, q_latent, freqs_cis, positions)
        return q, self.keys(x, freqs_cis, positions), weights

    def keys(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        """Return keys (bsz, seqlen, index_head_dim). The indexer's loss gives no gradient to ``x``."""
        k = F.linear(local(x.detach()), replicated(self.wk.weight))
        norm = self.k_norm
        k = F.layer_norm(k, norm.normalized_shape, replicated(norm.weight), replicated(norm.bias), norm.eps)
        return self._rotate(k.unsqueeze(2), freqs_cis, positions).squeeze(2)

    def queries(
        self, x: Tensor, q_latent: Tensor, freqs_cis: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return queries (bsz, seqlen, index_n_heads, index_head_dim) and head weights (bsz, seqlen, index_n_heads)."""
        q = F.linear(local(q_latent.detach()), replicated(self.wq_b.weight))
        q = self._rotate(q.unflatten(-1, (self.n_heads, self.head_dim)), freqs_cis, positions)

        # ReLU commutes with the positive scale of q · k, so the weights absorb it
        scale = self.n_heads**-0.5 * self.head_dim**-0.5
        weights = F.linear(local(x.detach()), replicated(self.weights_proj.weight))
        return q, at_least_float32(weights) * scale

    def _rotate(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        """Rotate the first ``qk_rope_head_dim`` elements of each head. Attention rotates the last ones."""
        rope, rest = x.split([self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim], dim=-1)
        positions = None if positions is None else local(positions)
        return torch.cat([self._rotate_rope(rope, local(freqs_cis), positions), rest], dim=-1)

    def _rotate_rope(self, rope: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        return apply_rotary_half(rope, freqs_cis, positions)

    def init_weights(self) -> None:
        # keep the spread of the scores independent of the width: the usual 0.02 fits the released width only, and would
        # make scores nearly equal in a small model
        for linear in (self.wq_b, self.wk, self.weights_proj):
            std = linear.in_features**-0.5
            trunc_normal_(linear.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)
        self.k_norm.reset_parameters()


class NeighbourIndexer(Indexer):
    """An indexer that rotates neighbouring elements, as attention does."""

    def _rotate_rope(self, rope: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> Tensor:
        return apply_rotary_emb(rope, freqs_cis, positions)


for cls, function, pairing in (
    (Indexer, apply_rotary_half, HALF_OF_COMPLEX),
    (NeighbourIndexer, apply_rotary_emb, INTERLEAVE),
):
    register_rotation(cls, function, pairing, tensors=1, methods=("_rotate_rope",), passed_by=(cls,))

INDEXERS = {"half": Indexer, "interleave": NeighbourIndexer}
"""By ``index_rope`` of the model's arguments."""
