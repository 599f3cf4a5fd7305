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
from torchtitan_npu.compile.passes.graphs import has_backward
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
WITHOUT_GRADIENTS = ("add_rms_norm",)
"""Those that leave the graphs of training alone."""


class GraphPasses:
    """The passes that a job asks for. Calling it runs them on a graph; :func:`report` says what they did.

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
        self.changed: Counter[str] = Counter()
        """By pass, the places in all graphs."""
        self.unsaid: list[tuple[bool, dict[str, int]]] = []
        """Of every graph since the last report, whether it has gradients, and the places by pass."""
        self.reported = False
        self.said: set[str] = set()
        """The passes of which it was said what they did, or that they found nothing."""

    def __call__(self, given: fx.GraphModule | fx.Graph) -> int:
        graph = given.graph if isinstance(given, fx.GraphModule) else given
        changed = {name: function(graph) for name, function in self.passes.items()}
        self.changed.update(changed)
        self.unsaid.append((has_backward(graph), changed))
        total = sum(changed.values())
        if total:
            graph.lint()
            if graph.owning_module is not None:
                graph.owning_module.recompile()
        return total

    def report(self) -> None:
        """Say it, of each pass once that it found nothing, and then no more of what was said."""
        if self.reported and not self.unsaid:
            return
        for name in self.passes:
            places = [changed[name] for trains, changed in self.unsaid if name not in WITHOUT_GRADIENTS or not trains]
            if name in WITHOUT_GRADIENTS and not places:
                if not self.reported:
                    logger.info(f"Graph pass {name}: waits for graphs without gradients, compiled when first needed")
                continue
            if any(places) or name not in self.said:
                done = f"{_many(sum(places), 'place')} changed" if any(places) else "found nothing to change"
                without = " without gradients" if name in WITHOUT_GRADIENTS else ""
                later = " compiled later" if self.reported else ""
                hint = "" if any(places) else self._hint(name)
                logger.info(f"Graph pass {name}: {done}, in {_many(len(places), 'graph')}{without}{later}{hint}")
                self.said.add(name)
            refused = self.limits[name].refused if name in self.limits else Counter()
            for reason, times in refused.items():
                logger.info(f"Graph pass {name}: in {_many(times, 'place')} {reason}")
            refused.clear()
        self.reported = True
        self.unsaid.clear()

    def _hint(self, name: str) -> str:
        """What may be why it found nothing."""
        if name == "sequence_parallel" and not self.whole_inputs:
            return "; of inputs it knows only by npu.sp_whole_inputs that they are the same on all ranks"
        return ""


def report(model_parts: Iterable[nn.Module]) -> None:
    """Say what the passes of a job did to the graphs that were compiled since this was last called."""
    parts: Any = [part for part in model_parts if hasattr(part, "graph_passes")]
    for passes in dict.fromkeys(part.graph_passes for part in parts):  # parts share theirs
        passes.report()


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
