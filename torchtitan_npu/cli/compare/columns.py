"""Names under which the supported sources store the step and the metrics."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .curves import AUXILIARY, GRAD_NORM, LOSS, METRICS, InputError

STEP = "step"
Columns = dict[str, tuple[str, ...]]

# The names of this package, TorchTitan (TensorBoard and W&B), and the Hugging Face Trainer. W&B's own counter comes
# last: it counts log calls, not steps, if a program does not set it.
NAMES: Columns = {
    STEP: (STEP, "global_step", "train/global_step", "_step", "Step"),
    LOSS: (LOSS, "loss_metrics/global_avg_loss", "train/loss"),
    GRAD_NORM: (GRAD_NORM, "train/grad_norm"),
    **{name: (name, f"loss_metrics/{name}") for name in AUXILIARY},
}
# W&B's web page names a column "run - metric" and adds the extremes of each interval.
_RUN_SEPARATOR = " - "


def parse_columns(given: Iterable[str]) -> Columns:
    """Parse ``metric=name`` of ``--column``. The names of one metric replace its usual names."""
    named: Columns = {}
    for text in given:
        metric, _, name = text.partition("=")
        if metric not in (STEP, *METRICS) or not name:
            raise InputError(f"--column {text}: expected METRIC=NAME with one of {', '.join((STEP, *METRICS))}")
        named[metric] = (*named.get(metric, ()), name)
    return NAMES | named


def find_column(source: str, names: Iterable[str], columns: Collection[str]) -> str | None:
    """Return the first of ``names`` among ``columns``, also as the metric of a ``run - metric``, or None.

    Several runs in one file are an error: only the user knows which one to compare.
    """
    for name in names:
        if name in columns:
            return name
        of_runs = [column for column in columns if column.endswith(_RUN_SEPARATOR + name)]
        if len(of_runs) > 1:
            raise InputError(f"{source}: several runs have {name}; choose one with --column, for example {of_runs[0]}")
        if of_runs:
            return of_runs[0]
    return None
