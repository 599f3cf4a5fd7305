"""Overlap of communication in DeepSeek-V3.2: gathering keys, and prefetching the next layer's weights."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu
from tests._helpers.converted_models import convert
from tests._helpers.deepseek_v32_models import build, model_args, start_batch, tokens
from tests._helpers.layouts import DEGREES
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.distributed.parallel_dims import ParallelDims
from torchtitan_npu.models.deepseek_v32 import DeepSeekV32Model
from torchtitan_npu.models.deepseek_v32.context_parallel import DSAContextParallel
from torchtitan_npu.planner import BelowSubclasses, fake_ranks

torchtitan_npu.register()

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)


class Sequence(BelowSubclasses):
    """Records collectives and products with a parameter, in order, by name."""

    def __init__(self, model: DeepSeekV32Model) -> None:
        super().__init__()
        self.parameters = {p.untyped_storage().data_ptr(): name for name, p in model.named_parameters()}
        self.steps: list[str] = []

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op.namespace == "_c10d_functional" and not op.__name__.startswith("_"):  # these do not communicate
            self.steps.append(op._schema.name.partition("::")[2])
        elif op in PRODUCTS:
            names = (self.parameters.get(x.untyped_storage().data_ptr()) for x in args)
            self.steps += [name for name in names if name is not None]
        return op(*args, **kwargs)


def forward_of_two_ranks(load_balancer: str | None) -> list[str]:
    model = build(model_args(n_layers=1))
    parallel = DSAContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), load_balancer)
    parallel.parallelize(model)
    inputs, _, extra = parallel.prepare(tokens(), tokens(), {})
    with torch.no_grad(), Sequence(model) as sequence:
        model(inputs, **extra)
    return sequence.steps


@pytest.mark.parametrize("load_balancer", ["headtail", None])
def test_keys_are_gathered_while_queries_are_computed(load_balancer: str | None) -> None:
    keys, queries = ("wkv_a", "indexer.wk"), ("wq_a", "wq_b", "indexer.wq_b", "indexer.weights_proj", "wkv_b")
    expected = [
        *(f"layers.0.attention.{name}.weight" for name in keys),
        "all_gather_into_tensor",
        *(f"layers.0.attention.{name}.weight" for name in queries),  # the last absorbs the queries
        "wait_tensor",
    ]
    for steps in run_on_ranks(2, forward_of_two_ranks, load_balancer):
        assert steps[: len(expected)] == expected
        assert "all_gather_into_tensor" not in steps[len(expected) :]


class Held(BelowSubclasses):
    """Records the largest result with a dimension of ``length``, the number of tokens of a full sequence."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.most = length, 0

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = op(*args, **kwargs)
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, torch.Tensor) and self.length in result.shape:
                self.most = max(self.most, result.numel())
        return results


def held_by_two_ranks(load_balancer: str | None) -> tuple[int, int]:
    """Return the largest full-sequence result of forward and backward, and the number of elements of all keys."""
    args = model_args(n_layers=1)
    model: Any = convert(build(args), "npu_dsa")
    parallel = DSAContextParallel(init_device_mesh("cpu", (dist.get_world_size(),)), load_balancer)
    parallel.parallelize(model)
    whole = tokens()[:1]  # one row: half of two rows is as long as a full sequence
    inputs, _, extra = parallel.prepare(whole, whole, {})
    start_batch(model)
    with Held(whole.shape[1]) as held:
        model(inputs, **extra).sum().backward()
    return held.most, whole.numel() * (args.kv_lora_rank + args.qk_rope_head_dim + args.index_head_dim)


@pytest.mark.parametrize("load_balancer", ["headtail", None])
def test_only_keys_have_the_full_sequence(load_balancer: str | None) -> None:
    for most, keys in run_on_ranks(2, held_by_two_ranks, load_balancer):
        assert 0 < most <= keys


def parallelized(layout: dict[str, int], **absent: None) -> Any:
    """Return the model of the first of 4 ranks; for a pipeline stage, without the ``absent`` modules."""
    config = JobConfig()
    config.model.name = "deepseek_v32"
    for name, degree in layout.items():
        setattr(config.parallelism, DEGREES[name], degree)
    degrees = {"dp_replicate": 1, "dp_shard": 4 // layout.get("cp", 1), "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1}
    dims = ParallelDims(**degrees | layout, world_size=4)
    with torch.device("meta"):
        model: Any = DeepSeekV32Model(model_args())
    for name, nothing in absent.items():
        setattr(model, name, nothing)
    dims.build_mesh()
    return get_train_spec("deepseek_v32").parallelize_fn(model, dims, config)


def prefetched(module: FSDPModule, direction: str) -> list[Any]:
    """Return the FSDP states that ``module`` prefetches."""
    return getattr(module._get_fsdp_state(), f"_states_to_{direction}_prefetch")


@pytest.mark.parametrize("layout", [{}, {"ep": 4}, {"cp": 2}, {"cp": 2, "ep": 4}], ids=str)
@pytest.mark.parametrize("absent", [{}, {"tok_embeddings": None}, {"norm": None, "output": None}], ids=str)
def test_the_next_layers_weights_are_prefetched(layout: dict[str, int], absent: dict[str, None]) -> None:
    with fake_ranks(4):
        model = parallelized(layout, **absent)
        in_order = [model.tok_embeddings, *model.layers.values(), model.output]
        modules = [module for module in in_order if module is not None]
        assert len(modules) == 5 - len(absent.keys() - {"norm"})
        for module, following in pairwise(modules):
            assert following._get_fsdp_state() in prefetched(module, "forward")
            assert module._get_fsdp_state() in prefetched(following, "backward")
            for one, other, direction in ((module, following, "forward"), (following, module, "backward")):
                if "ep" in layout and getattr(other, "moe_enabled", False):  # its experts are a separate FSDP module
                    assert other.moe.experts._get_fsdp_state() in prefetched(one, direction)
