"""An estimate of a layout's memory and time, to choose which layouts to dry-run.

Weights, gradients, states and gathered parameters are arithmetic over the model's parameters, and so are the bytes
sent. Activations and FLOPs per token come from dry runs of the model with two and four layers, in the job's layout. A
dry run of the layout itself corrects the estimate, and has the job's expert load.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torchtitan.config import TORCH_DTYPE_MAP

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.titan_sections import hccl_buffers
from torchtitan_npu.planner.dry_run import DryRun, dry_run_rank
from torchtitan_npu.planner.layout import (
    Size,
    bubble,
    degrees,
    gathers_per_batch,
    mesh_sizes,
    microbatches_in_flight,
    model_args,
    sizes,
    uses_fsdp,
    with_layout,
    world_size_of,
)
from torchtitan_npu.planner.work import Rates, hccl_memory
from torchtitan_npu.preflight.job_context import build_on_meta

ACTIVATIONS = ("activations", "backward pass", "operator workspaces", "other")
LAYERS = (2, 4)
"""Layers of the truncated models. Half of the difference between them is one layer's."""


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
    """Rows of hidden states per rank in these dry runs."""
    unsharded_gradient: int
    """Bytes of the largest layer's gradient, which ``base`` counts in the backward pass."""
    args: Any

    @classmethod
    def from_job(cls, config: JobConfig) -> Estimator:
        """Dry-run the truncated models of a job whose degrees are all set."""
        args = copy.deepcopy(model_args(config))
        args.update_from_config(config)
        parameters = sizes(build_on_meta(config))
        layout = degrees(config)
        # Replicas hold and compute what shards do, and a dry run does not support replicas alone.
        shards = layout["dp_shard"] * layout["dp_replicate"]
        small = with_layout(config, {"pp": 1, "dp_replicate": 1, "dp_shard": shards})
        small.parallelism.fsdp_reshard_after_forward = "always"
        small.training.local_batch_size = microbatch(config)
        small.training.global_batch_size = -1
        base = []
        for layers in LAYERS:
            few = copy.deepcopy(model_args(config))
            few.n_layers = layers
            if hasattr(few, "n_dense_layers"):  # at most one of them is dense in a MoE model
                few.n_dense_layers = min(1, few.n_dense_layers)
            base.append(dry_run_rank(small, world_size_of(small), 0, model_args=few))
        largest = max(unsharded(size, small).total for size in parameters.values()) if uses_fsdp(small) else 0
        element = TORCH_DTYPE_MAP[small.training.mixed_precision_param].itemsize
        return cls(parameters, base, local_tokens(small), element * largest, args)

    @property
    def experts(self) -> int:
        """Return the number of experts per layer."""
        moe = getattr(self.args, "moe_args", None)
        return moe.num_experts if moe and any(size.experts for size in self.parameters.values()) else 0

    def of_layout(self, config: JobConfig, parts: list[list[str]], rates: Rates) -> Estimate:
        """Estimate the layout of ``config``; ``parts`` are the modules of each pipeline rank."""
        layout, training, optimizer = mesh_sizes(config), config.training, config.optimizer
        states = 2 * (1 - optimizer.swap_fraction if optimizer.swap else 1)
        # weight, gradient, and the states that are not swapped, of each parameter
        between_steps = TORCH_DTYPE_MAP[training.dtype].itemsize * (2 + states) / (layout["tp"] * layout["fsdp"])
        # Dimensions over all ranks share one group, except for EP. Expert balancing counts tokens over ``loss``.
        world = world_size_of(config)
        used = [name for name, ranks in layout.items() if ranks > 1 and (name != "loss" or self.experts)]
        groups = {name if layout[name] < world or name == "ep" else "world" for name in used}
        # Most of a workspace does not depend on the number of tokens.
        constant = self.base[-1].kept_workspace + hccl_memory(groups, hccl_buffers(config.comm))
        scale = local_tokens(config) / self.tokens
        two, four = (
            sum(one.at_peak.get(name, 0) for name in ACTIVATIONS) - self.unsharded_gradient for one in self.base
        )
        saved = max(0.0, (four - two) / (LAYERS[1] - LAYERS[0]))  # by a layer for the backward pass
        flops_two, flops_four = (one.flops for one in self.base)
        flops = (flops_four - flops_two) / (LAYERS[1] - LAYERS[0])
        trained = training.local_batch_size * training.seq_len * layout["loss"] / layout["cp"]
        seconds_per_token = bubble(config) / trained
        memory, seconds = [], []
        for stage, modules in enumerate(parts):
            layers = sum(name.startswith("layers.") for name in modules)
            activations = two - LAYERS[0] * saved + saved * layers * microbatches_in_flight(config, stage)
            parameters = between_steps * sum(self.parameters[name].total for name in modules)
            gathered = self.gathered(config, modules)
            memory.append(int(parameters + gathered + scale * activations + constant))
            work = flops * layers + (flops_two - LAYERS[0] * flops) * ("output" in modules)
            times = rates.seconds(microbatches(config) * scale * work, self.sent(config, modules, stage))
            seconds.append(seconds_per_token * sum(times.values()))
        return Estimate(memory, seconds)

    def gathered(self, config: JobConfig, modules: list[str]) -> int:
        """Return the bytes of gathered parameters and unsharded gradients at the peak.

        They are those of one layer and the parameters of the next one; those of all layers where FSDP keeps them.
        """
        if not uses_fsdp(config):
            return 0
        training = config.training
        parameter, gradient = (
            TORCH_DTYPE_MAP[name].itemsize for name in (training.mixed_precision_param, training.mixed_precision_reduce)
        )
        counts = [unsharded(self.parameters[name], config).total for name in modules]
        several = microbatches(config) > 1
        policy = config.parallelism.fsdp_reshard_after_forward
        pipelined = config.parallelism.pipeline_parallel_degree > 1
        keeps_all = several or policy != "always" if pipelined else policy == "never"
        if not keeps_all:
            return 3 * parameter * max(counts)
        return parameter * sum(counts) + (gradient * sum(counts) if several else parameter * max(counts))

    def sent(self, config: JobConfig, modules: list[str], stage: int) -> Counter[str]:
        """Return the bytes that a pipeline rank sends per batch, by mesh dimension, with a balanced expert load.

        Left out is what hardly differs between layouts: scalars, the rows of embedding and output, the gradients of
        replicas and of parameters that TP replicates.
        """
        ranks, args, training = mesh_sizes(config), self.args, config.training
        tp, ep, cp = ranks["tp"], ranks["ep"], ranks["cp"]
        sent: Counter[Any] = Counter()
        element = TORCH_DTYPE_MAP[training.dtype].itemsize
        if uses_fsdp(config):
            element = TORCH_DTYPE_MAP[training.mixed_precision_param].itemsize  # mixed precision is FSDP's
            gradient = TORCH_DTYPE_MAP[training.mixed_precision_reduce].itemsize
            policy, pipelined = config.parallelism.fsdp_reshard_after_forward, ranks["pp"] > 1
            for name in modules:
                # By default a pipeline keeps all modules gathered, and a model without one the last ones.
                stays = policy == "never" or (policy == "default" and (pipelined or name in ("norm", "output")))
                per_parameter = element * (1 if stays else gathers_per_batch(config, stage)) + gradient
                size = unsharded(self.parameters[name], config)
                for group, count in (("fsdp", size.dense), ("efsdp" if ep > 1 else "fsdp", size.experts)):
                    sent[group] += per_parameter * count * (ranks[group] - 1) / ranks[group]
        # Attention and a feed-forward layer gather and reduce-scatter their rows once each, and do the reverse in the
        # backward pass. A MoE layer that routes its local tokens does so for its shared experts only.
        layers = sum(name.startswith("layers.") for name in modules)
        moe_layers = sum(self.parameters[name].experts > 0 for name in modules)
        moe: Any = getattr(args, "moe_args", None)
        blocks = 2 * layers
        if moe and ep > 1 and ranks["etp"] == 1 and config.npu.moe_sequence_parallel:
            blocks -= moe_layers * (moe.num_shared_experts == 0)
        # The backward pass may repeat the gathers of a part of the layers, and their other collectives.
        ac, gathers, scatters = config.activation_checkpoint, 0.0, 0.0
        if ac.mode == "selective" and ac.selective_ac_option == "op":  # whose results are saved
            gathers = 1.0
        elif ac.mode in ("full", "selective"):
            gathers = scatters = 1.0 if ac.mode == "full" else 1 / max(1, int(ac.selective_ac_option))
        tokens = microbatches(config) * local_tokens(config) * element
        row = tokens * args.dim
        sent["pp"] = ((stage > 0) + (stage < ranks["pp"] - 1)) * row
        sent["tp"] = row * (tp - 1) * blocks * (4 + gathers + scatters)
        sent["cp"] = tokens * tp * self._key_value_elements(tp) * (cp - 1) * layers * (2 + gathers)
        if moe_layers:
            routed = moe_layers * row * moe.top_k
            # To the experts and back. Where TP splits the experts, each of its ranks has all rows, and their gradients
            # are partial sums.
            sent["ep"] = routed * ranks["etp"] * (ep - 1) / ep * (4 + 2 * scatters)
            if ep == 1 or ranks["etp"] > 1:
                sent["etp" if ep > 1 else "tp"] += 2 * routed * (tp - 1)
        return Counter({name: count for name, count in sent.items() if ranks[name] > 1})

    def _key_value_elements(self, tp: int) -> float:
        """Return the elements per token that a rank's context parallel exchanges: keys and values of its heads.

        A model that exchanges something else, which TP does not split, declares ``context_parallel_elements``.
        """
        args = self.args
        declared = getattr(args, "context_parallel_elements", None)
        if declared is not None:
            return declared
        if hasattr(args, "v_head_dim"):  # keys and values of different widths
            return args.n_heads * (args.qk_nope_head_dim + args.qk_rope_head_dim + args.v_head_dim) / tp
        head = getattr(args, "head_dim", None) or args.dim / args.n_heads
        return 2 * head * (getattr(args, "n_kv_heads", None) or args.n_heads) / tp


def unsharded(size: Size, config: JobConfig) -> Size:
    """Return the part of ``size`` on a rank after FSDP gathered it. Without EP, tensor parallel also splits experts."""
    ranks = mesh_sizes(config)
    experts = ranks["ep"] * ranks["etp"] if ranks["ep"] > 1 else ranks["tp"]
    return Size(size.dense // ranks["tp"], size.experts // experts)


def microbatch(config: JobConfig) -> int:
    """Return the sequences that a rank computes at a time."""
    p = config.parallelism
    pipelined = p.pipeline_parallel_degree > 1
    return p.pipeline_parallel_microbatch_size if pipelined else config.training.local_batch_size


def microbatches(config: JobConfig) -> int:
    return config.training.local_batch_size // microbatch(config)


def local_tokens(config: JobConfig) -> int:
    """Return the rows of hidden states that a rank has between its layers."""
    p = config.parallelism
    return microbatch(config) * config.training.seq_len // (p.context_parallel_degree * p.tensor_parallel_degree)
