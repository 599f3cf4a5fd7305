#!/usr/bin/env python
"""Errors of gradients in MXFP8 against float32: which modules and recipes cost accuracy.

    python tools/bench/mxfp8_gradients.py --json FILE [--only deepseek_v32 qwen3] [--steps 100] [--batches 4] [--tiny]
    python tools/bench/mxfp8_gradients.py --table FILE

Losses of single runs differ by more than MXFP8 costs (``mxfp8_loss.py``). Gradients of the same weights and batches do
not: on a CPU the rows are bit-identical if they are repeated.

The models are those of ``mxfp8_loss.py``; ``--tiny`` has debug models, for a CPU. They are measured with their initial
weights and after ``--steps`` of training in bfloat16, on batches that follow the training's. Each row has the gradients
of the same ``--batches``, without an update. All rows but those with "own choices" replay the experts and keys that the
float32 run has selected, so that errors are those of arithmetic, and count the decisions that they would have changed.

The file is written after each row, and a repeated call continues with the missing rows. It reads the trained weights
from FILE's name with the model's name and ``.pt``. The host holds the float32 gradients of all batches.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness import parser_of, trainer_of
from mxfp8_loss import (
    EXPERTS,
    MODELS,
    NOT_QUANTIZED,
    RECIPES,
    add_options,
    filtered,
    free_memory,
    job,
    leave_one_out,
    prepare,
    print_table_of,
)

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = ("initial", "trained")
FLOAT32 = ["--training.mixed_precision_param", "float32"]
UNFILTERED = {"deepseek_v32": ("output",), "qwen3": ("output", "router.gate")}
"""Parts of the default filter that are quantized without it. An indexer never is, nor a router of 8 experts."""
OWN_CHOICES = ", own choices"
INDEXER = "indexer"

Gradients = dict[str, "Tensor"]


def rows_of(model: str) -> dict[str, tuple[bool, list[str]]]:
    """Return by name whether a row uses MXFP8, and its options."""
    linear: dict[str, str] = MODELS[model]["linear"]
    rows: dict[str, list[str]] = {"mxfp8": [], f"mxfp8{OWN_CHOICES}": []}
    for group in linear:
        remaining = [part for other, part in linear.items() if other != group]
        rows[f"only {group}"] = ["--mxfp8.no-experts", *filtered(*NOT_QUANTIZED, *remaining)]
    rows["only experts"] = EXPERTS["only experts"]
    if len(linear) > 1:  # of two groups, one without the other is the other
        rows |= leave_one_out(model)
    rows |= RECIPES
    for part in UNFILTERED[model]:
        rows[f"also {part}"] = filtered(*(other for other in NOT_QUANTIZED if other != part))
        if part == "router.gate":  # its error matters most where it changes the selected experts
            rows[f"also {part}{OWN_CHOICES}"] = rows[f"also {part}"]
    plain: dict[str, tuple[bool, list[str]]] = {"bf16": (False, []), f"bf16{OWN_CHOICES}": (False, [])}
    return plain | {name: (True, options) for name, options in rows.items()}


def parameter_group(model: str, name: str) -> str:
    """Return the group of a parameter by its name."""
    parts = {INDEXER: "indexer", "router": "router", **MODELS[model]["linear"], "experts": "experts"}
    return next((group for group, part in parts.items() if f".{part}." in name), "embedding, output and norms")


def train_weights(model: str, args: argparse.Namespace) -> dict[str, Tensor]:
    """Train in bfloat16. Return the weights and buffers."""
    with trainer_of(job(model, False, ["--debug.seed", "0"], args)) as trainer:
        batches = trainer.batch_generator(trainer.dataloader)
        for step in range(1, args.steps + 1):
            trainer.step = step
            trainer.train_step(batches)
    state = {name: tensor.cpu() for name, tensor in trainer.model_parts[0].state_dict().items()}
    del trainer, batches
    free_memory()
    return state


def run(
    model: str,
    quantized: bool,
    options: list[str],
    weights: dict[str, Tensor] | None,
    args: argparse.Namespace,
    visit: Callable[[Gradients], None],
) -> dict[str, Any]:
    """Compute the gradients of each batch and pass them to ``visit``. Return the losses and the changed decisions.

    Without ``weights``, the model has its initial ones.
    """
    from torchtitan.components.loss import IGNORE_INDEX

    from torchtitan_npu.components.replay.replayer import Replayer

    losses: list[float] = []
    start = time.perf_counter()
    options = ["--debug.seed", "0", "--training.steps", str(args.batches), *options]
    with trainer_of(job(model, quantized, options, args)) as trainer:
        part = trainer.model_parts[0]
        if weights is not None:
            part.load_state_dict(weights)
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in range(args.steps):
            next(batches)
        for step in range(1, args.batches + 1):
            inputs, labels = next(batches)
            inputs, labels = {name: x.to(trainer.device) for name, x in inputs.items()}, labels.to(trainer.device)
            trainer.step = step
            trainer.optimizers.zero_grad()
            if trainer.replay:
                trainer.replay.start_step(step)
            loss = trainer.forward_backward_step(
                input_dict=inputs, labels=labels, global_valid_tokens=(labels != IGNORE_INDEX).sum().float()
            )
            if trainer.replay:
                trainer.replay.end_step()
            losses.append(loss.item())
            visit({name: x.grad for name, x in part.named_parameters() if x.grad is not None})
        decisions = trainer.replay.metrics() if isinstance(trainer.replay, Replayer) else {}
    del trainer, part, batches
    free_memory()
    counts = {name.removeprefix("replay/"): number for name, number in decisions.items() if "layer" not in name}
    return {"losses": losses, "choices": counts, "seconds": time.perf_counter() - start}


def squares(model: str, gradients: Gradients, minus: Gradients | None = None) -> dict[str, float]:
    """Return the sum of squares of ``gradients``, or of their differences, by group of parameters."""
    sums: dict[str, float] = {}
    for name, gradient in gradients.items():
        values = gradient.double() if minus is None else gradient.double() - minus[name].to(gradient.device)
        group = parameter_group(model, name)
        sums[group] = sums.get(group, 0.0) + values.square().sum().item()
    return sums


class Reference:
    """The float32 run of a model: its gradients, and its routing decisions in ``folder``."""

    def __init__(self, model: str, weights: dict[str, Tensor] | None, args: argparse.Namespace, folder: str) -> None:
        self.model, self.weights, self.args = model, weights, args
        self.folder = f"{folder}/decisions"
        self.gradients: list[Gradients] = []
        self.result = run(model, False, [*FLOAT32, "--replay.record", self.folder], weights, args, self._keep)
        self.squares = [squares(model, gradients) for gradients in self.gradients]

    def _keep(self, gradients: Gradients) -> None:
        self.gradients.append({name: gradient.cpu().clone() for name, gradient in gradients.items()})

    def row(self) -> dict[str, Any]:
        return self.result | {"squares": self.squares}

    def compare(self, quantized: bool, options: list[str], replay: bool = True) -> dict[str, Any]:
        """Run a variant on the same batches. Return its row, with the squared error of each group of parameters."""
        errors: list[dict[str, float]] = []

        def visit(gradients: Gradients) -> None:
            expected = self.gradients[len(errors)]
            if gradients.keys() != expected.keys():
                raise RuntimeError(f"gradients of other parameters: {sorted(gradients.keys() ^ expected.keys())}")
            errors.append(squares(self.model, gradients, expected))

        replayed = ["--replay.replay", self.folder] if replay else []
        return run(self.model, quantized, [*options, *replayed], self.weights, self.args, visit) | {"squares": errors}


def relative_errors(row: dict[str, Any], reference: dict[str, Any], group: str = "") -> list[float]:
    """Return the relative error of the gradient of each batch.

    It is that of a ``group`` of parameters, or of all but the indexers, whose loss is another.
    """

    def total(sums: dict[str, float]) -> float:
        return sum(value for name, value in sums.items() if (name == group if group else name != INDEXER))

    pairs = zip(row["squares"], reference["squares"], strict=True)
    return [math.sqrt(total(errors) / total(of_reference)) for errors, of_reference in pairs]


def table(rows: list[dict[str, Any]]) -> str:
    """Return Markdown tables of each model: the errors of its rows, and errors by group of parameters."""
    text: list[str] = []
    for model in MODELS:
        measured: dict[str, dict[str, Any]] = {weights: {} for weights in WEIGHTS}
        for row in rows:
            if row["model"] == model:
                measured[row["weights"]][row["variant"]] = row
        if all(of_weights.keys() >= {"float32", "bf16", "mxfp8"} for of_weights in measured.values()):
            text += [*errors_of_rows(model, measured), "", *errors_by_group(model, measured), ""]
    return "\n".join(text)


def errors_of_rows(model: str, measured: dict[str, dict[str, Any]]) -> list[str]:
    text = [f"| {model} | initial weights | share | trained weights | share | loss | flipped experts | flipped keys |"]
    text += ["|---|---|---|---|---|---|---|---|"]
    for name in rows_of(model):
        if not all(name in of_weights for of_weights in measured.values()):
            continue
        cells = [name]
        for of_weights in measured.values():
            error, low, high = (
                relative_errors(of_weights[row], of_weights["float32"]) for row in (name, "bf16", "mxfp8")
            )
            shares = [(a**2 - b**2) / (c**2 - b**2) for a, b, c in zip(error, low, high, strict=True)]
            cells += [mean_and_spread(error, ".2f"), f"{100 * statistics.mean(shares):.0f} %"]
        row, reference = measured["trained"][name], measured["trained"]["float32"]
        cells += [mean_and_spread([a / b - 1 for a, b in zip(row["losses"], reference["losses"], strict=True)], "+.3f")]
        for kind in ("experts", "keys"):
            counts = row["choices"]
            cells += [f"{100 * counts[f'flipped_{kind}'] / counts[kind]:.2f} %" if kind in counts else ""]
        text.append(f"| {' | '.join(cells)} |")
    return text


def errors_by_group(model: str, measured: dict[str, dict[str, Any]]) -> list[str]:
    groups = list(measured["trained"]["float32"]["squares"][0])
    text = [f"| {model}, trained weights | {' | '.join(groups)} |", "|---" * (len(groups) + 1) + "|"]
    for name, row in measured["trained"].items():
        if name in ("bf16", "mxfp8", *RECIPES):
            errors = (relative_errors(row, measured["trained"]["float32"], group) for group in groups)
            text.append(f"| {name} | {' | '.join(f'{100 * statistics.mean(error):.2f} %' for error in errors)} |")
    return text


def mean_and_spread(values: list[float], form: str) -> str:
    """Return mean and standard deviation in percent."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):{form}} ± {100 * spread:{form.lstrip('+')}} %"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batches", type=int, default=4)
    add_options(parser, 100)
    args = parser.parse_args()
    print_table_of(parser, args, table)
    stored = prepare(parser, args, "batches")
    import torch

    rows = stored["rows"]

    def add(model: str, weights: str, name: str, row: dict[str, Any]) -> None:
        rows.append({"model": model, "weights": weights, "variant": name, **row})
        args.json.write_text(json.dumps(stored, indent=1) + "\n")
        print(f"{model:13} {weights:8} {name:28} {row['seconds']:.0f} s", flush=True)

    for model in args.only:
        file = args.json.with_suffix(f".{model}.pt")
        for weights in WEIGHTS:
            done = {row["variant"] for row in rows if (row["model"], row["weights"]) == (model, weights)}
            missing = {name: row for name, row in rows_of(model).items() if name not in done}
            if not missing:
                continue
            state = None
            if weights == "trained":
                if not file.exists():
                    if done:
                        parser.error(f"{args.json} has rows of trained weights, but {file} does not exist")
                    torch.save(train_weights(model, args), file)
                state = torch.load(file, mmap=True)
            with tempfile.TemporaryDirectory() as folder:
                reference = Reference(model, state, args, folder)
                if "float32" not in done:
                    add(model, weights, "float32", reference.row())
                for name, (quantized, chosen) in missing.items():
                    add(model, weights, name, reference.compare(quantized, chosen, OWN_CHOICES not in name))
    print(table(rows))


if __name__ == "__main__":
    main()
