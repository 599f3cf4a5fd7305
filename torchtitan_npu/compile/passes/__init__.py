"""Passes over compiled graphs: plain functions that take an ``fx.Graph`` and return how many places they changed.

Graphs are those that AOTAutograd makes, joint or inference, with functional collectives in them; which backend compiles
them afterwards does not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import fx, nn
from torchtitan.tools.logging import logger

from torchtitan_npu.compile.passes.add_rms_norm import add_rms_norm
from torchtitan_npu.compile.passes.all_gather_chunk import all_gather_chunk
from torchtitan_npu.compile.passes.async_tp import async_tp
from torchtitan_npu.compile.passes.limits import Limits
from torchtitan_npu.compile.passes.no_ops import no_ops
from torchtitan_npu.compile.passes.sequence_parallel import sequence_parallel
from torchtitan_npu.errors import UsageError, nearest

Pass = Callable[[fx.Graph], int]

PASSES: dict[str, Callable[..., int]] = {
    "no_ops": no_ops,
    "all_gather_chunk": all_gather_chunk,
    "sequence_parallel": sequence_parallel,
    "async_tp": async_tp,
    "add_rms_norm": add_rms_norm,
}
"""By the name that ``[npu] graph_passes`` gives them, in the order they run in, whatever order the key has."""
WITH_LIMITS = ("async_tp", "add_rms_norm")
"""Those that put operators into graphs which an NPU's kernels may refuse."""


class GraphPasses:
    """The passes that a job asks for. Calling it runs them on a graph; :func:`report` says what they did in all.

    It is to see the joint graph of a training step, or the graph of a region without gradients; not the two halves that
    the former is cut into, whose inputs may be any one rank's.
    """

    def __init__(
        self,
        names: Sequence[str],
        sp_min_tokens: int = 1000,
        sp_whole_inputs: bool = False,
        strict_limits: bool = False,
    ) -> None:
        for name in names:
            if name not in PASSES:
                known = ", ".join(PASSES)
                raise UsageError(f"npu.graph_passes: no pass {name!r}{nearest(name, PASSES)}; there are {known}")
        if sp_min_tokens < 1:
            raise UsageError(f"npu.sp_min_tokens is {sp_min_tokens}; it must be at least 1")
        self.limits = {name: Limits(strict_limits) for name in WITH_LIMITS if name in names}
        options: dict[str, dict[str, Any]] = {name: {"limits": limits} for name, limits in self.limits.items()}
        options["sequence_parallel"] = {"min_tokens": sp_min_tokens, "whole_inputs": sp_whole_inputs}
        self.passes: dict[str, Pass] = {
            name: partial(function, **options.get(name, {})) for name, function in PASSES.items() if name in names
        }
        self.whole_inputs = sp_whole_inputs
        self.graphs = 0
        self.changed: Counter[str] = Counter()
        """By pass, the places in all graphs."""
        self.reported = False

    def __call__(self, given: fx.GraphModule | fx.Graph) -> int:
        graph = given.graph if isinstance(given, fx.GraphModule) else given
        changed = {name: function(graph) for name, function in self.passes.items()}
        self.graphs += 1
        self.changed.update(changed)
        if self.reported:  # a graph of its own, such as the one that validates
            for name in +Counter(changed):
                logger.info(f"Graph pass {name}: {_many(changed[name], 'place')} changed, in a graph compiled later")
        total = sum(changed.values())
        if total:
            graph.lint()
            if graph.owning_module is not None:
                graph.owning_module.recompile()
        return total


def report(model_parts: Iterable[nn.Module]) -> None:
    """Say what the passes of a job changed, or that they found nothing, when the graphs of its step are compiled."""
    # parts share theirs
    all_passes: Any = [*dict.fromkeys(part.graph_passes for part in model_parts if hasattr(part, "graph_passes"))]
    graphs = sum(passes.graphs for passes in all_passes)
    for name in PASSES:
        having = [passes for passes in all_passes if name in passes.passes]
        if not having:
            continue
        changed = sum(passes.changed[name] for passes in having)
        done = f"{_many(changed, 'place')} changed" if changed else "found nothing to change"
        hint = "" if changed else _hint(having[0], name)
        logger.info(f"Graph pass {name}: {done}, in {_many(graphs, 'graph')}{hint}")
        refused: Counter[str] = sum(
            (passes.limits[name].refused for passes in having if name in passes.limits), Counter()
        )
        for reason, places in refused.items():
            logger.info(f"Graph pass {name}: in {_many(places, 'place')} {reason}")
    for passes in all_passes:
        passes.reported = True


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _hint(passes: GraphPasses, name: str) -> str:
    """What may be why."""
    if name == "sequence_parallel" and not passes.whole_inputs:
        return "; of inputs it knows only by npu.sp_whole_inputs that they are the same on all ranks"
    if name == "add_rms_norm":
        return "; it changes those without gradients, which are compiled when they are first needed"
    return ""
