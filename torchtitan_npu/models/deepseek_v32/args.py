"""Sizes and options of DeepSeek-V3.2: those of DeepSeek-V3, of the indexer, and of multi-token prediction."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any, ClassVar

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.utils import get_moe_model_nparams_and_flops

from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.errors import UsageError

INDEX = ("index_q", "index_k", "index_weights")
"""What an indexer computes, in the order of the arguments of ``SparseAttention.forward``."""

INDEX_ROPES = ("half", "interleave")


@dataclass
class DeepSeekV32ModelArgs(DeepSeekV3ModelArgs):
    config_sections: ClassVar[tuple[str, ...]] = ("dsa", "mtp")
    """Sections of the job's config that apply to this model."""

    norm_eps: float = 1e-6
    """The released value; TorchTitan's deepseek_v3 has 1e-5."""

    q_lora_rank: int = 1536
    """Width of the latent vector that queries are projected from, also the indexer's."""

    index_n_heads: int = 64
    """Number of heads of the indexer, which selects the keys that a query attends to."""

    index_head_dim: int = 128
    """Width of an indexer head. Its first ``qk_rope_head_dim`` elements are rotated."""

    index_topk: int = 2048
    """Number of keys that a query attends to, or all visible keys if there are fewer."""

    index_topk_pattern: str = ""
    """A letter per layer: F has an indexer, S attends to the keys of the last F before it. Empty: all F."""

    index_rope: str = "half"
    """Elements of an indexer head that rotate together: "half", half a head apart, or "interleave", neighbours."""

    latent_norm_eps: float = 1e-6
    """Epsilon of the norms of the latent vectors, which transformers does not take from the release's config."""

    absorb: bool = True
    """Attend to the latent keys, which all heads share, instead of to keys projected for each head.

    The warm-up always projects keys for each head: see :meth:`latent_keys`.
    """

    indexer_loss: bool = True
    """Train the indexer; otherwise it is frozen."""

    indexer_loss_weight: float = 1.0
    """Factor of the gradients of the indexer's loss."""

    shared_indexer_loss: bool = True
    """Train an indexer on the attention of all layers that use its keys, not only on that of its own layer."""

    seq_len: int = 4096
    """The job's ``training.seq_len``. ``max_seq_len`` is the number of positions with rotary angles."""

    warmup: bool = False
    """Train only the indexer, with attention to all keys. Otherwise train everything, with sparse attention."""

    takes_attention_masks: bool = False
    """Pass the documents of a batch to the model, as ``attention_masks`` (``dsa.document_mask``)."""

    microbatches: int | None = None
    """Number of microbatches of a pipeline, ``None`` without pipeline parallel."""

    n_mtp_layers: int = 0
    """Number of layers after the first ``n_layers``. Each predicts one token further ahead, in training only."""

    mtp_loss_weight: float = 0.3
    """Factor of the gradients of the mean of their losses."""

    mtp_repeats_embeddings: bool = True
    """Released checkpoints repeat the embedding and the output weights in each of these layers."""

    def __post_init__(self) -> None:
        if self.q_lora_rank < 1:
            raise UsageError(
                "q_lora_rank must be at least 1: the indexer's queries are projected from the query latent"
            )
        if self.index_head_dim < self.qk_rope_head_dim:
            raise UsageError(
                f"index_head_dim is {self.index_head_dim}; it must be at least qk_rope_head_dim, "
                f"{self.qk_rope_head_dim}, the number of its elements that are rotated"
            )
        if not re.fullmatch("(F[FS]*)?", self.index_topk_pattern):
            raise UsageError(
                f"index_topk_pattern is {self.index_topk_pattern!r}; it must start with F and have only the letters F "
                "(a layer with an indexer) and S (a layer that attends to the last indexer's keys)"
            )
        letters = len(self.index_topk_pattern)
        if letters not in (0, self.n_layers):
            raise UsageError(
                f"index_topk_pattern has {letters} letters; it must have one for each of n_layers, {self.n_layers}"
            )
        if self.index_rope not in INDEX_ROPES:
            raise UsageError(f"index_rope is {self.index_rope!r}; it must be one of {', '.join(INDEX_ROPES)}")
        if self.attn_type != "sdpa":
            raise UsageError(
                f"attn_type must be 'sdpa', not {self.attn_type!r}; set dsa.document_mask to mask documents"
            )

    @property
    def context_parallel_elements(self) -> int:
        """Return the elements per token that context parallel exchanges: latent, rotated and indexer keys.

        It is the mean over the layers, of which some may have no indexer.
        """
        indexers = sum(map(self.has_indexer, range(self.n_layers)))
        return self.kv_lora_rank + self.qk_rope_head_dim + self.index_head_dim * indexers // self.n_layers

    def has_indexer(self, layer_id: int) -> bool:
        """Return whether a layer has an indexer. Layers of multi-token prediction have one, as released."""
        return layer_id >= self.n_layers or self.index_topk_pattern[layer_id : layer_id + 1] != "S"

    def indexer_loss_share(self, layer_id: int) -> float:
        """Return the weight of a layer in the loss of the indexer that it uses: 0 if it has no part in it.

        The layers of an indexer have equal weights, which add up to 1. The gradient is then that of one loss, against
        the mean of their attention distributions (arXiv:2603.12201, Proposition 1).
        """
        if not self.indexer_loss:
            return 0.0
        if not self.shared_indexer_loss:
            return float(self.has_indexer(layer_id))
        source = next(layer for layer in range(layer_id, -1, -1) if self.has_indexer(layer))
        return 1 / (1 + sum(1 for _ in takewhile(lambda layer: not self.has_indexer(layer), count(source + 1))))

    def passed_tensors(self, layer_id: int) -> tuple[str, ...]:
        """Return what a layer passes to the next one, by the names of ``SparseAttention.forward``'s arguments.

        These are the selected keys, except in the warm-up, which attends to all, and the tensors of the indexer if
        its loss is shared. They are none if the next layer has an indexer.
        """
        if self.has_indexer(layer_id + 1):
            return ()
        selected = () if self.warmup else ("selected",)
        return selected + (INDEX if self.indexer_loss_share(layer_id + 1) else ())

    def latent_keys(self) -> bool:
        """Return whether attention uses latent keys.

        The warm-up, which attends to all keys, does not: a latent key is three times as wide as one of a head.
        """
        return self.absorb and not self.warmup

    def attended_keys(self) -> int:
        """Return the largest number of keys that a query attends to."""
        return self.seq_len if self.warmup else self.index_topk

    def check_job(self, job_config: JobConfig) -> None:
        """Raise :class:`UsageError` for options of a job that the model does not support, before the start."""
        config = with_all_sections(job_config)
        warmup = config.dsa.stage == "warmup"  # args do not have the job's options yet
        for key in ("tensor_parallel_degree", "context_parallel_degree"):
            if getattr(job_config.parallelism, key) > 1 and not (self.absorb or warmup):
                raise UsageError(f"parallelism.{key} must be 1 for a flavor with absorb=False: it needs latent keys")
        if not config.npu.device_graphs:
            return
        # a layer has arguments or results that a device graph does not take
        mtp_layers, masked = config.mtp.layers, config.dsa.document_mask
        shares = "S" in self.index_topk_pattern
        reasons = {
            "dsa.document_mask = true: the host finds the documents of each batch": masked,
            f"mtp.layers = {mtp_layers}: such a layer returns two tensors": mtp_layers > 0,
            f"model.flavor {job_config.model.flavor!r}: its layers pass selected keys to the next ones": shares,
        }
        for reason, holds in reasons.items():
            if holds:
                raise UsageError(f"npu.device_graphs cannot be combined with {reason}")

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        super().update_from_config(job_config, **kwargs)
        self.seq_len = job_config.training.seq_len
        # TorchTitan skips YaRN up to original_seq_len tokens; the released model always applies it
        self.max_seq_len = max(self.seq_len, self.original_seq_len + 1)
        # set every option unconditionally: TorchTitan reuses the flavor's object for the next job
        config = with_all_sections(job_config)
        dsa, mtp = config.dsa, config.mtp
        self.indexer_loss, self.indexer_loss_weight = dsa.indexer_loss, dsa.indexer_loss_weight
        self.shared_indexer_loss = dsa.shared_indexer_loss
        self.warmup = dsa.stage == "warmup"
        self.takes_attention_masks = dsa.document_mask
        self.n_mtp_layers, self.mtp_loss_weight = mtp.layers, mtp.loss_weight
        parallelism, batch = job_config.parallelism, job_config.training.local_batch_size
        piped = parallelism.pipeline_parallel_degree > 1
        self.microbatches = batch // parallelism.pipeline_parallel_microbatch_size if piped else None

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the number of parameters and the training FLOPs per token, by TorchTitan's rules.

        Those rules count 6 FLOPs for each parameter that a token uses, 2 of them forward, and 6 for each product of
        attention. They ignore recomputation and causal masks. For this model:

        - a query attends to at most ``attended_keys`` keys, in the width that is computed, absorbed or not (absorbing
          costs as much as the projection by ``wkv_b`` that it replaces);
        - the indexer scores all keys forward, and only the selected ones backward, there for each layer that uses it;
        - the output's weights are used once for each predicted token.
        """
        nparams, flops = get_moe_model_nparams_and_flops(self, model, head_dims=0, seq_len=seq_len)
        keys = min(self.attended_keys(), seq_len)
        if self.latent_keys():
            qk_head_dim, v_head_dim = self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank
        else:
            qk_head_dim, v_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim
        attention = 6 * self.n_heads * (qk_head_dim + v_head_dim) * keys
        layers = range(self.n_layers + self.n_mtp_layers)
        scored = sum(2 * seq_len for layer in layers if self.has_indexer(layer))
        scored += sum(4 * keys for layer in layers if self.indexer_loss_share(layer))
        flops += len(layers) * attention + self.index_n_heads * (self.index_head_dim + 1) * scored
        return nparams, flops + 6 * self.n_mtp_layers * self.dim * self.vocab_size
