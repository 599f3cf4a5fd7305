"""Matrix products under tensor parallel, on torch_npu's own path: every collective has a reason, none is a product's.

torch_npu brings strategies of its own for the two operators. Ours may take their place because no choice of theirs
costs less.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import _select_min_cost_strategy
from torchtitan.protocols.train_spec import get_train_spec

from tests.collectives import Collective, Collectives
from tests.shards import every_placement
from tests.test_matmul_sharding import Call, backward, choice, cost_of, forward, is_valid, later_cost, specs
from tests.whole_matmul import our_matmul_sharding
from torchtitan_npu.auxiliary_loss import auxiliary_losses
from torchtitan_npu.config import JobConfig
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.rehearsal import StatedLoad, fake_device, fake_ranks

R = Replicate()


def torch_npus_choice(call: Call, mesh: Any, placements: Any) -> tuple[Any, Any, float]:
    """What DTensor takes of torch_npu's strategies: where inputs go, where outputs are, what it costs."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    inputs = specs(call, mesh, placements)
    schema = OpSchema(call.op, (*inputs, *call.mask), {}, propagator.op_to_schema_info[call.op])
    strategies = propagator.op_strategy_funcs[call.op](propagator._wrap_with_op_strategy(schema))
    chosen = _select_min_cost_strategy(strategies, schema)  # type: ignore[arg-type]
    outputs = chosen.output_specs if isinstance(chosen.output_specs, tuple) else (chosen.output_specs,)
    targets = tuple(spec.placements for spec in chosen.input_specs or ())
    cost = sum(cost_of(spec, target) for spec, target in zip(inputs, targets, strict=True))
    return targets, tuple(spec.placements for spec in outputs if spec is not None), cost


CALLS = {
    "matmul": forward("even"),
    "matmul_uneven": forward("3d2d"),
    "matmul_backward": backward("even"),
    "matmul_backward_uneven": backward("3d2d"),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_torch_npus_strategies_never_cost_less(call: Call) -> None:
    everywhere = list(itertools.product(*(every_placement(x.ndim, 1) for x in call.inputs)))
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        theirs = [torch_npus_choice(call, mesh, placements) for placements in everywhere]
        with our_matmul_sharding():
            ours = [choice(call, mesh, placements) for placements in everywhere]
        later = functools.partial(later_cost, call, mesh)
        our_costs = [our.cost + later(our.targets, now[-1]) for our, now in zip(ours, everywhere, strict=True)]
        their_costs = [
            cost + later(targets, now[-1]) for (targets, _, cost), now in zip(theirs, everywhere, strict=True)
        ]
    assert all(is_valid(call, (2,), targets, results) for targets, results, _ in theirs)
    assert all(our <= their for our, their in zip(our_costs, their_costs, strict=True))
    # a factor that is a sum, and uneven cuts, are what they do not know
    assert any(our == 0 < their for our, their in zip(our_costs, their_costs, strict=True))


@pytest.mark.parametrize("frozen", ["input", "weight", None])
def test_frozen_operands(frozen: str | None) -> None:
    """torch_npu's shape function gives a gradient for a frozen operand too."""
    with fake_ranks(2), our_matmul_sharding():
        mesh = init_device_mesh("npu", (2,))
        with fake_device():
            operands = {
                name: DTensor.from_local(torch.ones(4, 4, device="npu"), mesh, (R,), run_check=False).requires_grad_(
                    name != frozen
                )
                for name in ("input", "weight")
            }
            nn.functional.linear(**operands).sum().backward()
            assert [name for name, x in operands.items() if x.grad is None] == ([frozen] if frozen else [])


def step(model: str, changes: dict[str, Any]) -> tuple[Any, list[Collective]]:
    """A forward and backward with tensor parallel over 2 of 8 ranks, FSDP over 4: the model, and what DTensor sent."""
    with fake_ranks(8):
        config = JobConfig()
        config.model.name, config.training.seq_len = model, 256
        config.parallelism.tensor_parallel_degree = 2
        config.activation_checkpoint.mode = "none"
        dims = ParallelDims(dp_replicate=1, dp_shard=4, cp=1, tp=2, pp=1, ep=1, etp=1, world_size=8)
        dims.build_mesh()
        spec = get_train_spec(model)
        args: Any = copy.deepcopy(spec.model_args["debugmodel"])
        for path, value in changes.items():
            owner, _, field = path.rpartition(".")
            setattr(getattr(args, owner) if owner else args, field, value)
        args.update_from_config(config)
        with torch.device("meta"):
            whole = spec.model_cls(args)
        parallel: Any = spec.parallelize_fn(whole, dims, config)
        with fake_device(), StatedLoad():
            parallel.to_empty(device="npu")
            for _ in range(2):  # when DTensor meets an operator for the first time, it runs it once more
                with Collectives() as collectives:
                    tokens = torch.zeros(2, 256, dtype=torch.int64, device="npu")
                    for loss in auxiliary_losses([parallel]):
                        loss.start_batch(torch.ones((), device="npu"), 1)
                    logits = parallel(tokens)
                    (logits.to_local() if isinstance(logits, DTensor) else logits).float().sum().backward()
        return parallel, collectives.calls


@pytest.mark.parametrize(("model", "norms"), [("llama3", 13), ("qwen3", 33)])
def test_every_collective_of_a_step(model: str, norms: int) -> None:
    with our_matmul_sharding():
        parallel, calls = step(model, {})
    # the tokens' sequence is gathered before attention, feed-forward and output, and scattered after embedding,
    # attention and feed-forward, as sums; backward does the reverse
    sections = 2 * len(parallel.layers) + 1
    # norms work on a rank's own tokens or heads: their weights' gradients are sums, and FSDP wants them whole
    weights = [tuple(parameter.shape) for name, parameter in parallel.named_parameters() if "norm" in name]
    assert len(weights) == norms
    assert Counter(call.shape for call in calls if call.kind == "all_reduce") == Counter(weights)
    assert Counter(call.kind for call in calls) == {
        "all_gather_into_tensor": 2 * sections,
        "reduce_scatter_tensor": 2 * sections,
        "all_reduce": norms,
    }
    assert step(model, {})[1] == calls  # torch_npu's strategies do as well here


# two layers, one with experts. Gradients of latents are sums over the ranks that share the heads
LATENTS = {"n_layers": 2, "q_lora_rank": 24, "moe_args.num_experts": 4, "moe_args.top_k": 2}


@pytest.mark.parametrize("model", ["deepseek_v3", "deepseek_v32"])
def test_deepseeks_latents_send_less_than_with_torch_npus_strategies(model: str) -> None:
    """It scatters those sums over the batch, and has to exchange the input's gradient for one cut by the sequence."""
    parallel, theirs = step(model, LATENTS)
    with our_matmul_sharding():
        _, ours = step(model, LATENTS)
    assert Counter(x.kind for x in theirs)["shard_dim_alltoall"] == len(parallel.layers)
    assert Counter(x.kind for x in ours)["shard_dim_alltoall"] == 0
    assert len(ours) == len(theirs) - len(parallel.layers)
    assert sum(x.sent for x in ours) < sum(x.sent for x in theirs)
