"""Log-probabilities of tokens, and the perplexity of a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchtitan_npu.cli.inference.loading import InferenceModel
from torchtitan_npu.progress import Progress


class Score(NamedTuple):
    """The log-probabilities of the tokens of a continuation, each conditional on all tokens before it."""

    log_probabilities: Tensor
    """(tokens) float64"""
    is_greedy: bool
    """True if each token is the most probable one."""

    @property
    def total(self) -> float:
        return self.log_probabilities.sum().item()


def score(model: InferenceModel, pairs: list[tuple[list[int], list[int]]], batch: int) -> list[Score]:
    """Score the continuation of each pair of context and continuation. A context has at least one token.

    A pair that is longer than the model's sequences loses the beginning of its context.
    """
    scores = []
    with Progress("evaluate: scoring sequences") as progress:
        for first in range(0, len(pairs), batch):
            progress.update(f"evaluate: scoring sequence {first + 1} of {len(pairs)}", first / len(pairs))
            rows = pairs[first : first + batch]
            texts = [(context + continuation)[-model.longest - 1 :] for context, continuation in rows]
            inputs = [text[:-1] for text in texts]
            longest = max(map(len, inputs))
            padding = [longest - len(row) for row in inputs]
            tokens = torch.tensor([[0] * blanks + row for blanks, row in zip(padding, inputs, strict=True)])
            logits = model.logits(tokens, padding=padding)
            for (_, continuation), row in zip(rows, logits, strict=True):
                target = torch.tensor(continuation[-model.longest :], device=row.device)
                last = row[-len(target) :]
                chosen = last.log_softmax(dim=-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
                greedy = bool((last.argmax(dim=-1) == target).all())
                scores.append(Score(chosen.double().cpu(), greedy))
    return scores


def windows(tokens: list[int], longest: int) -> Iterator[tuple[list[int], list[int]]]:
    """Split ``tokens`` into pairs of context and continuation, so that each token but the first is predicted once.

    A window has ``longest`` tokens as input. Its first one is the last token of the window before.
    """
    for first in range(0, len(tokens) - 1, longest):
        yield tokens[first : first + 1], tokens[first + 1 : first + 1 + longest]


class Perplexity(NamedTuple):
    """exp of the mean negative log-probability of a text's tokens."""

    tokens: int
    log_probabilities: Tensor

    @classmethod
    def from_model(cls, model: InferenceModel, tokens: list[int], batch: int) -> Perplexity:
        scores = score(model, list(windows(tokens, model.longest)), batch)
        joined = torch.cat([one.log_probabilities for one in scores])
        return cls(len(joined), joined)

    @property
    def loss(self) -> float:
        """The mean cross-entropy per token."""
        return -self.log_probabilities.mean().item()

    @property
    def value(self) -> float:
        return math.exp(min(self.loss, 700.0))  # above, float64 overflows
