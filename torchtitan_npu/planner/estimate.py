"""An estimate of a layout's memory and time, to choose which layouts to dry-run.

Weights, gradients, states and gathered parameters are arithmetic over the model's parameters. Activations and FLOPs per
token come from dry runs of the model with two and four layers, in the job's own layout. A dry run of the layout itself
corrects the estimate: another TP degree changes the proportion of replicated work, and layers differ.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.titan_sections import hccl_buffers
from torchtitan_npu.planner.dry_run import DryRun, dry_run_rank
from torchtitan_npu.planner.dry_run_ranks import assumed_load
from torchtitan_npu.planner.estimated_traffic import estimated_traffic
from torchtitan_npu.planner.layout import degrees, with_layout, world_size
from torchtitan_npu.planner.parameters import Size, model_args
from torchtitan_npu.planner.per_rank import (
    bytes_between_steps,
    communicators,
    element_sizes,
    local_tokens,
    microbatch,
    microbatches,
    recomputed,
    unsharded_size,
    uses_fsdp,
)
from torchtitan_npu.planner.pipeline_schedule import bubble, microbatches_in_flight
from torchtitan_npu.planner.replicated_parameters import sizes_under_tp
from torchtitan_npu.planner.step_time import Rates
from torchtitan_npu.planner.traffic import hccl_memory

ACTIVATIONS = ("activations", "backward pass", "operator workspaces", "other")
LAYERS = (2, 4)
"""Layers of the truncated models. Half of the difference between them is one layer's."""
ROWS_PER_ROUTED_TOKEN = 6
"""Rows of hidden states per token in an expert: input, output, the products in between, gradients. Used only for the
tokens that an unbalanced load adds."""


@dataclass
class Estimate:
    """Memory and time of one layout, a number for each pipeline rank."""

    memory: list[int]
    """Bytes at the peak."""
    seconds: list[float]
    """Seconds per token of the job, at the assumed rates."""


@dataclass
class Estimator:
    """Estimates layouts of one job."""

    parameters: dict[str, Size]
    base: list[DryRun]
    """Dry runs of the truncated models in the job's layout, without pipeline and replicas, with a balanced load."""
    tokens: int
    """Tokens per rank of these dry runs."""
    unsharded_gradient: int
    """Bytes of the largest layer's gradient, which ``base`` counts in the backward pass."""
    args: Any

    @classmethod
    def of(cls, config: JobConfig) -> Estimator:
        """Dry-run the truncated models of a job whose degrees are all set."""
        args = copy.deepcopy(model_args(config))
        args.update_from_config(config)
        parameters = sizes_under_tp(config)
        own = degrees(config)
        # Replicas hold and compute what shards do, and a dry run does not support replicas alone.
        small = with_layout(config, {"pp": 1, "dp_replicate": 1, "dp_shard": own["dp_shard"] * own["dp_replicate"]})
        small.parallelism.fsdp_reshard_after_forward = "always"
        small.training.local_batch_size = microbatch(config)
        small.training.global_batch_size = -1
        base = [dry_run_rank(small, world_size(small), 0, model_args=truncated_args(config, n)) for n in LAYERS]
        largest = max(unsharded_size(size, small).total for size in parameters.values()) if uses_fsdp(small) else 0
        return cls(parameters, base, local_tokens(small), element_sizes(small)[0] * largest, args)

    @property
    def experts(self) -> int:
        """Return the number of experts per layer."""
        moe = getattr(self.args, "moe_args", None)
        return moe.num_experts if moe and any(size.experts for size in self.parameters.values()) else 0

    @property
    def balances_experts(self) -> bool:
        return self.experts > 0 and bool(self.args.moe_args.load_balance_coeff)

    def of_layout(self, config: JobConfig, parts: list[list[str]], rates: Rates, expert_load: str) -> Estimate:
        """Estimate the layout of ``config``; ``parts`` are the modules of each pipeline rank."""
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
        split = size.total - size.replicated
        total = (split / layout["tp"] + size.replicated) / shards * bytes_between_steps(config)
        total += self._gathered(config, modules)
        layers = sum(name.startswith("layers.") for name in modules)
        scale = local_tokens(config) / self.tokens
        total += self.base[-1].kept_workspace  # most of it does not depend on the number of tokens
        total += scale * (needed + saved * layers * microbatches_in_flight(config, stage))
        total += hccl_memory(communicators(config, self.balances_experts), hccl_buffers(config.comm))
        total += (busier - 1) * ROWS_PER_ROUTED_TOKEN * self._routed(config) * self.args.dim * 2
        return int(total)

    def _gathered(self, config: JobConfig, modules: list[str]) -> float:
        """Return the bytes of gathered parameters and unsharded gradients at the peak.

        They are those of one layer and the parameters of the next one; those of all layers where FSDP keeps them.
        """
        if not uses_fsdp(config):
            return 0
        parameter, gradient = element_sizes(config)
        sizes = [unsharded_size(self.parameters[name], config).total for name in modules]
        several = microbatches(config) > 1
        policy = config.parallelism.fsdp_reshard_after_forward
        pipelined = config.parallelism.pipeline_parallel_degree > 1
        kept = several or policy != "always" if pipelined else policy == "never"
        if not kept:
            return 3 * parameter * max(sizes)
        return parameter * sum(sizes) + (gradient * sum(sizes) if several else parameter * max(sizes))

    def _seconds(self, config: JobConfig, modules: list[str], stage: int, rates: Rates, busier: float) -> float:
        """Return the seconds per batch of a pipeline rank."""
        tokens = local_tokens(config)
        two, four = (one.flops for one in self.base)
        per_layer = (four - two) / (LAYERS[1] - LAYERS[0])
        layers = sum(name.startswith("layers.") for name in modules)
        flops = per_layer * layers + (two - LAYERS[0] * per_layer) * ("output" in modules)
        flops *= tokens / self.tokens
        # The products of experts run once forward, twice backward, and once more if they are recomputed.
        own_layers = [name for name in modules if name.startswith("layers.")]
        passes = sum(3 + recomputed(config, n)[0] for n, name in enumerate(own_layers) if self.parameters[name].experts)
        expert = max(size.experts for size in self.parameters.values()) / max(1, self.experts)
        flops += (busier - 1) * passes * 2 * expert * self._routed(config)
        times = microbatches(config) * flops / rates.tflops / 1e12
        bytes = estimated_traffic(config, self.parameters, self.args, modules, stage, busier)
        return times + sum(count / rates.of(group) / 1e9 for group, count in bytes.items())

    def _routed(self, config: JobConfig) -> int:
        """Return the rows of a rank's experts with a balanced load, per layer and microbatch."""
        return local_tokens(config) * self.args.moe_args.top_k if self.experts else 0

    def _busier(self, config: JobConfig, expert_load: str) -> float:
        """Return the load of the busiest rank's experts relative to a balanced load."""
        ep = config.parallelism.expert_parallel_degree
        if ep == 1 or not self.experts:
            return 1.0  # every rank has all experts
        choices = self.experts * self.args.moe_args.top_k * 1000
        busiest = sum(assumed_load(expert_load, config)(choices, self.experts)[: self.experts // ep])
        return busiest / (choices / ep)

    def _activations(self) -> tuple[float, float]:
        """Return the bytes that a layer keeps for the backward pass, and the other activations at the peak."""
        two, four = (
            sum(one.at_peak.get(name, 0) for name in ACTIVATIONS) - self.unsharded_gradient for one in self.base
        )
        saved = max(0.0, (four - two) / (LAYERS[1] - LAYERS[0]))
        return saved, two - LAYERS[0] * saved


def truncated_args(config: JobConfig, layers: int) -> Any:
    """Return the flavor's arguments with ``layers`` layers, at most one of them dense in a MoE model."""
    args = copy.deepcopy(model_args(config))
    args.n_layers = layers
    if hasattr(args, "n_dense_layers"):
        args.n_dense_layers = min(1, args.n_dense_layers)
    return args
