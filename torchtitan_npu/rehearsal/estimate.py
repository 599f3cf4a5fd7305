"""A quick estimate of a layout's memory and time, to choose which layouts are worth rehearsing.

Weights, gradients, states and gathered parameters are arithmetic over the model's parameters. What a layer keeps and
needs for a token comes from rehearsals of the model cut to a few layers. A rehearsal corrects the estimate: it leaves
out what tensor parallel does not split, and that layers differ.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.models.moe.moe import MoE
from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.config import JobConfig
from torchtitan_npu.preflight import build_on_meta
from torchtitan_npu.rehearsal.job import DEGREES, degrees
from torchtitan_npu.rehearsal.rank import Rehearsal, rehearse_rank
from torchtitan_npu.rehearsal.rates import Rates, bubble

ACTIVATIONS = ("activations", "backward pass", "other")
CUTS = (2, 4)
"""Layers of the cut models; what two of them differ in is a layer's."""


@dataclass(frozen=True)
class Size:
    """Parameters: those of experts, and the others."""

    dense: int
    experts: int

    def __add__(self, other: Size) -> Size:
        return Size(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


def sizes(model: nn.Module) -> dict[str, Size]:
    """By module of a pipeline stage (``tok_embeddings``, ``layers.0``, ...): its parameters."""
    found: dict[str, Size] = {}
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        module = ".".join(parts[:2]) if parts[0] == "layers" else parts[0]
        experts = parameter.numel() if ".experts." in name else 0
        found[module] = found.get(module, Size(0, 0)) + Size(parameter.numel() - experts, experts)
    return found


@dataclass
class Estimator:
    """For layouts of one job."""

    config: JobConfig
    parameters: dict[str, Size]
    moe_layers: int
    base: list[Rehearsal]
    """Of the cut models, in the job's own layout without its pipeline."""
    tokens: int
    """That a rank of them has, at a time."""
    args: Any

    @classmethod
    def of(cls, config: JobConfig) -> Estimator:
        model = build_on_meta(config)
        small = copy.deepcopy(config)
        small.parallelism.pipeline_parallel_degree = 1
        small.parallelism.fsdp_reshard_after_forward = "always"
        small.training.local_batch_size = _microbatch(config)
        small.training.global_batch_size = -1
        p = small.parallelism
        if p.data_parallel_shard_degree == -1:
            p.data_parallel_shard_degree = max(1, p.expert_parallel_degree // p.tensor_parallel_degree)
        ranks = p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree
        base = [
            rehearse_rank(small, ranks * p.data_parallel_replicate_degree, 0, model_args=cut(config, n)) for n in CUTS
        ]
        tokens = _tokens(small, degrees(small))
        moes = sum(isinstance(module, MoE) for module in model.modules())
        return cls(config, sizes(model), moes, base, tokens, model.model_args)

    def stages(self, pp: int) -> list[list[str]]:
        p = self.config.parallelism
        return generate_llm_fqn_per_model_part(
            pp,
            self.args.n_layers,
            p.pipeline_parallel_first_stage_less_layers,
            p.pipeline_parallel_last_stage_less_layers,
        )

    def memory(self, layout: dict[str, int], ranks: int) -> list[int]:
        """Bytes of a rank of each stage; ``ranks`` share a stage's parameters."""
        tokens, saved, needed = _tokens(self.config, layout), *self._activations()
        scale = tokens / self.tokens
        found = []
        for stage, modules in enumerate(self.stages(layout["pp"])):
            size = sum((self.parameters[name] for name in modules), Size(0, 0))
            states = 0 if self.config.optimizer.swap else 8
            total = size.total / ranks * (4 + 4 + states)
            # of the largest layer: gathered in bfloat16 and its buffer, the next one's too, its gradient in both dtypes
            gathered = [self._gathered(self.parameters[name], layout) for name in modules]
            total += 14 * max(gathered)
            microbatch = self.config.parallelism.pipeline_parallel_microbatch_size
            if layout["pp"] > 1 and self.config.training.local_batch_size > microbatch:  # a stage keeps both in between
                total += (2 + 4) * sum(gathered)
            layers = sum(name.startswith("layers.") for name in modules)
            total += scale * (needed + saved * layers * self._under_way(layout["pp"], stage))
            found.append(int(total))
        return found

    def seconds_per_token(self, layout: dict[str, int], rates: Rates) -> float:
        """Of a token of the job's, at stated rates, in the longest stage."""
        tp, ep, cp = layout["tp"], layout["ep"], layout["cp"]
        tokens = _tokens(self.config, layout)
        row = tokens * self.args.dim * 2
        flops = (self.base[1].flops - self.base[0].flops) / (CUTS[1] - CUTS[0]) * tokens / self.tokens
        longest = 0.0
        for modules in self.stages(layout["pp"]):
            layers = sum(name.startswith("layers.") for name in modules)
            gathered = sum(self._gathered(self.parameters[name], layout) for name in modules)
            top_k = getattr(getattr(self.args, "moe_args", None), "top_k", 0)
            sent = {
                "fsdp": gathered * (2 + 2 + 4),
                "tp": layers * 12 * row * (tp - 1),
                "ep": layers * 6 * top_k * row * (ep - 1) / ep,
                "cp": layers * 3 * row * (cp - 1) * tp / 16,
                "pp": 2 * row * (layout["pp"] > 1),
            }
            batches = self.config.training.local_batch_size // _microbatch(self.config)
            times = sum(bytes / rates.of(group) / 1e9 for group, bytes in sent.items())
            longest = max(longest, batches * (times + layers * flops / rates.tflops / 1e12))
        changed = with_layout(self.config, layout)
        trained = self.config.training.local_batch_size * self.config.training.seq_len * layout["dp_shard"]
        return longest * bubble(changed) / trained

    def _gathered(self, size: Size, layout: dict[str, int]) -> float:
        return size.dense / layout["tp"] + size.experts / layout["ep"]

    def _activations(self) -> tuple[float, float]:
        """Bytes that a layer keeps for the backward pass, and what there is besides at the peak."""
        two, four = (sum(one.at_peak.get(name, 0) for name in ACTIVATIONS) for one in self.base)
        saved = max(0.0, (four - two) / (CUTS[1] - CUTS[0]))
        return saved, two - CUTS[0] * saved

    def _under_way(self, pp: int, stage: int) -> int:
        """Batches whose activations a stage holds at a time."""
        batches = self.config.training.local_batch_size // _microbatch(self.config)
        if pp == 1 or self.config.parallelism.pipeline_parallel_schedule == "GPipe":
            return batches if pp > 1 else 1
        return min(batches, pp - stage)


def cut(config: JobConfig, layers: int) -> Any:
    """The flavor's arguments with so few layers, one of them dense where there are two kinds."""
    args: Any = copy.deepcopy(get_train_spec(config.model.name).model_args[config.model.flavor])
    args.n_layers = layers
    if hasattr(args, "n_dense_layers"):
        args.n_dense_layers = 1
    return args


def with_layout(config: JobConfig, layout: dict[str, int]) -> JobConfig:
    changed = copy.deepcopy(config)
    for name, degree in layout.items():
        setattr(changed.parallelism, DEGREES[name], degree)
    return changed


def _microbatch(config: JobConfig) -> int:
    """Sequences that a rank computes at a time."""
    p = config.parallelism
    pipelined = p.pipeline_parallel_degree > 1
    return p.pipeline_parallel_microbatch_size if pipelined else config.training.local_batch_size


def _tokens(config: JobConfig, layout: dict[str, int]) -> int:
    """Rows of hidden states that a rank has between its layers."""
    return _microbatch(config) * config.training.seq_len // (layout["cp"] * layout["tp"])
