"""Sizes and options of DeepSeek-V3.2: those of DeepSeek-V3, the indexer's, and those of multi-token prediction."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.models.deepseek_v3.model.args import DeepSeekV3ModelArgs
from torchtitan.models.utils import get_moe_model_nparams_and_flops

from torchtitan_npu.config.job_config import Dsa, dsa_options, mtp_options
from torchtitan_npu.errors import UsageError


@dataclass
class DeepSeekV32ModelArgs(DeepSeekV3ModelArgs):
    context_parallel: ClassVar[str] = "torchtitan_npu.models.deepseek_v32.context_parallel:DSAContextParallel"
    """How its attention communicates, where the job does not say otherwise."""

    config_sections: ClassVar[tuple[str, ...]] = ("dsa", "mtp")
    """Sections of the job's config that apply to this model."""

    norm_eps: float = 1e-6
    """As released; TorchTitan's deepseek_v3 has 1e-5."""

    q_lora_rank: int = 1536
    """Width of the latent vector that queries are made of, the indexer's too."""

    index_n_heads: int = 64
    """Heads of the indexer, which chooses the keys that a query attends to."""

    index_head_dim: int = 128
    """Width of these heads; the first ``qk_rope_head_dim`` of it is rotated."""

    index_topk: int = 2048
    """Keys that a query attends to: all it may see, where they are fewer."""

    absorb: bool = True
    """Attend in the space of the latent keys, one head of them for all queries, instead of with keys a head."""

    indexer_loss: bool = True
    """Whether the indexer learns; otherwise it is frozen."""

    indexer_loss_weight: float = 1.0
    """What the gradients of its loss are multiplied by."""

    seq_len: int = 4096
    """Tokens of a sequence, as the job has them; ``max_seq_len`` is for how many there are angles."""

    warmup: bool = False
    """Only the indexer learns, from attention to all keys; otherwise all do, from attention to those it chooses."""

    microbatches: int | None = None
    """Into how many a pipeline splits a batch; none without a pipeline."""

    n_mtp_layers: int = 0
    """Layers after the ``n_layers``, each of which predicts one token further ahead in training."""

    mtp_loss_weight: float = 0.3
    """What the gradients of their losses' mean are multiplied by."""

    def __post_init__(self) -> None:
        if self.q_lora_rank < 1:
            raise UsageError("q_lora_rank must be at least 1: the indexer's queries are made of the query latent")
        if self.index_head_dim < self.qk_rope_head_dim:
            raise UsageError(
                f"index_head_dim is {self.index_head_dim}; it must be at least qk_rope_head_dim, "
                f"{self.qk_rope_head_dim}, which of it is rotated"
            )
        if self.attn_type != "sdpa":
            raise UsageError(
                f"attn_type must be 'sdpa', not {self.attn_type!r}; documents are the job's dsa.document_mask"
            )

    def as_titan_takes_it(self) -> DeepSeekV32ModelArgs:
        """For TorchTitan's modules, which know no documents without flex attention."""
        args = copy.copy(self)
        args.attn_type = "sdpa"
        return args

    def attended_keys(self) -> int:
        """To how many keys a query attends, at most."""
        return self.seq_len if self.warmup else self.index_topk

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        for key in ("tensor_parallel_degree", "context_parallel_degree"):
            if getattr(job_config.parallelism, key) > 1 and not self.absorb:
                raise UsageError(f"parallelism.{key} must be 1 for a flavor with absorb=False: latent keys are shared")
        super().update_from_config(job_config, **kwargs)
        self.seq_len = job_config.training.seq_len
        # TorchTitan leaves YaRN out of models for no more than original_seq_len tokens; the release never does
        self.max_seq_len = max(self.seq_len, self.original_seq_len + 1)
        self._choose_stage(dsa_options(job_config), job_config)
        mtp = mtp_options(job_config)
        self.n_mtp_layers, self.mtp_loss_weight = mtp.layers, mtp.loss_weight

    def _choose_stage(self, dsa: Dsa, job_config: JobConfig) -> None:
        self.indexer_loss, self.indexer_loss_weight = dsa.indexer_loss, dsa.indexer_loss_weight
        self.warmup = dsa.stage == "warmup"
        # every option is set, either way: TorchTitan hands the flavor's own object to one job after another
        parallelism, batch = job_config.parallelism, job_config.training.local_batch_size
        piped = parallelism.pipeline_parallel_degree > 1
        self.microbatches = batch // parallelism.pipeline_parallel_microbatch_size if piped else None
        # with "varlen" TorchTitan asks the model for the documents (get_attention_masks)
        self.attn_type = "varlen" if dsa.document_mask else "sdpa"

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """All parameters, and the floating-point operations that training takes for a token, by TorchTitan's rules.

        Those are 6 for each parameter that a token meets, 2 of them forward; 6 for each pair of numbers that attention
        multiplies; nothing for what is recomputed; and causal attention counts as if queries saw later keys too. Here

        - a query attends to no more than ``attended_keys``, in the width that is computed, absorbed or not (absorbing
          itself is as much work as the weights ``wkv_b`` that it is done with);
        - the indexer scores all keys, in the backward pass only those that were attended to;
        - the output's weights are met once for each token that is predicted.
        """
        nparams, flops = get_moe_model_nparams_and_flops(self, model, head_dims=0, seq_len=seq_len)
        keys = min(self.attended_keys(), seq_len)
        if self.absorb:
            qk_head_dim, v_head_dim = self.kv_lora_rank + self.qk_rope_head_dim, self.kv_lora_rank
        else:
            qk_head_dim, v_head_dim = self.qk_nope_head_dim + self.qk_rope_head_dim, self.v_head_dim
        attention = 6 * self.n_heads * (qk_head_dim + v_head_dim) * keys
        scored = 2 * seq_len + (4 * keys if self.indexer_loss else 0)
        indexer = self.index_n_heads * (self.index_head_dim + 1) * scored
        layers = self.n_layers + self.n_mtp_layers
        return nparams, flops + layers * (attention + indexer) + 6 * self.n_mtp_layers * self.dim * self.vocab_size
