"""The tools and shell scripts: ``--help`` runs nothing, and the set-up of an environment is a line per step."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FROM_CHECKOUT = os.environ | {"PYTHONPATH": str(ROOT)}
SHELL_SCRIPTS_WITH_HELP = ["demo.sh", "test.sh"]
SOURCED = ["contract_env.sh", "setup_env.sh"]
PROGRAMS = sorted(path for path in (ROOT / "tools").rglob("*.py") if "__main__" in path.read_text())
PREPARATIONS = {"sys.path.insert", "platform.prepare", "torchtitan_npu.register", "matplotlib.use"}
"""Calls that a module may make when it is imported."""
BUILDING = {
    "add_argument",
    "add_mutually_exclusive_group",
    "add_subparsers",
    "add_parser",
    "set_defaults",
    "parser_of",
    "add_options",
}
"""Methods that build a parser."""
HARMLESS = {"items", "signal"}
"""Calls that leave nothing behind: a loop over a table of options, and the handler of a signal."""
NOT_PARSED = "parses no arguments"


def calls_in(*nodes: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in the order in which they run."""
    for node in nodes:
        yield from calls_in(*ast.iter_child_nodes(node))
        if isinstance(node, ast.Call):
            yield node


def last_name(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def work_before_parsing(source: str) -> list[str]:
    """Return what the program runs before it parses its arguments. It may import modules and build its parser."""
    module = ast.parse(source)
    functions = {one.name: one.body for one in module.body if isinstance(one, ast.FunctionDef)}
    work: list[str] = []
    for statement in module.body:
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            return work + work_of(statement.body, functions)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            work += {ast.unparse(statement.value.func)} - PREPARATIONS
        elif isinstance(statement, ast.For | ast.While | ast.With | ast.Try):
            work.append(ast.unparse(statement))
    return [*work, NOT_PARSED]


def work_of(statements: list[ast.stmt], functions: dict[str, list[ast.stmt]]) -> list[str]:
    """Return the calls before ``parse_args``, which is called here or in the first function that is called."""
    work: list[str] = []
    for statement in statements:
        building = [
            one for one in calls_in(statement) if last_name(one).endswith("Parser") or last_name(one) in BUILDING
        ]
        allowed = set(calls_in(*building))  # with those that compute a default
        for call in calls_in(statement):
            name, text = last_name(call), ast.unparse(call)
            if name in ("parse_args", "parse_known_args") and name not in functions:
                return work
            if name in functions and name not in BUILDING:
                return work + work_of(functions[name], functions)
            if call not in allowed and name not in HARMLESS:
                work.append(text)
    return [*work, NOT_PARSED]


def test_tools_parse_their_arguments_first() -> None:
    """So that ``--help`` runs nothing."""
    assert {"converter_table.py", "run.py"} <= {path.name for path in PROGRAMS}
    found = {path.relative_to(ROOT).as_posix(): work_before_parsing(path.read_text()) for path in PROGRAMS}
    assert {name: work for name, work in found.items() if work} == {}


@pytest.mark.parametrize("script", ["converter_table.py", "config_table.py"])
def test_help_of_tables_writes_nothing(script: str) -> None:
    pages = {page: page.stat().st_mtime_ns for page in (ROOT / "docs").rglob("*.md")}
    command = [sys.executable, ROOT / "tools" / script, "--help"]
    result = subprocess.run(command, env=FROM_CHECKOUT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.startswith(f"usage: {script}")
    assert {page: page.stat().st_mtime_ns for page in pages} == pages


@pytest.mark.parametrize("script", SHELL_SCRIPTS_WITH_HELP)
def test_help_creates_no_environment(script: str, tmp_path: Path) -> None:
    result = run_without_python(script, tmp_path, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("usage: bash tools/") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("arguments", [[], ["--help"]])
@pytest.mark.parametrize("script", SOURCED)
def test_a_sourced_script_does_nothing_when_it_is_executed(script: str, arguments: list[str], tmp_path: Path) -> None:
    result = run_without_python(script, tmp_path, *arguments)
    assert result.returncode == 2 and result.stdout == "" and not list(tmp_path.iterdir())
    assert result.stderr == f"source this file: . {ROOT}/tools/{script}\n"


def test_every_shell_script_is_tested() -> None:
    scripts = {path.name for path in (ROOT / "tools").rglob("*.sh")}
    assert scripts == {*SHELL_SCRIPTS_WITH_HELP, *SOURCED}


def run_without_python(script: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script that would create its environments in ``folder``, and fail there."""
    venv = str(folder / "venv")
    environment = os.environ | {"VENV": venv, "CONTRACT_VENV": venv, "PYTHON": "/bin/false"}
    command = ["bash", ROOT / "tools" / script, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c import sys; print"*) echo "$VERSION" ;;
    "-m venv") mkdir -p "$3/bin" && touch "$3/bin/activate" && cp "$0" "$3/bin/pip" ;;
    install*)
        echo "$*" >>"$VENV/pip"
        echo "output of pip"
        case "$*" in *"$FAILS"*) echo "ERROR: $FAILS" && exit 1 ;; esac
        case "$*" in *pip==*) echo "ERROR: of an earlier step" ;; esac
        sleep 0.5
        echo "$*" >>"$VENV/finished"
        ;;
esac
"""


PINNED = "install the versions of constraints.txt"
LAST = "install torchtitan-npu and what it needs"


@pytest.mark.parametrize(
    ("version", "extra", "fails", "done", "failed"),
    [
        ("linux 3 12", "", "none", ["install pip", "install torch", LAST], ""),
        ("linux 3 11", "dev", "none", ["install pip", "install torch", LAST], ""),
        ("linux 3 11", "", "none", ["install pip", PINNED, LAST], ""),
        ("linux 3 11", "", "pip==", [], "install pip"),
        ("linux 3 11", "", "triton==", ["install pip"], PINNED),  # the first of two processes
        ("linux 3 11", "", "pytest==", ["install pip"], PINNED),  # the second one
    ],
)
def test_the_set_up_is_a_line_per_step(
    version: str, extra: str, fails: str, done: list[str], failed: str, tmp_path: Path
) -> None:
    """With another program in place of Python and pip, which fails for one package. Their output is in a log."""
    (tmp_path / "python").write_text(PYTHON)
    (tmp_path / "python").chmod(0o755)
    environment = os.environ | {"VENV": str(tmp_path / "venv"), "PYTHON": str(tmp_path / "python")}
    environment |= {"FAILS": fails, "VERSION": version, "EXTRA": extra}
    command = ["bash", "-c", ". tools/setup_env.sh && echo active"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    log = tmp_path / "venv/setup.log"
    first, create, *rest = re.sub(r" \(\d+ s\)", "", result.stdout).splitlines()
    assert first.startswith("setting up ") and create == f"create {tmp_path}/venv: done"
    assert rest == [f"{step}: done" for step in done] + ["active"] * (not failed)
    of_pip = f"ERROR: {fails}"
    assert {"output of pip", *[of_pip] * bool(failed)} <= set(log.read_text().splitlines())
    assert result.returncode == bool(failed)
    error = f"error: could not {failed}; is the package index reachable? All output: {log}"
    assert result.stderr.splitlines() == ([of_pip, error] if failed else [])
    if failed:
        time.sleep(0.6)  # a process that goes on would finish
        finished = tmp_path / "venv/finished"
        assert len(finished.read_text().splitlines() if finished.exists() else []) == len(done)
    else:
        _, *pinned, last = (tmp_path / "venv/pip").read_text().splitlines()
        assert "-c constraints.txt" in last
        assert [("--no-deps" in call) for call in pinned] == ([True, True] if PINNED in done else [False])
