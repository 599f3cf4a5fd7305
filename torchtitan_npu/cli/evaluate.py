"""Measure a checkpoint: the perplexity of a text, and tasks of lm-evaluation-harness.

    torchtitan-npu evaluate --config X.toml --checkpoint DIR --text FILE [--converters npu_rms_norm,npu_rope]
    torchtitan-npu evaluate --config X.toml --checkpoint DIR --tasks lambada_openai,piqa [--limit 100] [--json FILE]
    torchrun --nproc_per_node 2 -m torchtitan_npu.cli.main evaluate --config X.toml ...

DIR is a checkpoint of a job (DCP) or a Hugging Face folder. Layouts, and options of the job (``--section.key value``),
are those of ``torchtitan-npu generate``. --converters measures the text without and with the named converters. Tasks
need ``pip install "torchtitan-npu[eval]"``. See docs/how-to/generate.md.
Exit code 0: measured. 1: a perplexity is not finite. 2: invalid arguments, an invalid job or checkpoint.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from torchtitan_npu.cli.arguments import OneLineParser, checkpoint_parser, read_utf8
from torchtitan_npu.errors import UsageError, one_line
from torchtitan_npu.progress import Progress

PROG = "torchtitan-npu evaluate"
DIFFERENCE = "largest difference of a log-probability"


def build_parser() -> OneLineParser:
    parser = checkpoint_parser(PROG, __doc__)
    parser.add_argument("--text", type=Path, help="UTF-8 text, for its perplexity")
    parser.add_argument("--converters", help="names with commas: compare the text's perplexity with that without any")
    parser.add_argument("--tasks", help="names of lm-evaluation-harness tasks, with commas")
    parser.add_argument("--tasks-folder", type=Path, help="folder with tasks as YAML files, in place of the harness's")
    parser.add_argument("--limit", type=int, help="examples of each task (default: all)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at a time (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments. The second result are options of the job."""
    parser = build_parser()
    args, options = parser.parse_known_args(argv)
    if not args.text and not args.tasks:
        parser.error("one of --text and --tasks is required")
    if args.converters is not None and not args.text:
        parser.error("--converters needs --text")
    if args.converters is not None and not args.converters.strip(","):
        parser.error("--converters names no converter")
    for option in ("batch", "limit"):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option} must be at least 1")
    if args.tasks and importlib.util.find_spec("lm_eval") is None:
        parser.error('--tasks needs lm-evaluation-harness: pip install "torchtitan-npu[eval]"')
    if args.tasks_folder and not args.tasks_folder.is_dir():
        parser.error(f"--tasks-folder {args.tasks_folder} is not a folder")
    return args, options


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    args, options = parse_args(argv)
    try:
        with warnings.catch_warnings(action="ignore"):
            results = run(args, options)
        if os.environ.get("RANK", "0") == "0":
            report(results)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    except (UsageError, OSError) as error:
        print(f"{PROG}: {one_line(error)}", file=sys.stderr)
        return 2
    return 0 if all(math.isfinite(row["loss"]) for row in results.get("perplexity", {}).values()) else 1


def run(args: argparse.Namespace, options: list[str]) -> dict[str, Any]:
    """Return the results: ``perplexity`` by converters, and ``tasks`` by name."""
    text = read_utf8("--text", args.text) if args.text else ""

    from torchtitan_npu import platform, register

    platform.prepare()
    register()

    from torchtitan_npu.cli.inference.loading import quiet_session, read_config

    with quiet_session():
        return measure(args, read_config(args.config, options), text)


def measure(args: argparse.Namespace, config: Any, text: str) -> dict[str, Any]:
    from torchtitan_npu.cli.inference.loading import load_model
    from torchtitan_npu.cli.inference.scoring import Perplexity

    results: dict[str, Any] = {}
    eager: Perplexity | None = None
    if args.converters is not None:
        config.model.converters = []
        with Progress(f"evaluate: loading {args.checkpoint}"):
            model = load_model(config, args.checkpoint)
        eager = Perplexity.from_model(model, tokens_of(model, text, args.text), args.batch)
        results["perplexity"] = {"no converters": row_of(eager)}
        config.model.converters = [name for name in args.converters.split(",") if name]
        del model  # its memory is needed
    with Progress(f"evaluate: loading {args.checkpoint}"):
        model = load_model(config, args.checkpoint)
    if args.text:
        found = Perplexity.from_model(model, tokens_of(model, text, args.text), args.batch)
        row = row_of(found)
        if eager is not None:
            row[DIFFERENCE] = (found.log_probabilities - eager.log_probabilities).abs().max().item()
        results.setdefault("perplexity", {})[", ".join(config.model.converters) or "no converters"] = row
    if args.tasks:
        from torchtitan_npu.cli.inference.harness import run_tasks

        results["tasks"] = run_tasks(model, args.tasks.split(","), args.tasks_folder, args.limit, args.batch)
    return results


def tokens_of(model: Any, text: str, file: Path) -> list[int]:
    """Return the tokens of ``text``, after the token that begins a text."""
    tokens = model.tokenizer.encode(text, add_eos=False)
    if len(tokens) < 2:
        raise UsageError(f"--text {file} has {len(tokens)} tokens; 2 are needed to predict one")
    return tokens


def row_of(perplexity: Any) -> dict[str, Any]:
    return {"perplexity": perplexity.value, "loss": perplexity.loss, "tokens": perplexity.tokens}


def report(results: dict[str, Any]) -> None:
    """Print a line for each result."""
    for name, row in results.get("perplexity", {}).items():
        line = f"{name}: perplexity {row['perplexity']:.6g}, loss {row['loss']:.6f}, {row['tokens']} tokens"
        print(line + (f", {DIFFERENCE} {row[DIFFERENCE]:.2e}" if DIFFERENCE in row else ""))
    for name, metrics in results.get("tasks", {}).items():
        values = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
        print(f"{name}: " + ", ".join(f"{key.removesuffix(',none')} {value:.6g}" for key, value in values.items()))
