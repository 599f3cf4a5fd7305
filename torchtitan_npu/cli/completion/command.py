"""Print a script that completes the commands, options and values of torchtitan-npu in a shell.

    eval "$(torchtitan-npu completion)"                                                       # in ~/.bashrc
    autoload -U +X bashcompinit && bashcompinit && eval "$(torchtitan-npu completion)"        # in ~/.zshrc

Exit code 0: printed. 2: invalid arguments.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from torchtitan_npu.cli.arguments import OneLineParser
from torchtitan_npu.cli.main import COMMANDS

SCRIPT = """_torchtitan_npu() {{
    local words="{commands} --help"
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD - 1]}}" in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _torchtitan_npu torchtitan-npu
"""
"""Without a match, ``-o default`` completes the names of files."""


def build_parser() -> OneLineParser:
    return OneLineParser(
        "torchtitan-npu completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def main(argv: list[str]) -> int:
    """Run the command and return its exit code."""
    build_parser().parse_args(argv)
    print(script(), end="")
    return 0


def script() -> str:
    """Return the completion script, for bash."""
    cases = [line for name in COMMANDS for line in cases_of(name)]
    return SCRIPT.format(commands=" ".join(COMMANDS), cases="\n".join(f"            {line}" for line in cases))


def cases_of(command: str) -> Iterator[str]:
    """Yield shell cases for the word before the cursor: values of an option with choices, then all other words."""
    words: list[str] = []
    build_parser = importlib.import_module(f"torchtitan_npu.cli.{command}.command").build_parser
    parsers = [build_parser()]
    if command == "compare":  # not a subparser: a baseline may stand in its place
        words.append("run")
        parsers.append(build_parser(run=True))
    for parser in parsers:  # grows by the parsers of subcommands
        for action in parser.actions:
            values = [str(value) for value in action.choices or () if " " not in str(value)]
            words += action.option_strings or values
            if values and action.option_strings:
                pattern = "|".join(f'"{command} {option}"' for option in action.option_strings)
                yield f'{pattern}) words="{" ".join(values)}" ;;'
            if isinstance(action.choices, dict):  # maybe subcommands and their parsers
                parsers += [value for value in action.choices.values() if isinstance(value, OneLineParser)]
    yield f'"{command} "*) words="{" ".join(dict.fromkeys(words))}" ;;'
