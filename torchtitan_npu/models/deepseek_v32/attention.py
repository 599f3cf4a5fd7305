"""Multi-head latent attention over the keys that an indexer selects."""

from __future__ import annotations

from typing import Any

from torch import Tensor, einsum, nn
from torchtitan.models.deepseek_v3.model.model import Attention as DeepSeekV3Attention
from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb

from torchtitan_npu.models.deepseek_v32.args import DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.documents import Documents
from torchtitan_npu.models.deepseek_v32.indexer import Indexer
from torchtitan_npu.models.deepseek_v32.inner_attention import SparseAttention


class Inputs(nn.Module):
    """What attention is given, as it is given. Tensor parallel gathers it here: a sequence is split between blocks."""

    def forward(self, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        return given


class OwnKeys(nn.Module):
    """Where a rank gets the keys for its queries: here, from itself. Context parallel puts another in its place."""

    def forward(self, kv: Tensor, k_rope: Tensor, index_k: Tensor) -> Any:
        """Start to get, for these keys of this rank, those of all tokens that its queries may see."""
        return kv, k_rope, index_k

    def wait(self, pending: Any) -> tuple[Tensor, Tensor, Tensor]:
        """What :meth:`forward` has started to get, in the order of the sequence."""
        return pending


class Attention(DeepSeekV3Attention):
    """DeepSeek-V3's attention, its parameters and its softmax's scale, with an indexer.

    In three parts: :meth:`prolog` has what comes before attention proper, ``inner_attention`` has no parameters and
    knows nothing of projections, :meth:`epilog` has what comes after.

    With ``absorb``, a head's keys W_k c and values W_v c are never made of the latent vectors c: q · (W_k c) is
    (W_kᵀ q) · c, and a sum of values p · (W_v c) is W_v (p · c). Attention then has one head of keys, which are c and
    are the values too.
    """

    def __init__(self, args: DeepSeekV32ModelArgs) -> None:
        super().__init__(args.as_titan_takes_it())
        self.absorb = args.absorb
        self.warmup = args.warmup
        # a parameter that could have a gradient but gets none has no optimizer state in a checkpoint, which then cannot
        # be resumed from
        self.indexer = Indexer(args).requires_grad_(args.indexer_loss)
        self.inputs = Inputs()
        self.exchange = OwnKeys()
        self.inner_attention: Any = SparseAttention(args)  # or what a converter or context parallel puts there

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: Documents | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """``x`` and the output (bsz, seqlen, dim); ``positions`` (1 or bsz, seqlen), or none for 0, 1, 2, ...

        They are what is rotated by. Which keys a query may see its place in the sequence decides, and its document.
        """
        return self.epilog(self.attend(self.prolog(x, freqs_cis, positions), attention_masks))

    def prolog(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """q, q_rope, k, k_rope, v, index_q, index_k and index_weights, as ``inner_attention`` takes them."""
        x, freqs_cis, positions = self.inputs(x, freqs_cis, positions)
        if self.warmup:  # nothing but the indexer learns, and that from inputs of its own
            x = x.detach()
        bsz, seqlen, _ = x.shape

        # keys first: ranks that share a sequence exchange them while they make their queries
        kv, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_norm(kv)  # (bsz, seqlen, kv_lora_rank)
        k_rope = apply_rotary_emb(k_rope.unsqueeze(2), freqs_cis, positions)  # (bsz, seqlen, 1, qk_rope_head_dim)
        index_k = self.indexer.keys(x, freqs_cis, positions)  # (bsz, seqlen, index_head_dim)
        pending = self.exchange(kv, k_rope, index_k)

        q_latent = self.q_norm(self.wq_a(x))  # (bsz, seqlen, q_lora_rank)
        q = self.wq_b(q_latent).view(bsz, seqlen, -1, self.qk_head_dim)
        q, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_rope = apply_rotary_emb(q_rope, freqs_cis, positions)  # (bsz, seqlen, n_heads, qk_rope_head_dim)
        index_q, index_weights = self.indexer.queries(x, q_latent, freqs_cis, positions)
        if self.absorb:
            w_k = self.weights_by_head()[:, : self.qk_nope_head_dim]
            q = self.inner_attention.laid_out(einsum("bshd,hdl->bshl", q, w_k))  # (bsz, seqlen, n_heads, kv_lora_rank)

        kv, k_rope, index_k = self.exchange.wait(pending)  # of all tokens that queries here may see
        if self.absorb:
            k = v = kv.unsqueeze(2)  # (bsz, keys, 1, kv_lora_rank)
        else:
            kv = self.wkv_b(kv).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
            k, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)  # (bsz, keys, n_heads, ...)
        return q, q_rope, k, k_rope, v, index_q, index_k, index_weights

    def attend(self, projected: tuple[Tensor, ...], documents: Documents | None) -> Tensor:
        """Attention proper, of what :meth:`prolog` returned: (bsz, seqlen, n_heads, width of v)."""
        return self.inner_attention(*projected, documents=documents, scale=self.softmax_scale)

    def epilog(self, output: Tensor) -> Tensor:
        """From ``inner_attention``'s output (bsz, seqlen, n_heads, width of v) to (bsz, seqlen, dim)."""
        if self.absorb:
            w_v = self.weights_by_head()[:, self.qk_nope_head_dim :]
            output = einsum("bshl,hdl->bshd", output, w_v)
        return self.wo(output.flatten(2))  # of (bsz, seqlen, n_heads * v_head_dim)

    def weights_by_head(self) -> Tensor:
        """Those of ``wkv_b``, (n_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank): of keys, then of values."""
        return self.wkv_b.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))

    def init_weights(self, init_std: float) -> None:
        super().init_weights(init_std)
        self.indexer.init_weights()
