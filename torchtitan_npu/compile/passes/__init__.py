"""Graph passes: functions that rewrite an ``fx.Graph`` and return the number of changes.

They take the graphs that AOTAutograd traces, joint or inference graphs, with functional collectives. They do not depend
on the backend that compiles the graphs afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import fx, nn
from torchtitan.tools.logging import logger

from torchtitan_npu.compile.passes.async_tp import async_tp
from torchtitan_npu.compile.passes.graph_utils import KernelLimits, has_backward
from torchtitan_npu.compile.passes.sequence_parallel import sequence_parallel
from torchtitan_npu.compile.passes.simple import add_rms_norm, all_gather_chunk, no_ops

Pass = Callable[[fx.Graph], int]

PASSES: dict[str, Callable[..., int]] = {
    "no_ops": no_ops,
    "all_gather_chunk": all_gather_chunk,
    "sequence_parallel": sequence_parallel,
    "async_tp": async_tp,
    "add_rms_norm": add_rms_norm,
}
"""Passes by their name in ``[npu] graph_passes``. They run in this order, whatever the order in the key."""
WITH_LIMITS = ("async_tp", "add_rms_norm")
"""Passes that insert operators with NPU limits."""
INFERENCE_ONLY = ("add_rms_norm",)
"""Passes that do not change training graphs."""


class GraphPasses:
    """The graph passes of a job. Call it with a graph to run them; :meth:`report` logs what they changed.

    ``sequence_parallel`` must see the joint graph of a training step, or the graph of a region without gradients. In
    the two halves of a joint graph an input may be a value of one rank only. The other passes also work on the halves.
    """

    def __init__(
        self,
        names: Sequence[str],
        sp_min_tokens: int = 1000,
        sp_whole_inputs: bool = False,
        strict_limits: bool = False,
    ) -> None:
        self.limits = {name: KernelLimits(strict_limits) for name in WITH_LIMITS if name in names}
        options: dict[str, dict[str, Any]] = {name: {"limits": limits} for name, limits in self.limits.items()}
        options["sequence_parallel"] = {"min_tokens": sp_min_tokens, "replicated_inputs": sp_whole_inputs}
        self.passes: dict[str, Pass] = {
            name: partial(PASSES[name], **options.get(name, {})) for name in sorted(set(names), key=[*PASSES].index)
        }
        self.replicated_inputs = sp_whole_inputs
        self.changed: Counter[str] = Counter()
        """Number of changes in all graphs, by pass."""
        self.unreported: list[tuple[bool, dict[str, int]]] = []
        """For each graph since the last report: whether it has a backward pass, and the changes by pass."""
        self.has_reported = False
        self.reported_passes: set[str] = set()
        """Passes with a line in an earlier report."""

    def __call__(self, module: fx.GraphModule | fx.Graph) -> int:
        graph = module.graph if isinstance(module, fx.GraphModule) else module
        changed = {name: function(graph) for name, function in self.passes.items()}
        self.changed.update(changed)
        self.unreported.append((has_backward(graph), changed))
        total = sum(changed.values())
        if total:
            graph.lint()
            if graph.owning_module is not None:
                graph.owning_module.recompile()
        return total

    def report(self) -> None:
        """Log what each pass changed since the last report. A pass that found nothing is logged once."""
        if self.has_reported and not self.unreported:
            return
        for name in self.passes:
            counts = [changed[name] for trains, changed in self.unreported if name not in INFERENCE_ONLY or not trains]
            if name in INFERENCE_ONLY and not counts:
                if not self.has_reported:
                    logger.info(f"Graph pass {name}: waits for graphs without gradients, compiled when first needed")
                continue
            if any(counts) or name not in self.reported_passes:
                done = f"{_count(sum(counts), 'place')} changed" if any(counts) else "found nothing to change"
                without = " without gradients" if name in INFERENCE_ONLY else ""
                later = " compiled later" if self.has_reported else ""
                hint = ""
                if name == "sequence_parallel" and not any(counts) and not self.replicated_inputs:
                    hint = "; set npu.sp_whole_inputs if the inputs of a block are the same on all ranks"
                logger.info(f"Graph pass {name}: {done}, in {_count(len(counts), 'graph')}{without}{later}{hint}")
                self.reported_passes.add(name)
            unsupported = self.limits[name].unsupported if name in self.limits else Counter()
            for reason, times in unsupported.items():
                logger.info(f"Graph pass {name}: in {_count(times, 'place')} {reason}")
            unsupported.clear()
        self.has_reported = True
        self.unreported.clear()


def report(model_parts: Iterable[nn.Module]) -> None:
    """Log what a job's passes changed in the graphs compiled since the last call."""
    parts: Any = [part for part in model_parts if hasattr(part, "graph_passes")]
    for passes in dict.fromkeys(part.graph_passes for part in parts):  # the parts use the same object
        passes.report()


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
