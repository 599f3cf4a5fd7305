"""Convert a checkpoint between Hugging Face's format and TorchTitan's (DCP), one piece at a time.

    torchtitan-npu convert from-hf SOURCE TARGET --model M --flavor F [--mtp-layers 1] [--quantized]
    torchtitan-npu convert to-hf SOURCE TARGET --model M --flavor F [--mtp-layers 1] [--dtype bfloat16] [--assets DIR]

TARGET must not exist. It gets its name when the conversion is complete.
Exit code 0: converted, 2: not possible, with the reason in one line. See docs/how-to/checkpoints.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from torchtitan_npu.cli.arguments import EXIT_INTERRUPTED, OneLineParser
from torchtitan_npu.errors import UsageError, one_line
from torchtitan_npu.progress import Progress

PROG = "torchtitan-npu convert"
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")


def build_parser() -> OneLineParser:
    """Build the parser of both subcommands."""
    parser = OneLineParser(PROG, description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    from_hf = commands.add_parser("from-hf", help="convert to a checkpoint for checkpoint.initial_load_path")
    from_hf.add_argument("--quantized", action="store_true", help="dequantize the weights and write them in float32")
    to_hf = commands.add_parser("to-hf", help="convert to safetensors files")
    to_hf.add_argument("--dtype", choices=DTYPES, help="of parameters (default: unchanged); float8: as DeepSeek's")
    to_hf.add_argument("--assets", type=Path, help="folder with the tokenizer: model.hf_assets_path of the job")
    to_hf.add_argument("--seq-len", type=int, help="training.seq_len of the job: the context of config.json, and YaRN")
    for command in (from_hf, to_hf):
        command.add_argument("source", type=Path, help="folder of the checkpoint to read")
        command.add_argument("target", type=Path, help="folder to write; must not exist")
        command.add_argument("--model", required=True, help="model.name of the job, e.g. deepseek_v32")
        command.add_argument("--flavor", required=True, help="model.flavor of the job, e.g. 671B")
        command.add_argument("--mtp-layers", type=int, default=0, help="mtp.layers of the job (default 0)")
    return parser


def convert(args: argparse.Namespace) -> None:
    """Convert as the arguments say. Write to ``TARGET.partial`` first."""
    import torch

    from torchtitan_npu.cli.convert.from_hf import FromHuggingFace
    from torchtitan_npu.cli.convert.model_pieces import build
    from torchtitan_npu.cli.convert.to_hf import ToHuggingFace

    source, target = args.source, args.target
    partial = target.with_name(f"{target.name}.partial")
    if not source.is_dir():
        raise UsageError(f"{source} is not a folder")
    if target.exists():
        raise UsageError(f"{target} exists; choose another TARGET")
    if partial.exists():
        raise UsageError(
            f"{partial} exists: another conversion is running or was killed; remove the folder if none is running"
        )
    model = build(args.model, args.flavor, args.mtp_layers, getattr(args, "seq_len", None))
    conversion: FromHuggingFace | ToHuggingFace
    if args.command == "from-hf":
        conversion = FromHuggingFace(source, model, args.quantized)
    else:
        if args.assets and not args.assets.is_dir():
            raise UsageError(f"--assets {args.assets} is not a folder")
        conversion = ToHuggingFace(source, model, getattr(torch, args.dtype) if args.dtype else None, args.assets)
    parents = partial.absolute().parents
    new_folders = [folder for folder in parents if not folder.exists()]
    free, needed = shutil.disk_usage(parents[len(new_folders)]).free, conversion.nbytes()
    if free < needed:
        raise UsageError(f"{partial.parent} has {free / 1e9:.1f} GB free; {target.name} needs {needed / 1e9:.1f} GB")
    partial.parent.mkdir(parents=True, exist_ok=True)
    try:
        with Progress(f"convert: writing {target.name}") as progress:
            written = 0

            def advance(nbytes: int) -> None:
                nonlocal written
                written += nbytes
                done = f"{written / 1e9:.1f} of {needed / 1e9:.1f} GB"
                progress.update(f"convert: writing {target.name}, {done}", written / needed)

            conversion.write(partial, advance)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if not target.exists():
            for folder in new_folders:
                with suppress(OSError):  # another program writes there
                    folder.rmdir()
    print(f"{target}: {needed / 1e9:.3g} GB, {len(model.tensors)} tensors of {model.name}")
    unmapped = [name for piece in conversion.pieces for name in piece.unmapped(model)]
    if unmapped:
        action = "not written" if args.command == "to-hf" else "written as 0"
        print(f"{action}, because Hugging Face's format does not contain them: {', '.join(unmapped)}")
    if isinstance(conversion, ToHuggingFace) and conversion.config_problem:
        print(f"no config.json: {conversion.config_problem}")


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    from torchtitan_npu import platform, register

    platform.prepare()
    register()
    from torchtitan_npu.components.checkpoint.folder import DamagedCheckpoint

    try:
        convert(args)
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted; the incomplete target was removed", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (UsageError, DamagedCheckpoint, OSError) as error:
        print(f"{PROG}: {one_line(error)}", file=sys.stderr)
        return 2
    return 0
