"""Record the operator calls of the contract steps: ``python -m tools.recorded_calls``, with torch_npu installed.

Writes the calls that ``torchtitan-npu doctor`` samples, and docs/reference/operator-calls.md. Runs the contract tests
of the models, each of which compares its step with the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torchtitan_npu.cli.doctor.operators import RECORDED_CALLS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference/operator-calls.md"
TESTS = tuple(f"tests/contract/test_contract_{name}.py" for name in ("models", "qwen3_vl", "train_configs"))

INTRODUCTION = """\
# Operator calls

Training steps of our models call the fused operators with these arguments. `torchtitan-npu doctor` makes a small call
of each row, see [its operator errors](../how-to/doctor.md#operator-errors).

- `bfloat16[3]` is a bfloat16 tensor with three dimensions. It is contiguous, unless "transposed" (the last two
  dimensions) or "strided" follows.
- Sizes, numbers and arguments that have their default are left out.
- A step has all converters that apply to the model, or one of them ("with one converter"). Without a degree (`shard`,
  `tp`, `cp`, `ep`, `etp`) it is a step of one device, whose parameters are float32 under autocast. With degrees,
  parameters are bfloat16 (FSDP).
- "files" are steps of the shipped train configs, on a rank of the job's full size.

The [contract tests](../explanation/contract-tests.md) compare each step with this list and check its calls against the
limits of the NPU's kernels. The emulator runs the doctor's calls.

*Written by `python -m tools.recorded_calls`.*
"""


def record() -> dict[str, list[dict[str, Any]]]:
    """Run the tests, and return the different calls of each operator with the steps that make them."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"RECORDED_CALLS": folder}
        command = [sys.executable, "-m", "pytest", "-m", "slow or not slow", "-n", "0", *TESTS]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
        steps = {file.stem: json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())}
    operators: dict[str, dict[str, tuple[dict[str, Any], list[str]]]] = {}
    for step, calls in steps.items():
        for op, described in calls.items():
            for arguments in described:
                key = json.dumps(arguments, sort_keys=True)
                operators.setdefault(op, {}).setdefault(key, (arguments, []))[1].append(step)
    return {
        op: [{"arguments": arguments, "steps": names} for _, (arguments, names) in sorted(calls.items())]
        for op, calls in sorted(operators.items())
    }


def page(recorded: dict[str, list[dict[str, Any]]]) -> str:
    """Return the page of the docs."""
    lines = []
    for op, calls in recorded.items():
        lines += ["", f"## {op}", "", "| arguments | steps |", "|---|---|"]
        for call in calls:
            arguments = ", ".join(f"{name} `{text(value)}`" for name, value in call["arguments"].items())
            lines.append(f"| {arguments} | {steps(call['steps'])} |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def steps(names: list[str]) -> str:
    """Return the names of a call's steps, with counts instead of train configs and of steps with one converter."""
    files = len({name.partition(",")[0] for name in names if ".toml" in name})
    alone = sum(", only " in name for name in names)
    counted = [f"{alone} with one converter"] * bool(alone) + [f"{files} file{'s' * (files > 1)}"] * bool(files)
    return "; ".join([name for name in names if ".toml" not in name and ", only " not in name] + counted)


def text(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    recorded = record()
    RECORDED_CALLS.write_text(json.dumps(recorded, indent=1) + "\n")
    PAGE.write_text(page(recorded))
