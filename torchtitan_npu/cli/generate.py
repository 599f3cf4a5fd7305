"""Continue prompts with the model of a checkpoint, token by token, with a cache of keys.

    torchtitan-npu generate --config X.toml --checkpoint DIR --prompt "To be" [--max-new-tokens 64]
        [--temperature 0.8] [--top-p 0.95] [--seed 0] [--no-cache] [--section.key value ...]
    torchtitan-npu generate --config X.toml --checkpoint DIR --prompts FILE [--batch 8] [--json]
    torchtitan-npu generate ... --benchmark
    torchrun --nproc_per_node 2 -m torchtitan_npu.cli.main generate --config X.toml ...

DIR is a checkpoint of a job (DCP) or a Hugging Face folder. The command runs on one rank, under torchrun on the layout
of the TOML file: data, tensor and expert parallel. FILE has a prompt per line. See docs/how-to/generate.md.
Exit code 0: generated. 1: the benchmark does not count. 2: invalid arguments, an invalid job or checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from torchtitan_npu.cli.arguments import OneLineParser, checkpoint_parser, read_utf8
from torchtitan_npu.errors import UsageError, one_line
from torchtitan_npu.progress import Progress

PROG = "torchtitan-npu generate"


def build_parser() -> OneLineParser:
    parser = checkpoint_parser(PROG, __doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", help="text to continue")
    source.add_argument("--prompts", type=Path, help="file with a prompt per line")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="default %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0: the most probable token")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="sample from this share of the probability (default 1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="prompts at a time (default %(default)s)")
    parser.add_argument("--no-cache", action="store_true", help="compute each token from the complete text")
    parser.add_argument("--json", action="store_true", help="print a JSON object per prompt")
    parser.add_argument("--benchmark", action="store_true", help="measure prefill and decode instead of printing text")
    return parser


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the arguments. The second result are options of the job."""
    parser = build_parser()
    args, options = parser.parse_known_args(argv)
    for option, least in (("max_new_tokens", 1), ("batch", 1), ("temperature", 0), ("seed", 0)):
        if getattr(args, option) < least:
            parser.error(f"--{option.replace('_', '-')} must be at least {least}")
    if not 0 < args.top_p <= 1:
        parser.error("--top-p must be above 0 and at most 1")
    if args.top_p < 1 and args.temperature == 0:
        parser.error("--top-p needs --temperature above 0: with 0 the most probable token is chosen")
    if args.benchmark and args.no_cache:
        parser.error("--benchmark measures the cache: remove --no-cache")
    return args, options


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    args, options = parse_args(argv)
    try:
        with warnings.catch_warnings(action="ignore"):
            return run(args, options)
    except (UsageError, OSError) as error:
        print(f"{PROG}: {one_line(error)}", file=sys.stderr)
        return 2


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the arguments."""
    if args.prompt is not None:
        return [args.prompt]
    lines = read_utf8("--prompts", args.prompts).splitlines()
    if not lines:
        raise UsageError(f"--prompts {args.prompts} has no lines")
    return lines


def run(args: argparse.Namespace, options: list[str]) -> int:
    texts = read_prompts(args)

    from torchtitan_npu import platform, register

    platform.prepare()
    register()

    from torchtitan_npu.cli.inference.loading import load_model, quiet_session, read_config

    with quiet_session():
        with Progress(f"generate: loading {args.checkpoint}"):
            model = load_model(read_config(args.config, options), args.checkpoint)
        return continue_texts(args, model, texts)


def continue_texts(args: argparse.Namespace, model: Any, texts: list[str]) -> int:
    """Print the continuations of ``texts``, or measure them. Return the exit code."""
    from torchtitan_npu import platform
    from torchtitan_npu.cli.inference.generation import InvalidBenchmark, Sampling, benchmark, check_lengths, generate

    prompts = [model.tokenizer.encode(text) for text in texts]
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_p, args.seed)
    check_lengths(model, [len(prompt) for prompt in prompts], sampling)
    is_first_rank = os.environ.get("RANK", "0") == "0"
    for first in range(0, len(prompts), args.batch):
        batch = prompts[first : first + args.batch]
        if args.benchmark:
            try:
                with Progress("generate: measuring"):
                    line = benchmark(model, batch, sampling)
            except InvalidBenchmark as reason:
                if is_first_rank:
                    print(f"{PROG}: the benchmark does not count: {reason}", file=sys.stderr)
                return 1
            if is_first_rank:
                print(f"{platform.backend()}, {model.dtype}, {line}")
            continue
        with Progress(f"generate: continuing prompt {first + 1} of {len(prompts)}") as progress:
            result = generate(model, batch, sampling, first, use_cache=not args.no_cache, progress=progress)
        for prompt, tokens in zip(texts[first:], result.tokens, strict=False) if is_first_rank else ():
            text = model.tokenizer.decode(tokens)
            row = {"prompt": prompt, "text": text, "tokens": tokens}
            print(json.dumps(row, ensure_ascii=False) if args.json else f"{prompt}{text}", flush=True)
    return 0
