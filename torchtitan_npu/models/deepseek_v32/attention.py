"""Multi-head latent attention to the keys that an indexer selects."""

from __future__ import annotations

from typing import Any

from torch import Tensor, einsum, nn
from torchtitan.models.deepseek_v3.model.model import Attention as DeepSeekV3Attention
from torchtitan.models.deepseek_v3.model.model import apply_rotary_emb

from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.layers.routing_decisions import RoutingDecisions
from torchtitan_npu.layers.sparse_attention import SparseAttention
from torchtitan_npu.models.deepseek_v32.args import INDEX, DeepSeekV32ModelArgs
from torchtitan_npu.models.deepseek_v32.indexer import INDEXERS


class Inputs(nn.Module):
    """The identity on attention's inputs. Tensor parallel gathers the sequence here."""

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        return inputs


class LocalKV(nn.Module):
    """The keys of this rank's tokens, unchanged. Context parallel replaces this module by ``AllGatherKV``."""

    def forward(self, kv: Tensor, k_rope: Tensor, *index_k: Tensor) -> Any:
        """Start to gather the keys of all tokens that this rank's queries may see."""
        return kv, k_rope, *index_k

    def wait(self, pending: Any) -> tuple[Tensor, ...]:
        """Return the keys that :meth:`forward` started to gather, in the order of the sequence."""
        return pending


class DeepSeekV32Attention(DeepSeekV3Attention):
    """DeepSeek-V3's attention with an indexer. Parameters and softmax scale are the same.

    A layer may have no indexer (``args.has_indexer``). It then attends to the keys that an earlier layer has selected.

    It has three parts: :meth:`pre_attention` has the projections before attention, ``inner_attention`` has no
    parameters, :meth:`post_attention` has the projections after it.

    With ``absorb``, except in the warm-up, keys W_k c and values W_v c of a head are never computed from the latent
    vectors c, because q · (W_k c) = (W_kᵀ q) · c and p · (W_v c) = W_v (p · c). The latent vectors c are then the one
    head of keys and values.
    """

    def __init__(self, args: DeepSeekV32ModelArgs, layer_id: int = 0) -> None:
        super().__init__(args)
        self.q_norm.eps = self.kv_norm.eps = args.latent_norm_eps
        self.absorb = args.latent_keys()
        self.warmup = args.warmup
        # frozen without its loss: a trainable parameter that gets no gradient has no optimizer state, and a checkpoint
        # without that state cannot be resumed
        self.indexer = None
        if args.has_indexer(layer_id):
            self.indexer = INDEXERS[args.index_rope](args).requires_grad_(args.indexer_loss)
        self.received, self.passed = args.passed_tensors(layer_id - 1), args.passed_tensors(layer_id)
        self.decisions: RoutingDecisions | None = None
        self.inputs = Inputs()
        self.kv_gather = LocalKV()
        self.inner_attention: Any = SparseAttention(  # a converter or context parallel replaces it
            args,
            has_indexer=self.indexer is not None,
            returns_selected=self.indexer is not None and "selected" in self.passed,
            loss_share=args.indexer_loss_share(layer_id),
        )

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        attention_masks: Documents | None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``x`` (bsz, seqlen, dim); the output has the same shape.

        ``positions`` (1 or bsz, seqlen), or none for 0, 1, 2, ..., are used only for rotation. The keys that a query
        sees depend on its position in the sequence and on its document.
        """
        output, _ = self.attend(self.pre_attention(x, freqs_cis, positions), attention_masks)
        return self.post_attention(output)

    def pre_attention(self, x: Tensor, freqs_cis: Tensor, positions: Tensor | None) -> tuple[Tensor, ...]:
        """Return the arguments of ``inner_attention``: q, q_rope, k, k_rope, v, index_q, index_k, index_weights.

        Without an indexer the last three are absent.
        """
        x, freqs_cis, positions = self.inputs(x, freqs_cis, positions)
        if self.warmup:  # only the indexer is trained, and its inputs are detached
            x = x.detach()
        bsz, seqlen, _ = x.shape

        # keys first: context-parallel ranks gather them while they compute their queries
        kv, k_rope = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.kv_norm(kv)  # (bsz, seqlen, kv_lora_rank)
        k_rope = apply_rotary_emb(k_rope.unsqueeze(2), freqs_cis, positions)  # (bsz, seqlen, 1, qk_rope_head_dim)
        index: tuple[Tensor, ...] = ()
        if self.indexer is not None:
            index = (self.indexer.keys(x, freqs_cis, positions),)  # (bsz, seqlen, index_head_dim)
        pending = self.kv_gather(kv, k_rope, *index)

        q_latent = self.q_norm(self.wq_a(x))  # (bsz, seqlen, q_lora_rank)
        q = self.wq_b(q_latent).view(bsz, seqlen, -1, self.qk_head_dim)
        q, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_rope = apply_rotary_emb(q_rope, freqs_cis, positions)  # (bsz, seqlen, n_heads, qk_rope_head_dim)
        if self.indexer is not None:
            index_q, index_weights = self.indexer.queries(x, q_latent, freqs_cis, positions)
        if self.absorb:
            w_k = self.weights_by_head()[:, : self.qk_nope_head_dim]
            q = self.inner_attention.prepare_queries(
                einsum("bshd,hdl->bshl", q, w_k)
            )  # (bsz, seqlen, n_heads, kv_lora_rank)

        kv, k_rope, *index_k = self.kv_gather.wait(pending)  # for all tokens that these queries may see
        if self.absorb:
            k = v = kv.unsqueeze(2)  # (bsz, keys, 1, kv_lora_rank)
        else:
            kv = self.wkv_b(kv).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
            k, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)  # (bsz, keys, n_heads, ...)
        if self.indexer is None:
            return q, q_rope, k, k_rope, v
        return q, q_rope, k, k_rope, v, index_q, *index_k, index_weights

    def attend(
        self, projected: tuple[Tensor, ...], documents: Documents | None, shared: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Run ``inner_attention`` on the output of :meth:`pre_attention`: (bsz, seqlen, n_heads, width of v).

        ``shared`` is what the layer before passes to this one (``args.passed_tensors``). The second result is what this
        layer passes to the next one.
        """
        options = {"documents": documents, "scale": self.softmax_scale}
        if self.indexer is None:
            passed = dict(zip(self.received, shared, strict=True))
            index = [passed[name] for name in INDEX if name in passed]
            output = self.inner_attention(*projected, *index, **options, selected=passed.get("selected"))
            return output, shared if self.passed else ()
        if self.decisions is None:
            output = self.inner_attention(*projected, **options)
            output, *selected = output if isinstance(output, tuple) else (output,)
        else:
            q, _, k, *_ = projected
            query_positions = self.inner_attention.query_positions(*q.shape[:2], k.shape[1], documents, k.device)
            recorded = self.decisions.recorded_keys(query_positions)
            output, computed = self.inner_attention(*projected, **options, selected=recorded)
            selected = [self.decisions(computed, query_positions)]
        if not self.passed:
            return output, ()
        if INDEX[0] not in self.passed:
            return output, tuple(selected)
        index_q, index_k, index_weights = projected[-3:]
        # FSDP would cast the float32 weights between layers: cast on all layouts
        return output, (*selected, index_q, index_k, index_weights.to(index_q.dtype))

    @property
    def weights_read_directly(self) -> tuple[str, ...]:
        """The linear modules whose weights are multiplied here, without a call of the module."""
        return ("wkv_b",) if self.absorb else ()

    @property
    def selects_keys(self) -> bool:
        """True if this layer selects the keys that it attends to."""
        return self.indexer is not None and not self.warmup

    def use_routing_decisions(self, decisions: RoutingDecisions) -> None:
        """Pass the selected keys through ``decisions``, before the model is parallelized."""
        self.decisions = decisions
        self.inner_attention.returns_selected = True

    def post_attention(self, output: Tensor) -> Tensor:
        """Project ``inner_attention``'s output (bsz, seqlen, n_heads, width of v) to (bsz, seqlen, dim)."""
        if self.absorb:
            w_v = self.weights_by_head()[:, self.qk_nope_head_dim :]
            output = einsum("bshl,hdl->bshd", output, w_v)
        return self.wo(output.flatten(2))  # from (bsz, seqlen, n_heads * v_head_dim)

    def weights_by_head(self) -> Tensor:
        """Return ``wkv_b`` as (n_heads, qk_nope_head_dim + v_head_dim, kv_lora_rank): keys, then values."""
        return self.wkv_b.weight.unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))

    def init_weights(self, init_std: float) -> None:
        super().init_weights(init_std)
        if self.indexer is not None:
            self.indexer.init_weights()
