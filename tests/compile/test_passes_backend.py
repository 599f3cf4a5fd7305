"""Graph passes with torch.compile on two ranks: in the backend that bypasses code generation, and in Inductor."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests._helpers.multirank import run_on_ranks
from tests._helpers.pass_graphs import calls, recorded_graphs
from tests._helpers.training import unsharded
from tests.compile.test_passes_sequence_parallel import DIM, HIDDEN, MODELS, NORMS, TOKENS, head, inputs, layer
from torchtitan_npu.compile.backend import bypass_codegen, make_backend
from torchtitan_npu.compile.block_regions import compile_models
from torchtitan_npu.compile.passes import PASSES, GraphPasses
from torchtitan_npu.config.job_config import JobConfig


def train(names: list[str], name: str) -> tuple[list[Tensor], list[Tensor], list[Counter[str]]]:
    """Return gradients in eager mode and compiled, and the collectives of the forward and the backward graph."""
    model = partial(MODELS[name], norm=NORMS["npu"])
    passes = GraphPasses(names, sp_min_tokens=TOKENS, sp_whole_inputs=True)
    gradients = []
    with recorded_graphs() as graphs:
        for function in (model, torch.compile(model, backend=make_backend([passes]), fullgraph=True)):
            x, w = inputs(dist.get_rank(), torch.float64)
            function(x, w).square().sum().backward()
            gradients.append([leaf.grad for leaf in (x, *w.values()) if leaf.grad is not None])
    return gradients[0], gradients[1], [calls(graph) for graph in graphs]


def run(names: list[str], model: str = "dense") -> list[list[Counter[str]]]:
    """Check the gradients, and return by rank the collectives of the forward and the backward graph."""
    collectives = []
    for eager, compiled, seen in run_on_ranks(2, train, names, model):
        assert_same(compiled, eager)
        collectives.append(seen)
    return collectives


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    bound = 1.1e-16 * TOKENS * HIDDEN * 20  # as in test_passes_sequence_parallel
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=bound, atol=bound * float(other.abs().max()))


def test_two_layers_in_training() -> None:
    for seen in run([name for name in PASSES if name != "async_tp"]):
        assert seen == [{"RS": 2, "AG": 2}, {"RS": 3, "AG": 3, "AR": 3}]


def test_async_tp_fuses_the_collectives_of_sequence_parallel() -> None:
    for forward, backward in run(list(PASSES)):
        assert forward == {"AG+mm": 2, "mm+RS": 2}
        assert (backward["AG"] + backward["AG+mm"], backward["RS"] + backward["mm+RS"], backward["AR"]) == (3, 3, 3)
        assert backward["AG+mm"] and backward["mm+RS"]


def test_saved_values_of_one_rank_are_not_chunked() -> None:
    """A backward graph alone would not show that a saved value differs between ranks."""
    for forward, backward in run(["sequence_parallel"], "own_addend"):
        # the gradient of the other norm is chunked, and that of its gamma all-reduced
        assert forward == {"AR": 1} and backward == {"AR": 1 + 1, "RS": 1, "AG": 1}


def with_a_shard() -> tuple[Tensor, Tensor, int]:
    """Return a result in eager mode and compiled, and the number of changes. A DTensor's local tensor is added."""
    passes = GraphPasses(["sequence_parallel"], sp_min_tokens=TOKENS, sp_whole_inputs=True)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def model(x: Tensor, w: dict[str, Tensor], shard: DTensor) -> Tensor:
        return head(layer(x, 0, w, NORMS["npu"]) + shard.to_local(), w, NORMS["npu"])

    x, w = inputs(dist.get_rank(), torch.float64)
    shard = DTensor.from_local(w.pop("own").detach(), mesh, [Shard(2)])
    with torch.no_grad():
        compiled = torch.compile(model, backend=make_backend([passes]), fullgraph=True)(x, w, shard)
        return model(x, w, shard), compiled, passes.changed["sequence_parallel"]


def test_a_shard_is_not_taken_as_replicated() -> None:
    for eager, compiled, changed in run_on_ranks(2, with_a_shard):
        assert changed == 0 and torch.equal(eager, compiled)


class Layer(nn.Module):
    """A pre-norm feed-forward layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(DIM, dtype=torch.float64))
        self.up = nn.Linear(DIM, 2 * HIDDEN, bias=False, dtype=torch.float64)
        self.down = nn.Linear(2 * HIDDEN, DIM, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(NORMS["npu"](x, self.gamma))))


def with_a_plan() -> tuple[list[Tensor], list[Tensor], list[Tensor], int, list[Counter[str]]]:
    """Run two layers with a tensor-parallel plan in eager mode, compiled, and compiled with the pass.

    Return the results and gradients of each, the number of changes, and the collectives of the compiled graphs.
    """
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    passes = GraphPasses(["sequence_parallel"], sp_min_tokens=TOKENS, sp_whole_inputs=True)
    torch.manual_seed(0)
    layers = nn.Sequential(Layer(), Layer())
    plan: dict[str, Any] = {f"{i}.up": ColwiseParallel() for i in range(2)}
    parallelize_module(layers, mesh, plan | {f"{i}.down": RowwiseParallel() for i in range(2)})
    outcomes = []
    with recorded_graphs() as graphs:
        for backend in (None, bypass_codegen, make_backend([passes])):
            function = torch.compile(layers, backend=backend, fullgraph=True) if backend else layers
            layers.zero_grad()
            x, _ = inputs(0, torch.float64)
            result = function(x)
            result.square().sum().backward()
            gradients = [parameter.grad for parameter in layers.parameters()]
            outcomes.append([unsharded(tensor) for tensor in (result, x.grad, *gradients)])  # type: ignore[arg-type]
    return *outcomes, passes.changed["sequence_parallel"], [calls(graph) for graph in graphs]  # type: ignore[return-value]


def test_a_plan_with_replicated_activations() -> None:
    """The collectives of DTensor for ColwiseParallel and RowwiseParallel with default arguments."""
    for eager, plain, compiled, changed, collectives in run_on_ranks(2, with_a_plan):
        assert len(eager) == 8
        assert_same(plain, eager)
        assert_same(compiled, eager)
        # as in the same layers without DTensor; one all-reduce more per gamma
        assert changed == 4
        assert collectives == [{"AR": 2}, {"AR": 2}, {"RS": 2, "AG": 2}, {"RS": 2, "AG": 2, "AR": 2}]


def train_with_inductor() -> tuple[list[Tensor], list[Tensor], list[Counter[str]], int]:
    """Return results and gradients in eager mode and compiled, the collectives, and the number of kernels."""
    from torch._inductor import metrics
    from torch._inductor.utils import fresh_cache

    model = partial(MODELS["sums_only"], norm=None)
    early, late = GraphPasses(["sequence_parallel"], sp_min_tokens=TOKENS), GraphPasses(["async_tp"])
    seen: list[Counter[str]] = []

    def change(passes: GraphPasses, graph: fx.Graph) -> None:
        seen.append(calls(graph))
        passes(graph)
        seen.append(calls(graph))

    options: dict[str, Any] = {
        "joint_custom_pre_pass": partial(change, early),
        "post_grad_custom_post_pass": partial(change, late),
        "cpp.simdlen": 1,  # skip the compiled check for vector instructions
    }
    with fresh_cache():
        outcomes = []
        for function in (model, torch.compile(model, fullgraph=True, options=options)):
            x, w = inputs(dist.get_rank(), torch.float64)
            result = function(x, w)
            result.square().sum().backward()
            outcomes.append([result.detach(), *(leaf.grad for leaf in (x, *w.values()) if leaf.grad is not None)])
        return *outcomes, seen, metrics.generated_kernel_count  # type: ignore[return-value]


@pytest.mark.slow
def test_inductor_options() -> None:
    """Passes given as options of one torch.compile call, on the joint graph and on both post-grad graphs."""
    for eager, compiled, seen, kernels in run_on_ranks(2, train_with_inductor):
        assert_same(compiled, eager)
        assert seen[:2] == [{"AR": 3}, {"RS": 3, "AG": 2}]
        assert seen[2:4] == [{"RS": 2, "AG": 1}, {"mm+RS": 2, "AG+mm": 1}]
        assert seen[4:] == [{"RS": 1, "AG": 1}, {"mm+RS": 1, "AG+mm": 1}]
        assert kernels > 0


def test_a_job_with_code_generation() -> None:
    """With ``npu.bypass_codegen = "off"`` Inductor compiles the blocks, with the job's passes.

    Here it calls eager kernels (``fallback_by_default``), which saves the time of a C++ compiler.
    """
    from torch._inductor.utils import fresh_cache

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.rand(DIM))

        def forward(self, x: Tensor) -> Tensor:
            return NORMS["npu"](x + x.sin(), self.gamma)

    config = JobConfig()
    config.compile.enable, config.npu.bypass_codegen = True, "off"
    config.npu.graph_passes = ["add_rms_norm"]
    model: Any = nn.Module()
    model.layers = nn.ModuleDict({"0": Block()})
    x = torch.randn(2, DIM)
    torch.compiler.reset()
    counters.clear()
    with torch.no_grad(), fresh_cache(), inductor_config.patch({"fallback_by_default": True}):
        expected = model.layers["0"](x)
        compile_models([model], config)
        torch.testing.assert_close(model.layers["0"](x), expected, rtol=DIM * 2**-23, atol=DIM * 2**-23)
    assert model.graph_passes.changed["add_rms_norm"] == 1 and counters["inductor"]
