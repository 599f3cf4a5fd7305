"""The command ``torchtitan-npu``: run the subcommand named first."""

from __future__ import annotations

import importlib
import os
import select
import sys
from types import ModuleType

from torchtitan_npu.cli.arguments import EXIT_INTERRUPTED, EXIT_OUTPUT_CLOSED

COMMANDS = {
    "demo": "train a small model with and without converters, and compare",
    "list": "list the configs, models, converters and operators of this package",
    "doctor": "check whether this machine can train",
    "data": "show the rows that a job trains on: tokens, text, document boundaries and labels",
    "plan": "predict memory, traffic and time of a job, or search for a layout that fits",
    "emulate": "run a command on emulated NPUs, with the real torch_npu",
    "launch": "start a job with torchrun, with one log per rank",
    "compare": "compare loss curves with a baseline, or train and compare them",
    "convert": "convert a checkpoint between Hugging Face and DCP",
    "generate": "continue prompts with the model of a checkpoint",
    "evaluate": "measure the perplexity of a checkpoint, and tasks of lm-evaluation-harness",
    "prove": "compare layouts, options and converters of a job with one eager rank",
    "completion": "print a script that completes commands and options in a shell",
}


EXTRAS = {
    "lm_eval": "eval",
    "matplotlib": "report",
    "shtab": "completion",
    "tensorboard": "report",
    "tomli_w": "prove",
}
"""The extra of pyproject.toml that installs a module which only some commands import."""


def command_module(name: str) -> ModuleType:
    """Return the module of a command: ``cli/NAME.py``, or ``cli/NAME/command.py`` if the command has several files."""
    module = importlib.import_module(f"torchtitan_npu.cli.{name}")
    return importlib.import_module(f"{module.__name__}.command") if hasattr(module, "__path__") else module


def usage() -> str:
    """Return the help text."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: torchtitan-npu COMMAND [arguments]",
            "",
            *lines,
            "",
            "'torchtitan-npu COMMAND --help' shows the arguments of a command.",
            "Exit code 0: success, 1: the answer is no or a job failed, 2: invalid input, 130: interrupted.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand named first in ``argv`` and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    name, *arguments = argv
    if name not in COMMANDS:
        from torchtitan_npu.errors import did_you_mean

        print(f"torchtitan-npu: unknown command {name!r}{did_you_mean(name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        # Imported only now: the doctor must run where torch does not load.
        code = command_module(name).main(arguments)
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        advice = f"pip install 'torchtitan-npu[{EXTRAS[missing]}]'"
        print(f"torchtitan-npu {name}: {missing} is not installed: {advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"torchtitan-npu {name}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _output_is_closed():  # another pipe of the command
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes at its end
        return EXIT_OUTPUT_CLOSED


def _output_is_closed() -> bool:
    """Return whether the reader of the output has ended, such as ``head``."""
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


if __name__ == "__main__":
    sys.exit(main())
