"""Multi-head latent attention over the keys that an indexer selects."""

from __future__ import annotations

from torch import Tensor, einsum
from torchtitan.models.deepseek_v3.model.model import Attention as DeepSeekV3Attention
from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb
from torchtitan.protocols.model import AttentionMasksType

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.indexer import Indexer
from torchtitan_npu.models.deepseek_v32.inner_attention import SparseAttention


class Attention(DeepSeekV3Attention):
    """DeepSeek-V3's attention, its parameters and its softmax's scale, with an indexer.

    In three parts: :meth:`prolog` has what comes before attention proper, ``inner_attention`` has no parameters and
    knows nothing of projections, :meth:`epilog` has what comes after.

    With ``absorb``, a head's keys W_k c and values W_v c are never made of the latent vectors c: q · (W_k c) is
    (W_kᵀ q) · c, and a sum of values p · (W_v c) is W_v (p · c). Attention then has one head of keys, which are c and
    are the values too.
    """

    def __init__(self, args: DeepSeekV32ModelArgs) -> None:
        super().__init__(args)
        self.absorb = args.absorb
        # it has no loss yet; a parameter that gets no gradient but could has no optimizer state in a checkpoint, which
        # then cannot be resumed from
        self.indexer = Indexer(args).requires_grad_(False)
        self.inner_attention = SparseAttention(args.index_topk)

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: AttentionMasksType | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """``x`` and the output (bsz, seqlen, dim); ``positions`` (1 or bsz, seqlen), or none for 0, 1, 2, ..."""
        assert attention_masks is None
        projected = self.prolog(x, freqs_cis, positions)
        output = self.inner_attention(*projected, positions=positions, scale=self.softmax_scale)
        return self.epilog(output)

    def prolog(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """q, q_rope, k, k_rope, v, index_q, index_k and index_weights, as ``inner_attention`` takes them."""
        bsz, seqlen, _ = x.shape

        q_latent = self.q_norm(self.wq_a(x))  # (bsz, seqlen, q_lora_rank)
        q = self.wq_b(q_latent).view(bsz, seqlen, -1, self.qk_head_dim)
        q, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_rope = apply_rotary_emb(q_rope, freqs_cis, positions)  # (bsz, seqlen, n_heads, qk_rope_head_dim)

        kv, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_norm(kv)  # (bsz, seqlen, kv_lora_rank)
        k_rope = apply_rotary_emb(k_rope.unsqueeze(2), freqs_cis, positions)  # (bsz, seqlen, 1, qk_rope_head_dim)

        if self.absorb:
            w_k, _ = self.key_and_value_weights()
            q = einsum("bshd,hdl->bshl", q, w_k)  # (bsz, seqlen, n_heads, kv_lora_rank)
            k = v = kv.unsqueeze(2)  # (bsz, seqlen, 1, kv_lora_rank)
        else:
            kv = self.wkv_b(kv).view(bsz, seqlen, -1, self.qk_nope_head_dim + self.v_head_dim)
            k, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)  # (bsz, seqlen, n_heads, ...)

        return q, q_rope, k, k_rope, v, *self.indexer(x, q_latent, freqs_cis, positions)

    def epilog(self, output: Tensor) -> Tensor:
        """From ``inner_attention``'s output (bsz, seqlen, n_heads, width of v) to (bsz, seqlen, dim)."""
        if self.absorb:
            _, w_v = self.key_and_value_weights()
            output = einsum("bshl,hdl->bshd", output, w_v)
        return self.wo(output.flatten(2))  # of (bsz, seqlen, n_heads * v_head_dim)

    def key_and_value_weights(self) -> tuple[Tensor, ...]:
        """The rows of ``wkv_b`` that make keys and those that make values, a head each.

        (n_heads, qk_nope_head_dim, kv_lora_rank) and (n_heads, v_head_dim, kv_lora_rank).
        """
        weights = self.wkv_b.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        return weights.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)

    def init_weights(self, init_std: float) -> None:
        super().init_weights(init_std)
        self.indexer.init_weights()
