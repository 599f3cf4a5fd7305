"""Draw combinations of a model, a layout and options, so that all pairs of their values occur.

Each part of a draw has a few values, the simplest first. A value of ``None`` means that the part does not apply, such
as a pipeline schedule on one stage.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, count, product
from typing import Any

Draw = dict[str, Any]
Pair = tuple[str, Any, str, Any]

DEGREES = {
    "replicate": "data_parallel_replicate_degree",
    "shard": "data_parallel_shard_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}
"""The degrees of a layout and their keys in ``[parallelism]``. EP and ETP reuse the ranks of the other degrees."""
SPLITTING = ("replicate", "shard", "tp", "cp", "pp")
"""The degrees whose product is the number of ranks."""

VALUES: dict[str, tuple[Any, ...]] = {
    "replicate": (1, 2, 4),
    "shard": (1, 2, 3, 4, 8),
    "tp": (1, 2, 4),
    "cp": (1, 2, 4),
    "pp": (1, 2, 4),
    "ep": (1, 2, 4, 8),
    "etp": (1, 2),
    "schedule": ("1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"),
    "microbatch": (1, 2),
    "balancer": ("headtail", ""),
    "reshard": ("default", "always", "never"),
    "checkpointing": ("none", "full", "selective 2", "selective op"),
    "converters": ("none", "all", "some"),
    "compile": ("off", "aot_eager", "bypass", "passes"),
    "accumulation": (1, 2, 4),
    "documents": (False, True),
    "masked labels": (False, True),
    "loss chunk": (0, 24),
    "batch": (4, 6, 8, 12),
    "length": (16, 32, 48, 64),
}
"""The values of each part except the model, the simplest first. All degrees but 1 need ranks."""
PARTS = ("model", *VALUES)
CANDIDATES = 60
"""A draw is the best of this many random ones."""
ATTEMPTS = 40
"""A fault is shrunk by at most this many further draws."""


@dataclass(frozen=True)
class DrawnModel:
    """A model that can be drawn, and the values that apply to it."""

    name: str
    has_experts: bool
    has_documents: bool
    """Documents can be turned on and off."""
    shortest: int = 1
    """Tokens that a sequence needs for the model's data."""


class Draws:
    """An endless sequence of draws, the same for the same ``seed``.

    Each draw is the random candidate with the most pairs of values that are new or rare, relative to its cost. Besides
    its parts it has a number, ``subset``, from which "some" converters are selected. So they stay when it is shrunk.
    """

    def __init__(self, models: Sequence[DrawnModel], ranks: int, seed: int) -> None:
        self.models, self.ranks, self.random = models, ranks, random.Random(seed)
        self.layouts = {has_experts: list(layouts(ranks, has_experts)) for has_experts in (False, True)}
        self.seen: Counter[Pair] = Counter()

    def __iter__(self) -> Iterator[Draw]:
        for number in count():
            draw = max((self.candidate() for _ in range(CANDIDATES)), key=self.worth)
            self.seen.update(pairs(draw))
            yield {**draw, "subset": number}

    def worth(self, draw: Draw) -> float:
        return sum(2.0 ** -self.seen[pair] for pair in pairs(draw)) / cost(draw)

    def candidate(self) -> Draw:
        """Return a random draw whose sizes fit."""
        while True:
            model = self.random.choice(self.models)
            degrees = self.random.choice(self.layouts[model.has_experts])
            options = {part: self.random.choice(values) for part, values in VALUES.items() if part not in DEGREES}
            draw = applicable({"model": model.name, **degrees, **options}, model)
            if fits(draw, model):
                return draw


def layouts(ranks: int, has_experts: bool) -> Iterator[dict[str, int]]:
    """Yield the degrees of all layouts on 2 to ``ranks`` ranks."""
    for degrees in product(*(VALUES[name] for name in SPLITTING)):
        found = dict(zip(SPLITTING, degrees, strict=True))
        if not 1 < math.prod(degrees) <= ranks:
            continue
        for ep, etp in product(VALUES["ep"], VALUES["etp"]) if has_experts else [(1, 1)]:
            if etp not in (1, found["tp"]) or (ep == 1 and etp > 1):
                continue
            if math.prod(found[name] for name in ("shard", "cp", "tp")) % (ep * etp) == 0:
                yield {**found, "ep": ep, "etp": etp}


def applicable(draw: Draw, model: DrawnModel) -> Draw:
    """Return ``draw`` with ``None`` for every part that has no effect."""
    pipelined, data_ranks = draw["pp"] > 1, draw["shard"] * draw["cp"]
    excluded = {
        "ep": not model.has_experts,
        "etp": not model.has_experts or draw["tp"] == 1 or draw["ep"] in (1, None),
        "schedule": not pipelined,
        "microbatch": not pipelined,
        "balancer": draw["cp"] == 1,
        "reshard": data_ranks == 1,
        "documents": not model.has_documents,
    }
    return {part: None if excluded.get(part) else value for part, value in draw.items()}


def fits(draw: Draw, model: DrawnModel) -> bool:
    """Return whether the sequence holds the data and can be split, as the batch. The job's checks find other limits."""
    if draw["length"] < model.shortest:
        return False
    batches = draw["replicate"] * draw["shard"] * draw["accumulation"]
    if draw["batch"] % batches or draw["length"] % (2 * draw["tp"] * draw["cp"]):
        return False
    local = draw["batch"] // batches
    return draw["pp"] == 1 or (local % draw["microbatch"] == 0 and local // draw["microbatch"] >= draw["pp"])


def on_one_rank(model: DrawnModel, converters: str) -> Draw:
    """Return the simplest draw of ``model`` with these converters, ``"all"`` or a name, on the longest sequences."""
    simplest = {part: values[0] for part, values in VALUES.items()}
    sizes = {"length": VALUES["length"][-1], "converters": converters, "subset": 0}
    return applicable({"model": model.name, **simplest, **sizes}, model)


def ranks_of(draw: Draw) -> int:
    return math.prod(draw[name] for name in SPLITTING)


def cost(draw: Draw) -> float:
    """Return roughly how long a draw takes: each rank costs, and more so if it compiles."""
    return 2 + ranks_of(draw) * (1 if draw["compile"] == "off" else 3)


def pairs(draw: Draw) -> Iterable[Pair]:
    """Return the pairs of values in ``draw``, in the order of its parts."""
    applied = [(part, draw[part]) for part in PARTS if draw[part] is not None]
    return [(*one, *other) for one, other in combinations(applied, 2)]


def shrink(
    draw: Draw, model: DrawnModel, still_fails: Callable[[Draw], bool], attempts: int = ATTEMPTS
) -> tuple[Draw, bool]:
    """Simplify single parts of ``draw`` as long as it fails. Return it, and whether no simpler value was left to try.

    Otherwise the number of ``attempts`` was reached.
    """
    while True:
        for candidate in simpler(draw, model):
            attempts -= 1
            if attempts < 0:
                return draw, False
            if still_fails(candidate):
                draw = candidate
                break
        else:
            return draw, True


def simpler(draw: Draw, model: DrawnModel) -> Iterator[Draw]:
    """Yield the draws in which one part has a simpler value, the simplest first."""
    for part, values in VALUES.items():
        if draw[part] is None:
            continue
        known = draw[part] in values  # the name of one converter is not
        for value in values[: values.index(draw[part])] if known else values[:1]:
            one = applicable({**draw, part: value}, model)
            if fits(one, model):
                yield one


def describe(draw: Draw) -> str:
    """Return a draw in one line: the parts that differ from the simplest value, and the sizes."""
    words = [str(draw["model"])]
    for part, values in VALUES.items():
        value = draw[part]
        if value is None or (value == values[0] and part not in ("batch", "length")):
            continue
        if part in DEGREES:
            words.append(f"{part}{value}")
        elif value is True:
            words.append(part)
        elif part == "balancer":
            words.append("contiguous")
        else:
            words.append(str(value) if part == "schedule" else f"{part} {value}")
    return ", ".join(words)
