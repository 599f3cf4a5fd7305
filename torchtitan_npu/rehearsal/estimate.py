"""A quick estimate of a layout's memory and time, to choose which layouts are worth rehearsing.

Weights, gradients, states and gathered parameters are arithmetic over the model's parameters. What a layer keeps and
needs for a token comes from rehearsals of the model cut to a few layers. A rehearsal corrects the estimate: it leaves
out what tensor parallel does not split, and that layers differ.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torchtitan.protocols.train_spec import get_train_spec

from torchtitan_npu.config import JobConfig
from torchtitan_npu.preflight import build_on_meta
from torchtitan_npu.rehearsal.job import DEGREES, degrees, stated_load
from torchtitan_npu.rehearsal.parameters import Size, sizes
from torchtitan_npu.rehearsal.rank import Rehearsal, rehearse_rank
from torchtitan_npu.rehearsal.rates import Rates, bubble
from torchtitan_npu.rehearsal.traffic import hccl_buffers

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
    """Of the cut models, in the job's own layout without its pipeline, with a balanced load."""
    tokens: int
    """That a rank of them has, at a time."""
    args: Any

    @classmethod
    def of(cls, config: JobConfig) -> Estimator:
        """``config`` has all its degrees."""
        model = build_on_meta(config)
        small = with_layout(config, {"pp": 1})
        small.parallelism.fsdp_reshard_after_forward = "always"
        small.training.local_batch_size = _microbatch(config)
        small.training.global_batch_size = -1
        p = small.parallelism
        ranks = p.data_parallel_shard_degree * p.context_parallel_degree * p.tensor_parallel_degree
        base = [
            rehearse_rank(small, ranks * p.data_parallel_replicate_degree, 0, model_args=cut(config, n)) for n in CUTS
        ]
        return cls(sizes(model), base, _tokens(small), model.model_args)

    @property
    def experts(self) -> int:
        """How many a layer has."""
        moe = getattr(self.args, "moe_args", None)
        return moe.num_experts if moe and any(size.experts for size in self.parameters.values()) else 0

    def of_layout(self, config: JobConfig, parts: list[list[str]], rates: Rates, expert_load: str) -> Estimate:
        """``parts``: the modules of each rank of the pipeline."""
        layout = degrees(config)
        busier = self._busier(config, expert_load)
        memory = [self._memory(config, modules, stage, busier) for stage, modules in enumerate(parts)]
        trained = config.training.local_batch_size * config.training.seq_len
        trained *= layout["dp_shard"] * layout["dp_replicate"]
        seconds = [bubble(config) * self._seconds(config, modules, rates, busier) / trained for modules in parts]
        return Estimate(memory, seconds)

    def _memory(self, config: JobConfig, modules: list[str], stage: int, busier: float) -> int:
        layout, p = degrees(config), config.parallelism
        saved, needed = self._activations()
        size = sum((self.parameters[name] for name in modules), Size(0, 0))
        states = 0 if config.optimizer.swap else 8
        total = size.total / (layout["dp_shard"] * layout["cp"] * layout["tp"]) * (4 + 4 + states)
        # of the largest layer: gathered in bfloat16 and its buffer, the next one's too, its gradient in both dtypes
        gathered = [_gathered(self.parameters[name], layout) for name in modules]
        total += 14 * max(gathered)
        pp = layout["pp"]
        if pp > 1 and config.training.local_batch_size > p.pipeline_parallel_microbatch_size:  # kept in between
            total += (2 + 4) * sum(gathered)
        layers = sum(name.startswith("layers.") for name in modules)
        scale = _tokens(config) / self.tokens
        total += scale * (needed + saved * layers * _under_way(config, stage))
        total += hccl_buffers(_communicators(config))
        total += (busier - 1) * ROWS_AT_WORK * self._routed(config) * self.args.dim * 2
        return int(total)

    def _seconds(self, config: JobConfig, modules: list[str], rates: Rates, busier: float) -> float:
        layout, tokens = degrees(config), _tokens(config)
        tp, ep, cp = layout["tp"], layout["ep"], layout["cp"]
        row = tokens * self.args.dim * 2
        two, four = (one.flops for one in self.base)
        of_layer = (four - two) / (CUTS[1] - CUTS[0])
        layers = sum(name.startswith("layers.") for name in modules)
        moes = sum(self.parameters[name].experts > 0 for name in modules)
        flops = of_layer * layers + (two - CUTS[0] * of_layer) * ("output" in modules)
        flops *= tokens / self.tokens
        expert = max(size.experts for size in self.parameters.values()) / max(1, self.experts)
        passes = 4 if config.activation_checkpoint.mode == "full" else 3
        flops += (busier - 1) * moes * passes * 2 * expert * self._routed(config)
        gathered = sum(_gathered(self.parameters[name], layout) for name in modules)
        routed = self._routed(config) * self.args.dim * 2
        sent = {
            "fsdp": gathered * (2 + 2 + 4),
            "tp": layers * 12 * row * (tp - 1),
            "ep": moes * 6 * busier * routed * (ep - 1) / ep,
            "cp": layers * 3 * row * (cp - 1) * tp / 16,
            "pp": 2 * row * (layout["pp"] > 1),
        }
        times = sum(bytes / rates.of(group) / 1e9 for group, bytes in sent.items())
        return _microbatches(config) * (times + flops / rates.tflops / 1e12)

    def _routed(self, config: JobConfig) -> int:
        """Rows that a rank's experts have with a balanced load, of a layer and a microbatch."""
        return _tokens(config) * self.args.moe_args.top_k if self.experts else 0

    def _busier(self, config: JobConfig, expert_load: str) -> float:
        """By which factor the busiest rank's experts have more than with a balanced load."""
        ep = config.parallelism.expert_parallel_degree
        if ep == 1 or not self.experts:
            return 1.0  # all experts are on each rank, whichever tokens choose
        choices = self.experts * self.args.moe_args.top_k * 1000
        busiest = sum(stated_load(expert_load, config)(choices, self.experts)[: self.experts // ep])
        return busiest / (choices / ep)

    def _activations(self) -> tuple[float, float]:
        """Bytes that a layer keeps for the backward pass, and what there is besides at the peak."""
        two, four = (sum(one.at_peak.get(name, 0) for name in ACTIVATIONS) for one in self.base)
        saved = max(0.0, (four - two) / (CUTS[1] - CUTS[0]))
        return saved, two - CUTS[0] * saved


def cut(config: JobConfig, layers: int) -> Any:
    """The flavor's arguments with so few layers, one of them dense where there are two kinds."""
    args: Any = copy.deepcopy(get_train_spec(config.model.name).model_args[config.model.flavor])
    args.n_layers = layers
    if hasattr(args, "n_dense_layers"):
        args.n_dense_layers = min(1, args.n_dense_layers)
    return args


def with_layout(config: JobConfig, layout: dict[str, int]) -> JobConfig:
    """``config`` with these degrees; where it says which layers are where, that is for its own degrees only."""
    changed = copy.deepcopy(config)
    p = changed.parallelism
    for name, degree in layout.items():
        setattr(p, DEGREES[name], degree)
    if p.expert_tensor_parallel_degree > 1:  # 1, or as much as the tensor's
        p.expert_tensor_parallel_degree = p.tensor_parallel_degree
    if p.pipeline_parallel_degree != config.parallelism.pipeline_parallel_degree:
        p.module_fqns_per_model_part = p.pipeline_parallel_layers_per_stage = None
        # TorchTitan's defaults: the embedding and the output count as a layer each
        p.pipeline_parallel_first_stage_less_layers = p.pipeline_parallel_last_stage_less_layers = 1
    return changed


def _communicators(config: JobConfig) -> int:
    """Groups of more than one rank that a step uses: one a mesh dimension."""
    layout = degrees(config)
    fsdp = layout["dp_shard"] * layout["cp"]
    sizes = [fsdp, *(layout[name] for name in ("dp_replicate", "cp", "tp", "pp", "ep"))]
    if layout["ep"] > 1:
        sizes.append(fsdp * layout["tp"] // layout["ep"])  # efsdp
    return sum(size > 1 for size in sizes)


def _gathered(size: Size, layout: dict[str, int]) -> float:
    return size.dense / layout["tp"] + size.experts / layout["ep"]


def _microbatch(config: JobConfig) -> int:
    """Sequences that a rank computes at a time."""
    p = config.parallelism
    pipelined = p.pipeline_parallel_degree > 1
    return p.pipeline_parallel_microbatch_size if pipelined else config.training.local_batch_size


def _microbatches(config: JobConfig) -> int:
    return config.training.local_batch_size // _microbatch(config)


def _tokens(config: JobConfig) -> int:
    """Rows of hidden states that a rank has between its layers."""
    p = config.parallelism
    return _microbatch(config) * config.training.seq_len // (p.context_parallel_degree * p.tensor_parallel_degree)


def _under_way(config: JobConfig, stage: int) -> int:
    """Microbatches whose activations a stage holds at a time."""
    pp = config.parallelism.pipeline_parallel_degree
    if pp == 1:
        return 1
    if config.parallelism.pipeline_parallel_schedule == "GPipe":
        return _microbatches(config)
    return min(_microbatches(config), pp - stage)
