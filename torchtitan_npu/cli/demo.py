"""Train a small model twice on this machine, eager and with all its converters, and compare the loss curves.

    torchtitan-npu demo [--model NAME] [--out DIR] [--steps N]

Exit code 0: within tolerance, 1: not, or a training failed, 2: invalid input.
"""

from __future__ import annotations

from pathlib import Path

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.compare.command import main as compare
from torchtitan_npu.cli.compare.command import positive
from torchtitan_npu.cli.compare.report import PICTURE
from torchtitan_npu.config.shipped_files import train_configs

MODELS = ("deepseek_v32", "glm_moe_dsa")
CONVERTERS = "npu_rms_norm,npu_rope,npu_gating,npu_permute,npu_gmm,npu_dsa"


def build_parser() -> OneLineParser:
    parser = OneLineParser("torchtitan-npu demo", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="the model (default %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/demo"), help="folder of the report (default %(default)s)"
    )
    parser.add_argument("--steps", type=positive, default=15, help="training steps (default %(default)s)")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    config = train_configs() / f"{args.model}_debugmodel.toml"
    size = ["--nproc", "2", "--steps", str(args.steps), "--rtol", "1e-4"]
    job = ["--config", str(config), "--candidate-converters", CONVERTERS]
    print(
        f"{args.model}: {args.steps} steps on two ranks, eager (baseline) and with converters (candidate)", flush=True
    )
    code = compare(["run", "--force", "--out", str(args.out), *size, *job, "--", "--training.seq_len", "64"])
    picture = args.out / PICTURE
    if code != 2 and picture.is_file():  # a failed training has no picture
        print(f"  plot: {picture}")
        print(f"  next: torchtitan-npu launch --job.config_file {config}")
    return code
