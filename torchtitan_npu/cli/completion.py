"""Print a script that completes the commands, options and values of torchtitan-npu in a shell.

    eval "$(torchtitan-npu completion)"          # in ~/.bashrc
    eval "$(torchtitan-npu completion zsh)"      # in ~/.zshrc, after compinit

Exit code 0: printed. 2: invalid arguments.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.main import COMMANDS, command_module


def build_parser() -> OneLineParser:
    parser = OneLineParser("torchtitan-npu completion", description=__doc__)
    parser.add_argument("shell", nargs="?", choices=("bash", "zsh"), default="bash", help="default: %(default)s")
    return parser


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    args = build_parser().parse_args(argv)
    import shtab

    root = OneLineParser("torchtitan-npu")
    commands = root.add_subparsers()
    for name, text in COMMANDS.items():
        add_command(commands, name, text, command_module(name).build_parser())
    for parser in commands.choices.values():
        for action in parser.actions:
            if action.type is Path or action.dest == "config":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    script = shtab.complete(root, args.shell)
    # without a match, complete the names of files
    print(script.replace("complete -o bashdefault ", "complete -o default "))
    return 0


def add_command(commands: Any, name: str, text: str, parser: OneLineParser) -> None:
    """Add the ``parser`` of a command to the subparsers ``commands``."""
    commands.add_parser(name, help=text)
    if name != "compare":
        commands.choices[name] = parser
        return
    # "run" is not a subparser of compare, because a baseline may stand there
    for action in parser.actions:
        if action.option_strings and action.dest != "help":
            commands.choices[name].add_action(action)
    run = command_module(name).build_parser(run=True)
    add_command(commands.choices[name].add_subparsers(), "run", "train the runs and compare them", run)
