"""Trains tiny models ten steps, eager and compiled, and says where the two differ.

python -m tests._helpers.compiled_training [LAYOUT ...]     # every model on these layouts: a table for the docs
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx

from tests._helpers import deepseek_v32_training, layouts
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import Record, recording, train_until
from tests.models.test_qwen3_vl_training import DATA, SIZES
from torchtitan_npu.compile.strides import OF_STRIDES

STEPS = 10
COMPILED = {"compile.enable": True, "npu.bypass_codegen": True}
TINIER = {"training.seq_len": 16, "training.global_batch_size": 2, "training.local_batch_size": 1}
PICTURES = {**DATA, "training.seq_len": 64}
CONVERTERS = {
    **layouts.FUSED,
    "deepseek_v32": [*layouts.FUSED["deepseek_v3"], "npu_dsa"],
    "qwen3_vl": ["npu_rms_norm", "npu_rope", "npu_mrope"],
}
EVERY = [*layouts.TINY, "deepseek_v32", "qwen3_vl"]
MICROBATCHES = {"training.local_batch_size": 2, "training.global_batch_size": 4}
VALIDATED = {  # after the first step and the last, on other sizes than are trained on
    "validation.enable": True,
    "validation.seq_len": 8,
    "validation.local_batch_size": 1,
    "validation.steps": 1,
}
FULL = {"activation_checkpoint.mode": "full"}
SELECTIVE_OP = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
INTERLEAVED = {**MICROBATCHES, "parallelism.pipeline_parallel_schedule": "Interleaved1F1B"}


class Layout(NamedTuple):
    ranks: int
    degrees: dict[str, int]
    options: dict[str, Any] = {}  # noqa: RUF012
    layers: int = 2
    converted: bool = False


LAYOUTS = {
    "one": Layout(1, {}),
    "fsdp2": Layout(2, {}),
    "tp2": Layout(2, {"tp": 2}),
    "fsdp2 tp2": Layout(4, {"shard": 2, "tp": 2}),
    "one, converted": Layout(1, {}, converted=True),
    "fsdp2, validated": Layout(2, {}, VALIDATED, converted=True),
    "tp2, validated": Layout(2, {"tp": 2}, VALIDATED, converted=True),
    "tp2, converted": Layout(2, {"tp": 2}, converted=True),
    "one, other batches": Layout(1, {}, {**VALIDATED, "validation.local_batch_size": 3}),
    "ep2, converted": Layout(2, {"ep": 2}, converted=True),
    "ep2": Layout(2, {"ep": 2}),  # where the number of tokens that a rank gets differs from step to step
    "cp2": Layout(2, {"cp": 2}),
    "pp2": Layout(2, {"pp": 2}, MICROBATCHES),
    "pp2 interleaved": Layout(2, {"pp": 2}, INTERLEAVED, layers=4),
    "pp2 fsdp2": Layout(4, {"pp": 2, "shard": 2}, MICROBATCHES),
    "selective 2": Layout(1, {}, {"activation_checkpoint.mode": "selective"}),
    "selective op": Layout(1, {}, SELECTIVE_OP),
    "full": Layout(1, {}, FULL),
    "tp2, selective op": Layout(2, {"tp": 2}, SELECTIVE_OP),
    "tp2, full": Layout(2, {"tp": 2}, FULL),
    "selective op, converted": Layout(1, {}, SELECTIVE_OP, layers=3, converted=True),  # two of them with experts
    "tp2, full, converted": Layout(2, {"tp": 2}, FULL, converted=True),
}


class Run(NamedTuple):
    record: Record
    graphs_after_two: int
    """Compiled in the first two steps."""
    graphs: int
    """Compiled in all."""
    written_after_two: int
    """By the interpreter, in the first two steps: a backward graph a second time if gradients lie in another way."""
    written: int
    """In all."""
    of_any_size: int
    """Graphs of the first step whose sizes are not known."""
    operators: Counter[str]
    """What the interpreter was given, forward and backward, how often."""
    generated: int
    """Kernels, and whatever else Inductor counts."""
    changed: Counter[str]
    """By graph pass, places."""


Pair = tuple[Run, Run]
"""Eager and compiled."""


def job(model: str, layout: Layout, options: dict[str, Any]) -> Any:
    every = {**TINIER, "training.steps": STEPS, "model.converters": CONVERTERS[model] if layout.converted else []}
    if model == "deepseek_v32":
        layouts.add_flavor(model, "tiny", {**deepseek_v32_training.SMALLER, "n_layers": layout.layers})
        own = {"model.name": model, "model.flavor": "tiny"}
        return layouts.job_config("deepseek_v3", layout.degrees, {**every, **own, **layout.options, **options})
    if model == "qwen3_vl":
        tiny = ("qwen3_vl", "debugmodel", {**SIZES, "enable_weight_tying": False})
        every |= PICTURES
    else:
        name, flavor, sizes = layouts.TINY[model]
        tiny = (name, flavor, {**sizes, "n_layers": layout.layers, "dim": 32})
    with patch.dict(layouts.TINY, {model: tiny}):  # other tests train in this process afterwards
        return layouts.job_config(model, layout.degrees, {**every, **layout.options, **options})


@contextmanager
def written() -> Iterator[list[tuple[fx.GraphModule, torch._C.Graph]]]:
    """Every graph that is written for the interpreter, as it was and as it is."""
    from torchtitan_npu.compile import interpreter

    graphs = []
    write = interpreter.write

    def keep(graph_module: fx.GraphModule) -> torch._C.Graph:
        graphs.append((graph_module, write(graph_module)))
        return graphs[-1][1]

    with patch.object(interpreter, "write", keep):
        yield graphs


def train(model: str, layout: Layout, options: dict[str, Any]) -> Run:
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    with written() as graphs, recording(job(model, layout, options)) as (trainer, record):
        validation = trainer.job_config.validation
        with patch.object(validation, "enable", False):
            train_until(trainer, 1)
        of_any_size = sum(not has_sizes(graph_module) for graph_module, _ in graphs)
        if validation.enable:
            trainer.validator.validate(trainer.model_parts, trainer.step)
        train_until(trainer, 2)
        after_two, written_after_two = counters["stats"]["unique_graphs"], len(graphs)
        train_until(trainer, STEPS)
    operators = called(graph for _, graph in graphs)
    generated = metrics.generated_kernel_count + sum(counters["inductor"].values())
    passes = [part.graph_passes.changed for part in trainer.model_parts if hasattr(part, "graph_passes")]
    changed = passes[0] if passes else Counter()  # parts share theirs
    compiled = after_two, counters["stats"]["unique_graphs"], written_after_two, len(graphs)
    return Run(record, *compiled, of_any_size, operators, generated, changed)


def has_sizes(graph_module: fx.GraphModule) -> bool:
    """Whether every size in the graph is known."""
    inputs = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    return not any(isinstance(value, torch.SymInt) for value in inputs)


def train_both(model: str, layout: Layout, options: dict[str, Any]) -> Pair:
    """Ten steps in eager mode and compiled."""
    return train(model, layout, {}), train(model, layout, {**COMPILED, **options})


def train_on(layout: str, model: str, options: dict[str, Any] | None = None) -> list[Pair]:
    """By rank."""
    arguments = (model, LAYOUTS[layout], options or {})
    return run_on_ranks(LAYOUTS[layout].ranks, train_both, *arguments, process_group=False, timeout=600)


def differences(eager: Run, compiled: Run) -> list[str]:
    """What of a rank's training is not the same to the bit: losses, gradient norms, the first gradients by name.

    And the losses of validation, where there is any, and the biases of experts after the first step.
    """
    ours, theirs = compiled.record, eager.record
    found = [what for what in ("losses", "norms", "validation") if getattr(ours, what) != getattr(theirs, what)]
    found += [name for name, bias in theirs.biases.items() if not torch.equal(ours.biases[name], bias)]
    return found + [name for name, g in theirs.gradients.items() if not torch.equal(ours.gradients[name], g)]


def assert_compiled(eager: Run, compiled: Run) -> None:
    assert (eager.graphs, eager.graphs_after_two) == (0, 0)
    assert 0 < compiled.graphs_after_two == compiled.graphs
    assert 0 < compiled.written_after_two == compiled.written
    assert compiled.of_any_size == 0
    assert compiled.generated == 0 and len(compiled.operators) > 10
    assert_have_kernels(compiled.operators)
    # with one of these in a backward graph, gradients are copied into the strides that were captured
    assert compiled.operators.keys().isdisjoint(operator._schema.name for operator in OF_STRIDES)
    ours, theirs = compiled.record, eager.record
    assert len(ours.losses) == len(theirs.losses) == STEPS and ours.norms[0] != ours.norms[-1]
    assert ours.gradients.keys() == theirs.gradients.keys() and len(ours.gradients) > 10


PACKING = {"prim::Constant", "prim::ListConstruct", "prim::ListUnpack", "prim::TupleConstruct", "aten::clear"}
"""What a graph has beside operators: arguments, and what is done with lists of them."""
OF_SIZES = {f"aten::{name}.int" for name in ("add", "sub", "mul", "floordiv")}
"""Of sizes that are not known."""


def called(graphs: Iterable[torch._C.Graph]) -> Counter[str]:
    """How often each operator is in the graphs, with its overload."""
    nodes = [node for graph in graphs for node in graph.nodes() if node.kind() not in PACKING]
    return Counter(node.schema().partition("(")[0] for node in nodes)


def assert_have_kernels(operators: Iterable[str]) -> None:
    """Each is an operator that the dispatcher knows."""
    unknown = [name for name in {*operators} - OF_SIZES if not torch._C._dispatch_has_kernel(name)]
    assert unknown == []


def main(names: list[str]) -> None:
    print("| | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|", flush=True)
    for model in EVERY:
        cells = []
        for name in names:
            pairs = train_on(name, model)
            for pair in pairs:
                assert_compiled(*pair)
            differing = sorted({what for pair in pairs for what in differences(*pair)})
            cells.append(f"{len(differing)} differ: {differing[:3]}" if differing else "equal")
        print(f"| {model} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["one", "fsdp2", "tp2"])
