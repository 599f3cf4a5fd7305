"""Passes over compiled graphs: plain functions that take an ``fx.Graph`` and return how many places they changed.

Graphs are those that AOTAutograd makes, joint or inference, with functional collectives in them; which backend compiles
them afterwards does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import fx
from torchtitan.tools.logging import logger

from torchtitan_npu.compile.passes.add_rms_norm import add_rms_norm
from torchtitan_npu.compile.passes.all_gather_chunk import all_gather_chunk
from torchtitan_npu.compile.passes.async_tp import async_tp
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


class GraphPasses:
    """The passes that a job asks for. Calling it runs them on a graph, and says what they did.

    It is to see the joint graph of a training step, or the graph of a region without gradients; not the two halves that
    the former is cut into, whose inputs may be any one rank's.
    """

    def __init__(self, names: Sequence[str], sp_min_tokens: int = 1000) -> None:
        for name in names:
            if name not in PASSES:
                known = ", ".join(PASSES)
                raise UsageError(f"npu.graph_passes: no pass {name!r}{nearest(name, PASSES)}; there are {known}")
        if sp_min_tokens < 1:
            raise UsageError(f"npu.sp_min_tokens is {sp_min_tokens}; it must be at least 1")
        options = {"sequence_parallel": {"min_tokens": sp_min_tokens}}
        self.passes: dict[str, Pass] = {
            name: partial(function, **options.get(name, {})) for name, function in PASSES.items() if name in names
        }
        self._spoken: set[str] = set()  # passes that have changed something, or have said that they did not

    def __call__(self, given: fx.GraphModule | fx.Graph) -> int:
        graph = given.graph if isinstance(given, fx.GraphModule) else given
        total = 0
        for name, function in self.passes.items():
            changed = function(graph)
            total += changed
            if changed:
                logger.info(f"Graph pass {name}: {changed} places changed")
            elif name not in self._spoken:
                logger.info(f"Graph pass {name} found nothing to change in a graph; it says so once")
            self._spoken.add(name)
        if total:
            graph.lint()
            if graph.owning_module is not None:
                graph.owning_module.recompile()
        return total
