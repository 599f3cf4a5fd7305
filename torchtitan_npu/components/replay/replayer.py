"""Train with recorded decisions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torchtitan.tools.utils import device_type

from torchtitan_npu.components.replay.record_files import (
    EXPERTS,
    KINDS,
    NONE,
    StepReader,
    header_difference,
    naming_the_option,
    read_header,
    recorded_steps,
    step_folder,
    width,
)
from torchtitan_npu.components.replay.session import ReplaySession, by_sequence, shifted_keys
from torchtitan_npu.errors import UsageError, shown
from torchtitan_npu.layers.routing_decisions import RoutingDecisions
from torchtitan_npu.log import log_on_first_rank
from torchtitan_npu.torch_internals.autograd import in_backward_pass

SORTED_AT_ONCE = 2**23
"""RoutingDecisions that are compared at once: their sorting takes about 32 bytes for each."""


class Replayer(ReplaySession):
    """Replace the decisions of every training step by recorded ones, and count how many the layers would flip."""

    reader: StepReader
    counted: dict[str, Tensor]
    """For each kind (2, layers): the decisions that a layer would not have made, and all, since the last metrics."""
    _last: tuple[Any, Tensor] | None = None

    def start(self) -> None:
        with naming_the_option():
            if difference := header_difference(read_header(self.folder), self.header):
                raise UsageError(f"{self.folder}: {difference}")
            steps = recorded_steps(self.folder)
            if missing := sorted(set(range(self.step, self.job_config.training.steps + 1)) - set(steps)):
                has = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
                raise UsageError(f"{self.folder} has no step {missing[0]}; it has {has}")
        self.reset_counts()
        log_on_first_rank(f"replay: the decisions of each step are those of {self.folder}")

    def reset_counts(self) -> None:
        self.counted = {
            kind: torch.zeros(2, len(header["layers"]), dtype=torch.int64, device=device_type)
            for kind, header in self.header["choices"].items()
        }

    def start_step(self, step: int) -> None:
        super().start_step(step)
        self._last = None
        with naming_the_option():
            self.reader = StepReader(step_folder(self.folder, step), self.rank)

    @property
    def replays_now(self) -> bool:  # type: ignore[override]
        return self.runs_now

    def choose(self, decisions: RoutingDecisions, made: Tensor, query_positions: Tensor | None) -> Tensor:
        tokens = len(self.positions_of(decisions))
        values = by_sequence(made, tokens)
        recorded = self._read(decisions, len(values), made.device)
        chosen = recorded
        if query_positions is not None:
            offset = self._positions(decisions, made.device) - query_positions
            chosen, values = shifted_keys(recorded, -offset), shifted_keys(values, offset)
        if self.owns(decisions) and not in_backward_pass():
            self._count(decisions, values, recorded)
        return chosen.reshape(made.shape).to(made.dtype)

    def recorded(self, decisions: RoutingDecisions, query_positions: Tensor) -> Tensor:
        keys = self._read(decisions, len(query_positions), query_positions.device)
        return shifted_keys(keys, query_positions - self._positions(decisions, query_positions.device)).unsqueeze(2)

    def _positions(self, decisions: RoutingDecisions, device: torch.device) -> Tensor:
        return torch.as_tensor(self.positions_of(decisions), device=device)

    def _read(self, decisions: RoutingDecisions, rows: int, device: torch.device) -> Tensor:
        """Return the recorded decisions of the current microbatch, int32 (rows, tokens, top_k); keys are positions."""
        part = self.rows(rows)
        key = (decisions.kind, decisions.layer, self.first_row + part.start)
        if self._last is None or self._last[0] != key:  # attention asks twice
            positions = self.positions_of(decisions)
            header = self.header["choices"][decisions.kind]
            sequences = self.sequences[part]
            with naming_the_option():
                values = self.reader.read(decisions.kind, decisions.layer, sequences, positions, width(header))
                if not in_backward_pass():
                    self._check(decisions, values, part, positions)
            padded = F.pad(torch.from_numpy(values), (0, decisions.top_k - values.shape[2]), value=NONE)
            self._last = key, padded.to(device)
        return self._last[1]

    def _check(self, decisions: RoutingDecisions, values: np.ndarray, part: slice, positions: np.ndarray) -> None:
        """Raise if a decision is not possible: it would train a wrong model.

        ``values`` (sequences, tokens, width) are those of ``part`` of the batch, at ``positions`` of each sequence.
        """
        if decisions.kind == EXPERTS:
            wrong = (values < 0) | (values >= decisions.out_of)
            problems = {
                f"are not all from 0 to {decisions.out_of - 1}": wrong.any(axis=-1),
                "have an expert twice": has_duplicates(values),
            }
            problem = first_problem(problems)
        else:
            problem = problem_of_keys(values, positions, self.first_keys[part][:, positions])
        if problem is None:
            return
        what, (row, token) = problem
        name, position = self.sequences[part][row][0], int(positions[token])
        raise UsageError(
            f"{self.reader.file_of(decisions.kind, decisions.layer, name, position)}: the {decisions.kind} "
            f"{shown(values[row, token].tolist())} of layer {decisions.layer} at position {position} of sequence "
            f"{name} {what}"
        )

    def _count(self, decisions: RoutingDecisions, made: Tensor, recorded: Tensor) -> None:
        at = self.header["choices"][decisions.kind]["layers"].index(decisions.layer)
        parts = (values.flatten(0, 1).split(max(1, SORTED_AT_ONCE // values.shape[-1])) for values in (made, recorded))
        for made, used in zip(*parts, strict=True):
            self.counted[decisions.kind][:, at] += torch.stack([count_absent(used, made), (used >= 0).sum()])

    def metrics(self) -> dict[str, int]:
        """Return the number of flipped decisions since the last call, of all layers and of each. Collective."""
        found: dict[str, int] = {}
        for kind, counted in self.counted.items():
            layers = self.header["choices"][kind]["layers"]
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(counted)
            flipped, all_decisions = counted.tolist()
            found[f"replay/flipped_{kind}"] = sum(flipped)
            found[f"replay/{kind}"] = sum(all_decisions)
            found |= {f"replay/flipped_{kind}/layer_{n}": number for n, number in zip(layers, flipped, strict=True)}
        self.reset_counts()
        return found


Problem = tuple[str, tuple[int, int]] | None
"""The fault, and its first (sequence, token)."""


def problem_of_keys(keys: np.ndarray, positions: np.ndarray, first_keys: np.ndarray) -> Problem:
    """Return why ``keys`` (sequences, tokens, top_k) are not possible, or ``None``.

    Their queries are at ``positions`` (tokens). They see the positions from ``first_keys`` (sequences, tokens) on.
    """
    is_key = keys >= 0
    return first_problem(
        {
            "have a negative number other than -1": (keys < NONE).any(axis=-1),
            "have no key": ~is_key.any(axis=-1),
            "have -1 before a key": (is_key[..., 1:] & ~is_key[..., :-1]).any(axis=-1),
            "have a key after the query": (keys > positions[:, None]).any(axis=-1),
            "have a key of another document": (is_key & (keys < first_keys[..., None])).any(axis=-1),
            "have a key twice": has_duplicates(keys),
        }
    )


def first_problem(problems: dict[str, Any]) -> Problem:
    """Return the first of ``problems``, by what is wrong, that a token (sequences, tokens) has."""
    for what, is_wrong in problems.items():
        if is_wrong.any():
            row, token = np.argwhere(is_wrong)[0]
            return what, (int(row), int(token))
    return None


def has_duplicates(decisions: np.ndarray) -> Any:
    """Return whether a token (sequences, tokens) has a decision twice. Negative numbers are no decisions."""
    ordered = np.sort(decisions, axis=-1)
    return ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(axis=-1)


def flip_summary(metrics: dict[str, int]) -> str:
    """Return the totals of :meth:`Replayer.metrics` as text."""
    kinds = [kind for kind in KINDS if f"replay/{kind}" in metrics]
    return "  ".join(
        f"flipped {kind}: {metrics[f'replay/flipped_{kind}']} of {metrics[f'replay/{kind}']}" for kind in kinds
    )


def count_absent(decisions: Tensor, among: Tensor) -> Tensor:
    """Return how many of ``decisions`` (tokens, top_k) are not ``among`` (tokens, top_k) of the same token.

    Negative numbers are no decisions. The decisions of a token differ from each other.
    """
    ordered = torch.cat([decisions, among.to(decisions.dtype)], dim=-1).sort(dim=-1).values
    common = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    return (decisions >= 0).sum() - common.sum()
