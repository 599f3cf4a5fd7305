"""Train tiny models in eager mode and compiled, and compare the two.

python -m tests._helpers.compiled_training [LAYOUT ...]     # ten steps of every model on these layouts, as a table
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import fx

from tests._helpers import deepseek_v32_training, layouts
from tests._helpers.multirank import run_on_ranks
from tests._helpers.pass_graphs import recorded_graphs
from tests._helpers.training import Record, recording, train_until
from torchtitan_npu.torch_internals.dispatch import OpOverload

STEPS = 4
"""Two steps in which graphs are compiled, and two in which none may be."""
COMPILED = {"compile.enable": True, "npu.bypass_codegen": "inductor"}
SMALL_BATCHES = {"training.seq_len": 16, "training.global_batch_size": 2, "training.local_batch_size": 1}
CONVERTERS = {
    **layouts.FUSED,
    "deepseek_v32": deepseek_v32_training.CONVERTERS,
    "qwen3_vl": ["npu_rms_norm", "npu_rope", "npu_mrope"],
}
MODELS = list(CONVERTERS)
MICROBATCHES = {"training.local_batch_size": 2, "training.global_batch_size": 4}
VALIDATED = {  # after the first step and the last, with another sequence length than in training
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
    "ep2": Layout(2, {"ep": 2}),  # the number of a rank's tokens changes from step to step
    "tp2 ep2": Layout(2, {"tp": 2, "ep": 2}, {"npu.moe_sequence_parallel": False}),
    "cp2": Layout(2, {"cp": 2}),
    "pp2": Layout(2, {"pp": 2}, MICROBATCHES),
    "pp2 interleaved": Layout(2, {"pp": 2}, INTERLEAVED, layers=4),
    "pp2 fsdp2": Layout(4, {"pp": 2, "shard": 2}, MICROBATCHES),
    "selective 2": Layout(1, {}, {"activation_checkpoint.mode": "selective"}),
    "selective op": Layout(1, {}, SELECTIVE_OP),
    "full": Layout(1, {}, FULL),
    "tp2, selective op": Layout(2, {"tp": 2}, SELECTIVE_OP),
    "tp2, full": Layout(2, {"tp": 2}, FULL),
    "selective op, converted": Layout(1, {}, SELECTIVE_OP, layers=3, converted=True),  # two layers with experts
    "tp2, full, converted": Layout(2, {"tp": 2}, FULL, converted=True),
}


class Run(NamedTuple):
    record: Record
    regions_after_two: int
    """Regions compiled in the first two steps."""
    regions: int
    graphs_after_two: int
    """Graphs compiled in the first two steps."""
    graphs: int
    dynamic: int
    """Graphs with symbolic sizes in the first step."""
    operators: Counter[str]
    """Calls of each operator in all graphs."""
    generated: int
    """Kernels that Inductor generated."""
    changed: Counter[str]
    """Places changed by each graph pass."""


Pair = tuple[Run, Run]
"""An eager and a compiled run."""


def job(model: str, layout: Layout, options: dict[str, Any]) -> Any:
    every = {**SMALL_BATCHES, "model.converters": CONVERTERS[model] if layout.converted else []}
    sizes = {"n_layers": layout.layers}
    if model == "qwen3_vl":
        every |= {**layouts.PICTURES, "training.seq_len": 64}
        sizes = {}
    elif model != "deepseek_v32":
        sizes["dim"] = 32
    return layouts.job_config(model, layout.degrees, {**every, **layout.options, **options}, sizes)


def train(model: str, layout: Layout, steps: int, options: dict[str, Any]) -> Run:
    from torch._dynamo.utils import counters
    from torch._inductor import metrics

    torch.compiler.reset()
    counters.clear()
    metrics.reset()
    config = job(model, layout, {"training.steps": steps, "validation.freq": steps, **options})
    with recorded_graphs() as graphs, recording(config) as (trainer, record):
        validation = trainer.job_config.validation
        with patch.object(validation, "enable", False):
            train_until(trainer, 1)
        dynamic = sum(not has_static_sizes(graph) for graph in graphs)
        if validation.enable:
            trainer.validator.validate(trainer.model_parts, trainer.step)
        train_until(trainer, 2)
        regions_after_two, graphs_after_two = counters["stats"]["unique_graphs"], len(graphs)
        train_until(trainer, steps)
    operators = operator_calls(graphs)
    generated = metrics.generated_kernel_count
    passes = [part.graph_passes.changed for part in trainer.model_parts if hasattr(part, "graph_passes")]
    changed = passes[0] if passes else Counter()  # all parts have the same
    compiled = regions_after_two, counters["stats"]["unique_graphs"], graphs_after_two, len(graphs)
    return Run(record, *compiled, dynamic, operators, generated, changed)


def has_static_sizes(graph: fx.Graph) -> bool:
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    return not any(isinstance(value, torch.SymInt) for value in inputs)


def train_both(model: str, layout: Layout, steps: int, options: dict[str, Any]) -> Pair:
    return train(model, layout, steps, {}), train(model, layout, steps, {**COMPILED, **options})


def train_on(layout: str, model: str, options: dict[str, Any] | None = None, steps: int = STEPS) -> list[Pair]:
    """Train in eager mode and compiled, and return one pair per rank."""
    arguments = (model, LAYOUTS[layout], steps, options or {})
    return run_on_ranks(LAYOUTS[layout].ranks, train_both, *arguments, process_group=False, timeout=600)


def differences(eager: Run, compiled: Run) -> list[str]:
    """Name everything that is not bit-identical on a rank.

    Compared are losses, gradient norms, validation losses, and after the first step gradients and expert biases.
    """
    ours, theirs = compiled.record, eager.record
    found = [what for what in ("losses", "norms", "validation") if getattr(ours, what) != getattr(theirs, what)]
    found += [name for name, bias in theirs.biases.items() if not torch.equal(ours.biases[name], bias)]
    return found + [name for name, g in theirs.gradients.items() if not torch.equal(ours.gradients[name], g)]


def assert_compiled(eager: Run, compiled: Run) -> None:
    """Check that only the second run was compiled, completely, in its first two steps, and without code generation."""
    assert (eager.regions, eager.regions_after_two) == (0, 0)
    assert 0 < compiled.regions_after_two == compiled.regions
    assert 0 < compiled.graphs_after_two == compiled.graphs
    assert compiled.dynamic == 0
    assert compiled.generated == 0 and len(compiled.operators) > 10
    ours, theirs = compiled.record, eager.record
    assert len(ours.losses) == len(theirs.losses) > 2 and ours.norms[0] != ours.norms[-1]
    assert ours.gradients.keys() == theirs.gradients.keys() and len(ours.gradients) > 10


def operator_calls(graphs: Iterable[fx.Graph]) -> Counter[str]:
    """Count the calls of each operator overload (``"aten::add.Tensor"``) in graphs."""
    return Counter(n.target.name() for graph in graphs for n in graph.nodes if isinstance(n.target, OpOverload))


def main(names: list[str]) -> None:
    print("| | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|", flush=True)
    for model in MODELS:
        cells = []
        for name in names:
            pairs = train_on(name, model, steps=10)
            for pair in pairs:
                assert_compiled(*pair)
            differing = sorted({what for pair in pairs for what in differences(*pair)})
            cells.append(f"{len(differing)} differ: {differing[:3]}" if differing else "equal")
        print(f"| {model} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["one", "fsdp2", "tp2"])
