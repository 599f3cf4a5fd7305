"""A quick estimate of a layout's memory and time, to choose which layouts are worth rehearsing.

Weights, gradients, states and gathered parameters are arithmetic over the model's parameters. What a layer keeps and
needs for a token comes from rehearsals of the model cut to a few layers, in the layout of the job. A rehearsal corrects
the estimate: with other degrees of tensor parallel the share of what it does not split is another, and layers differ.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.planner.estimated_traffic import sent
from torchtitan_npu.planner.job import stated_load
from torchtitan_npu.planner.layout import degrees, with_layout, world_size
from torchtitan_npu.planner.parameters import Size, model_args
from torchtitan_npu.planner.pipeline_schedule import bubble, under_way
from torchtitan_npu.planner.rank import Rehearsal, rehearse_rank
from torchtitan_npu.planner.rank_share import (
    communicators,
    computed_again,
    element_sizes,
    local_tokens,
    microbatch,
    microbatches,
    on_a_rank,
    standing_bytes,
    uses_fsdp,
)
from torchtitan_npu.planner.rates import Rates
from torchtitan_npu.planner.replicated import sizes_under_tp
from torchtitan_npu.planner.traffic import hccl_buffers

ACTIVATIONS = ("activations", "backward pass", "other")
CUTS = (2, 4)
"""Layers of the cut models; what two of them differ in is a layer's."""
ROWS_AT_WORK = 6
"""Rows of hidden states that there are at a time for each token that an expert has: what comes in and goes out, the
products between them, and gradients. Only for what a load that is not balanced adds."""


@dataclass
class Estimate:
    """Of one layout; a number for each rank of the pipeline."""

    memory: list[int]
    """Bytes at the peak."""
    seconds: list[float]
    """Of a token of the job's, at stated rates."""


@dataclass
class Estimator:
    """For layouts of one job."""

    parameters: dict[str, Size]
    base: list[Rehearsal]
    """Of the cut models, in the job's own layout without its pipeline and its replicas, with a balanced load."""
    tokens: int
    """That a rank of them has, at a time."""
    whole_gradient: int
    """Bytes of the largest layer's, which is among what the backward pass of ``base`` makes on its way."""
    args: Any

    @classmethod
    def of(cls, config: JobConfig) -> Estimator:
        """``config`` has all its degrees."""
        args = copy.deepcopy(model_args(config))
        args.update_from_config(config)
        parameters = sizes_under_tp(config)
        own = degrees(config)
        # replicas hold and compute what shards do, and those of a model with nothing else are not rehearsed
        small = with_layout(config, {"pp": 1, "dp_replicate": 1, "dp_shard": own["dp_shard"] * own["dp_replicate"]})
        small.parallelism.fsdp_reshard_after_forward = "always"
        small.training.local_batch_size = microbatch(config)
        small.training.global_batch_size = -1
        base = [rehearse_rank(small, world_size(small), 0, model_args=cut(config, n)) for n in CUTS]
        largest = max(on_a_rank(size, small).total for size in parameters.values()) if uses_fsdp(small) else 0
        return cls(parameters, base, local_tokens(small), element_sizes(small)[0] * largest, args)

    @property
    def experts(self) -> int:
        """How many a layer has."""
        moe = getattr(self.args, "moe_args", None)
        return moe.num_experts if moe and any(size.experts for size in self.parameters.values()) else 0

    @property
    def balances_experts(self) -> bool:
        return self.experts > 0 and bool(self.args.moe_args.load_balance_coeff)

    def of_layout(self, config: JobConfig, parts: list[list[str]], rates: Rates, expert_load: str) -> Estimate:
        """``parts``: the modules of each rank of the pipeline."""
        layout = degrees(config)
        busier = self._busier(config, expert_load)
        memory = [self._memory(config, modules, stage, busier) for stage, modules in enumerate(parts)]
        trained = config.training.local_batch_size * config.training.seq_len
        trained *= layout["dp_shard"] * layout["dp_replicate"]
        batches = [self._seconds(config, modules, stage, rates, busier) for stage, modules in enumerate(parts)]
        seconds = [bubble(config) * one / trained for one in batches]
        return Estimate(memory, seconds)

    def _memory(self, config: JobConfig, modules: list[str], stage: int, busier: float) -> int:
        layout = degrees(config)
        saved, needed = self._activations()
        size = sum((self.parameters[name] for name in modules), Size(0, 0))
        shards = layout["dp_shard"] * layout["cp"]
        split = size.total - size.whole
        total = (split / layout["tp"] + size.whole) / shards * standing_bytes(config)
        total += self._gathered(config, modules)
        layers = sum(name.startswith("layers.") for name in modules)
        scale = local_tokens(config) / self.tokens
        total += scale * (needed + saved * layers * under_way(config, stage))
        total += hccl_buffers(communicators(config, self.balances_experts))
        total += (busier - 1) * ROWS_AT_WORK * self._routed(config) * self.args.dim * 2
        return int(total)

    def _gathered(self, config: JobConfig, modules: list[str]) -> float:
        """Bytes of gathered parameters and of whole gradients at the peak: of a layer, and of the next one its
        parameters; of all layers where they are kept, as a pipeline does."""
        if not uses_fsdp(config):
            return 0
        parameter, gradient = element_sizes(config)
        sizes = [on_a_rank(self.parameters[name], config).total for name in modules]
        several = microbatches(config) > 1
        policy = config.parallelism.fsdp_reshard_after_forward
        pipelined = config.parallelism.pipeline_parallel_degree > 1
        kept = several or policy != "always" if pipelined else policy == "never"
        if not kept:
            return 3 * parameter * max(sizes)
        return parameter * sum(sizes) + (gradient * sum(sizes) if several else parameter * max(sizes))

    def _seconds(self, config: JobConfig, modules: list[str], stage: int, rates: Rates, busier: float) -> float:
        """Of a batch."""
        tokens = local_tokens(config)
        two, four = (one.flops for one in self.base)
        of_layer = (four - two) / (CUTS[1] - CUTS[0])
        layers = sum(name.startswith("layers.") for name in modules)
        flops = of_layer * layers + (two - CUTS[0] * of_layer) * ("output" in modules)
        flops *= tokens / self.tokens
        # the products of experts, forward, twice backward, and perhaps forward again
        in_order = [name for name in modules if name.startswith("layers.")]
        passes = sum(
            3 + computed_again(config, n)[0] for n, name in enumerate(in_order) if self.parameters[name].experts
        )
        expert = max(size.experts for size in self.parameters.values()) / max(1, self.experts)
        flops += (busier - 1) * passes * 2 * expert * self._routed(config)
        times = microbatches(config) * flops / rates.tflops / 1e12
        bytes = sent(config, self.parameters, self.args, modules, stage, busier)
        return times + sum(count / rates.of(group) / 1e9 for group, count in bytes.items())

    def _routed(self, config: JobConfig) -> int:
        """Rows that a rank's experts have with a balanced load, of a layer and a microbatch."""
        return local_tokens(config) * self.args.moe_args.top_k if self.experts else 0

    def _busier(self, config: JobConfig, expert_load: str) -> float:
        """By which factor the busiest rank's experts have more than with a balanced load."""
        ep = config.parallelism.expert_parallel_degree
        if ep == 1 or not self.experts:
            return 1.0  # all experts are on each rank, whichever tokens choose
        choices = self.experts * self.args.moe_args.top_k * 1000
        busiest = sum(stated_load(expert_load, config)(choices, self.experts)[: self.experts // ep])
        return busiest / (choices / ep)

    def _activations(self) -> tuple[float, float]:
        """Bytes that a layer keeps for the backward pass, and what there is besides at the peak but for gradients."""
        two, four = (sum(one.at_peak.get(name, 0) for name in ACTIVATIONS) - self.whole_gradient for one in self.base)
        saved = max(0.0, (four - two) / (CUTS[1] - CUTS[0]))
        return saved, two - CUTS[0] * saved


def cut(config: JobConfig, layers: int) -> Any:
    """The flavor's arguments with so few layers, one of them dense where there are two kinds."""
    args = copy.deepcopy(model_args(config))
    args.n_layers = layers
    if hasattr(args, "n_dense_layers"):
        args.n_dense_layers = min(1, args.n_dense_layers)
    return args
