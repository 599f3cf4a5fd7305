"""Compare the curves of a debug model on parallel layouts with an eager run on one rank, in float32.

Every run has the same global batches and initial weights. Each rank is a process of this machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from rich.console import Console
from torch.distributed import TCPStore
from torch.multiprocessing import start_processes

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.progress import Progress

from .cases import LAYOUTS, ranks_of
from .training import (
    GLOBAL_BATCH,
    Curve,
    add_flavor,
    applicable_converters,
    check_job,
    job_config,
    largest_difference,
    train,
)


def compare_layouts(name: str, args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Return a row for each of ``args.layouts``, or for all layouts on up to ``args.ranks`` ranks."""
    add_flavor(name)
    variants: dict[str, list[str]] = {"": []}
    if args.converters:
        variants[", all converters"] = applicable_converters(name)
    reference = run(name, "", [], args)
    console.print(f"{name}: one rank, eager, loss {reference.losses[0]:.4f} to {reference.losses[-1]:.4f}")
    rows = []
    for layout in args.layouts or [layout for layout in LAYOUTS if ranks_of(layout) <= args.ranks]:
        row: dict[str, Any] = {"model": name, "layout": layout, "ranks": ranks_of(layout)}
        try:
            for what, converters in variants.items():
                curve = run(name, layout, converters, args)
                row[f"loss{what}"] = largest_difference(curve.losses, reference.losses)
                row[f"gradient norm{what}"] = largest_difference(curve.exact_norms, reference.exact_norms)
                row[f"norm as reported{what}"] = largest_difference(curve.norms, reference.norms)
                console.print(f"{name}: {layout}{what}, {row[f'loss{what}']:.1e} {row[f'gradient norm{what}']:.1e}")
        except UsageError as error:
            if args.layouts:  # the user named this layout
                raise
            console.print(f"{name}: {layout} is skipped: {error}")
        else:
            rows.append(row)
    return rows


def run(name: str, layout: str, converters: list[str], args: argparse.Namespace) -> Curve:
    """Train with one process per rank of ``layout``, or on one rank if it is empty."""
    config = job_config(name, converters, args.steps, args.seq_len, args.lr)
    for key, value in LAYOUTS[layout].items() if layout else ():
        setattr(config.parallelism, key, value)
    parallelism, ranks = config.parallelism, ranks_of(layout)
    data_ranks = parallelism.data_parallel_replicate_degree * max(parallelism.data_parallel_shard_degree, 1)
    config.training.local_batch_size = GLOBAL_BATCH // data_ranks
    config.dsa.document_mask = args.documents
    config.training.max_norm = (
        1e9  # no clipping: it would scale gradients by a rounded norm before exact_norm reads them
    )
    check_job(config, ranks)
    # Importing TorchTitan takes seconds: a fork server does it once for all ranks.
    multiprocessing.set_forkserver_preload(["torchtitan_npu.train"])
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the machine's cores
    # As with torchrun, the parent opens the store: a free port could be taken before rank 0 opens it.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        with Progress(f"parity: training {name}, {args.steps} steps on {layout or 'one rank'}"):
            start_processes(_rank, (name, config, ranks, store.port, folder), ranks, start_method="forkserver")
        curves = [Curve(**json.loads(file.read_text())) for file in Path(folder).iterdir()]
        # Only the last pipeline stage has the loss, the others report -1. NaN counts as a loss.
        return next(curve for curve in curves if not curve.losses[0] < 0)


def _rank(rank: int, name: str, config: JobConfig, ranks: int, port: int, folder: str) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    add_flavor(name)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    curve = train(config, rank, ranks, port)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(curve._asdict()))
