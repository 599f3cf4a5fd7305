"""Show the rows of a job's data as the model gets them: tokens, text, document boundaries and labels.

    torchtitan-npu data --config X.toml [--show 3] [--validation] [--section.key value ...]

Options of the job (``--training.dataset_path more.jsonl``) are those of training. See docs/how-to/data.md.
Exit code 0: the rows are shown. 1: the data has fewer rows. 2: the error of a real start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from torchtitan_npu.cli.arguments import OneLineParser, without_log
from torchtitan_npu.errors import ERROR_PREFIX, UsageError
from torchtitan_npu.progress import waiting_for

if TYPE_CHECKING:
    from torch import Tensor

SHOWN_TOKENS = 12
"""Tokens of a document that are shown by number; of more, the first and last."""
SHOWN_CHARACTERS = 300
"""Characters of a text that are shown; of more, the first and last."""


def build_parser() -> OneLineParser:
    parser = OneLineParser("torchtitan-npu data", description=__doc__)
    parser.add_argument("--config", required=True, help="the job's TOML file")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="number of rows (default: %(default)s)")
    parser.add_argument("--validation", action="store_true", help="show the validation data")
    return parser


def main(argv: list[str]) -> int:
    args, options = build_parser().parse_known_args(argv)
    from torchtitan_npu import platform

    platform.prepare()
    try:
        with without_log():
            return show_rows(args, options)
    except UsageError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)  # the same line as in training
        return 2


def show_rows(args: argparse.Namespace, options: list[str]) -> int:
    """Print the first rows. Return 1 if there are fewer than asked for."""
    import torchtitan_npu.trainer  # noqa: F401 - registers the models
    from torchtitan_npu.config.parser import load_job
    from torchtitan_npu.config.value_table import check_values
    from torchtitan_npu.preflight.data import check_data, check_dataset_files
    from torchtitan_npu.preflight.job_context import JobContext
    from torchtitan_npu.preflight.model import check_model, check_tokenizer

    if args.show < 1:
        raise UsageError(f"--show {args.show}: must be at least 1")
    config = load_job(["--job.config_file", args.config, *options])
    config.validation.enable = args.validation
    check_values(config)
    job = JobContext(config, world_size=1)
    for check in (check_model, check_data, check_tokenizer, check_dataset_files):
        check(job)
    name = "validation" if args.validation else "training"
    section, loader = getattr(config, name), rows_of(job, name)
    print(f"{name}.dataset: {loader.source}")
    number = 0
    for number, (inputs, labels) in enumerate(waiting_for(loader, "data: reading rows", args.show), 1):
        print("\n".join([f"row {number}: {len(labels[0])} tokens", *describe_row(inputs, labels, job.tokenizer)]))
    if number < args.show:
        print(f"the data has {number} rows of {section.seq_len} tokens", file=sys.stderr)
    return int(number < args.show)


def rows_of(job: Any, name: str) -> Any:
    """Return the loader of ``training`` or ``validation`` batches, of one row each."""
    section = getattr(job.config, name)
    section.local_batch_size, section.dataloader.num_workers = 1, 0
    spec = job.train_spec
    build = spec.build_dataloader_fn
    if name == "validation":
        build = getattr(spec.build_validator_fn, "build_dataloader", None)
    if not job.is_adapted or build is None or not job.config.npu.layout_independent_data:
        raise UsageError("torchtitan-npu data shows the data of this package's loaders, which the job does not use")
    return build(
        dp_world_size=1, dp_rank=0, tokenizer=job.tokenizer, job_config=job.config, infinite=name == "training"
    )


def describe_row(inputs: dict[str, Tensor], labels: Tensor, tokenizer: Any) -> Iterator[str]:
    """Yield lines about each document of a batch of one row."""
    from torchtitan.components.loss import IGNORE_INDEX

    from torchtitan_npu.layers.documents import DOCUMENT_ENDS, Documents

    tokens, (targets,) = inputs["input"], labels.tolist()
    ends = inputs.get(DOCUMENT_ENDS, tokens == tokenizer.eos_id)
    first = 0
    for number, end in enumerate(Documents.from_last_tokens(ends).cu_seqlens_k.integers, 1):
        ids, learned = tokens[0, first:end].tolist(), targets[first:end]
        runs = [[*run] for has_label, run in groupby(learned, lambda target: target != IGNORE_INDEX) if has_label]
        count = sum(map(len, runs))
        if count == 0 and set(ids) <= {tokenizer.eos_id, 0}:
            yield f"  tokens {first} to {end - 1}: padding, without labels"
            return
        yield f"  document {number}, tokens {first} to {end - 1}: {count} of {end - first} have a label"
        yield f"    tokens {shortened([*map(str, ids)], SHOWN_TOKENS, ' ')}"
        yield f"    text   {shown_text(tokenizer, ids)}"
        if count < end - first:
            yield f"    labels {', '.join(shown_text(tokenizer, run) for run in runs) or 'none'}"
        first = end


def shown_text(tokenizer: Any, ids: list[int]) -> str:
    return repr(shortened(tokenizer.decode(ids, skip_special_tokens=False), SHOWN_CHARACTERS, ""))


def shortened(items: Any, most: int, separator: str) -> str:
    """Join ``items``; of more than ``most`` only the first and last."""
    if len(items) <= most:
        return separator.join(items)
    half = most // 2
    return f"{separator.join(items[:half])}{separator}…{separator}{separator.join(items[-half:])}"
