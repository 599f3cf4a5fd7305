"""Builds the stub of CANN with which the real torch_npu loads on a machine that has neither CANN nor an NPU.

    python tools/rehearsal/build_stubs.py FOLDER

to be run by the python of the environment that torch_npu is installed in; with ``LD_LIBRARY_PATH=FOLDER``, ``import
torch`` then works there. torch_npu's libraries are linked to be resolved whole when they are loaded, so an empty one
does not do: each symbol they want and nobody else has gets a definition. ``cann.c`` defines those whose answer
matters, every other one is a function that returns 0. The operators (``aclnn...``) are not linked but looked up by
name when they are called: every name that torch_npu knows is there, so that its code takes the way it takes on a
complete CANN, up to the launch, which fails.
"""

from __future__ import annotations

import ctypes
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

STUB = "libascendcl.so"
"""The one real library. Every other name that CANN's libraries have is a link to it: the loader then maps it once, and
finds every symbol whichever name it is asked for."""

OPERATORS = "libopapi.so"
"""Where torch_npu looks operators up. It is opened by name at run time, so no library is linked to it."""

NOT_THERE = 500001
"""What a launch returns, as in ``cann.c``."""


def main() -> None:
    folder = Path(sys.argv[1])
    packages = Path(sysconfig.get_path("purelib"))
    wheel = sorted(packages.glob("torch_npu/**/*.so"))
    if not wheel:
        sys.exit(f"error: no torch_npu in {packages}")
    torch = sorted(packages.glob("torch/lib/*.so*"))
    symbols, operators = missing_symbols(wheel, torch), operator_names(wheel)

    folder.mkdir(parents=True, exist_ok=True)
    compile_stub(folder / STUB, symbols, operators)
    for name in (missing_libraries(wheel, torch) | {OPERATORS}) - {STUB}:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(STUB)
    print(f"stub of CANN in {folder}: {len(symbols)} symbols, {len(operators)} operators")


def missing_libraries(wheel: list[Path], torch: list[Path]) -> set[str]:
    """The libraries that ``wheel`` is linked to and nobody ships. The system's have a version number, CANN's none."""
    shipped = {path.name for path in (*wheel, *torch)}
    # "... (NEEDED)  Shared library: [libascendcl.so]"
    lines = run("readelf", "--dynamic", "--wide", *wheel).splitlines()
    needed = {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}
    return {name for name in needed - shipped if name.endswith(".so")}


def missing_symbols(wheel: list[Path], torch: list[Path]) -> set[str]:
    """The symbols that ``wheel`` wants and that torch, torch_npu, Python and the C library do not have."""
    # a symbol with a version ("memcpy@GLIBC_2.17") is the system's
    wanted = {name for name in dynamic_symbols(wheel, "--undefined-only", kinds="U") if "@" not in name}
    shipped = {name.partition("@")[0] for name in dynamic_symbols((*wheel, *torch), "--defined-only")}
    this_process = ctypes.CDLL(None)
    return {name for name in wanted - shipped if not hasattr(this_process, name)}


def dynamic_symbols(paths: tuple[Path, ...] | list[Path], which: str, kinds: str = "") -> set[str]:
    """The symbols the loader sees in these libraries; ``kinds`` as nm writes them ("U", not "w": weak)."""
    # "                 U aclInit" or "0000000000123abc T aclInit"
    lines = (line.split() for line in run("nm", "--dynamic", which, *paths).splitlines())
    return {fields[-1] for fields in lines if len(fields) >= 2 and (not kinds or fields[-2] in kinds)}


def operator_names(wheel: list[Path]) -> set[str]:
    """The operators' functions that ``wheel`` may look up: their names are strings in its libraries."""
    names = (re.findall(rb"\0(aclnn[A-Z]\w*)(?=\0)", path.read_bytes()) for path in wheel)
    return {name.decode() for found in names for name in found}


def compile_stub(path: Path, symbols: set[str], operators: set[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        answers, rest = Path(temporary, "answers.o"), Path(temporary, "rest.c")
        run("gcc", "-c", "-fPIC", "-O1", Path(__file__).with_name("cann.c"), "-o", answers)
        answered = {line.split()[-1] for line in run("nm", "--defined-only", answers).splitlines()}
        # mangled C++ names are C names too
        functions = [f"long {name}(void) {{ return 0; }}" for name in sorted(symbols - answered)]
        functions += [f"int {name}(void) {{ return {NOT_THERE}; }}" for name in sorted(operators)]
        rest.write_text("\n".join(functions))
        run("gcc", "-shared", "-fPIC", "-O1", "-fno-builtin", rest, answers, f"-Wl,-soname,{STUB}", "-o", path)


def run(*command: str | Path) -> str:
    """What the command writes to its standard output."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    except FileNotFoundError:
        sys.exit(f"error: {words[0]} is needed to build the stub of CANN; install gcc and binutils")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {shlex.join(words)} failed with exit code {error.returncode}")


if __name__ == "__main__":
    main()
