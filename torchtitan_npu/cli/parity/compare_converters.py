"""Compare the curves of a debug model with and without converters, on one rank."""

from __future__ import annotations

import argparse
import math
from statistics import median
from typing import Any

from rich.console import Console

from torchtitan_npu.progress import Progress

from .thresholds import PERTURBED
from .training import Curve, add_flavor, applicable_converters, job_config, largest_difference, train


def compare_converters(name: str, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Return a row for each applicable converter and one for all of them."""
    add_flavor(name)
    matching = applicable_converters(name)
    variants = {**{one: [one] for one in matching}, "all": matching}
    exact, perturbations = None, range(1)
    if args.dtype == "float32":
        variants[PERTURBED] = []
    else:
        exact, perturbations = run(name, [], "float32", args), range(args.samples)
    eager = [run(name, [], args.dtype, args, perturbation) for perturbation in perturbations]
    console.print(f"{name}: eager, loss {eager[0].losses[0]:.4f} to {eager[0].losses[-1]:.4f}")
    rows = []
    for what, converters in variants.items():
        curves = [
            run(name, converters, args.dtype, args, perturbation)
            for perturbation in ([1] if what == PERTURBED else perturbations)
        ]
        row: dict[str, Any] = {
            "model": name,
            "converters": what,
            "loss": largest_difference(curves[0].losses, eager[0].losses),
        }
        row["gradient norm"] = largest_difference(curves[0].norms, eager[0].norms)
        console.print(f"{name}: {what}, {row['loss']:.1e}")
        if exact:
            ours, theirs = (from_float32(some, exact) for some in (curves, eager))
            row |= {"from float32, median": median(ours), "farthest": ours[-1]}
            row |= {"eager, median": median(theirs), "eager, farthest": theirs[-1]}
            row["no farther"] = f"{sum(distance <= theirs[-1] for distance in ours)} of {len(ours)}"
            for whose, distances in (("ours", ours), ("eager", theirs)):
                console.print(f"  from float32, {whose}: " + " ".join(f"{distance:.1e}" for distance in distances))
        rows.append(row)
    return rows


def from_float32(curves: list[Curve], exact: Curve) -> list[float]:
    """Return the largest difference of each curve from the float32 one, sorted, NaN last."""
    return sorted(
        (largest_difference(curve.losses, exact.losses) for curve in curves),
        key=lambda value: (math.isnan(value), value),
    )


def run(name: str, converters: list[str], dtype: str, args: argparse.Namespace, perturbation: int = 0) -> Curve:
    config = job_config(name, converters, args.steps, args.seq_len, args.lr)
    config.training.mixed_precision_param = dtype  # type: ignore[assignment]
    with Progress(f"parity: training {name}, {args.steps} steps with {', '.join(converters) or 'no converters'}"):
        return train(config, perturbation=perturbation)
