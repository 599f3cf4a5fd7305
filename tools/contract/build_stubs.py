"""Build the stub of CANN with which the real torch_npu loads on a machine without CANN and without an NPU.

    python tools/contract/build_stubs.py FOLDER

Run it with the Python of the environment that torch_npu is installed in. ``import torch`` then works there with
``LD_LIBRARY_PATH=FOLDER``.

torch_npu's libraries resolve all symbols when they are loaded. So the stub defines every symbol that they need and that
no other library defines. ``cann.c`` defines those whose result matters; every other one returns 0. Operators
(``aclnn...``) are not linked: torch_npu looks them up by name when it calls them. The stub has every name it
knows, so that torch_npu takes the same path as on a complete CANN. The launch at the end of that path fails.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

STUB = "libascendcl.so"
"""The stub's library. All other library names of CANN are links to it, so that the loader maps it once."""

OPERATORS = "libopapi.so"
"""The library in which torch_npu looks up operators. It is opened at run time, so no library links to it."""

NOT_SUPPORTED = 500001
"""The result of a launch, as in ``cann.c``."""


def main() -> None:
    folder = Path(sys.argv[1])
    packages = Path(sysconfig.get_path("purelib"))
    wheel = sorted(packages.glob("torch_npu/**/*.so"))
    if not wheel:
        sys.exit(f"error: no torch_npu in {packages}")
    torch = sorted(find_torch().glob("lib/*.so*"))
    symbols, operators = missing_symbols(wheel, torch), operator_names(wheel)

    folder.mkdir(parents=True, exist_ok=True)
    compile_stub(folder / STUB, symbols, operators)
    for name in (missing_libraries(wheel, torch) | {OPERATORS}) - {STUB}:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(STUB)
    print(f"stub of CANN in {folder}: {len(symbols)} symbols, {len(operators)} operators")


def find_torch() -> Path:
    """Return torch's folder without importing it: torch would load torch_npu, which needs the stub."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit("error: no torch in this environment")
    return Path(spec.origin).parent


def missing_libraries(wheel: list[Path], torch: list[Path]) -> set[str]:
    """Return CANN's libraries that ``wheel`` links to. Unlike the system's, their names have no version number."""
    shipped = {path.name for path in (*wheel, *torch)}
    # "... (NEEDED)  Shared library: [libascendcl.so]"
    lines = run("readelf", "--dynamic", "--wide", *wheel).splitlines()
    needed = {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}
    return {name for name in needed - shipped if name.endswith(".so")}


def missing_symbols(wheel: list[Path], torch: list[Path]) -> set[str]:
    """Return the symbols that ``wheel`` needs and that torch, torch_npu, Python and the C library do not define."""
    # The system's symbols have a version: "memcpy@GLIBC_2.17".
    wanted = {name for name in dynamic_symbols(wheel, "--undefined-only", types="U") if "@" not in name}
    shipped = {name.partition("@")[0] for name in dynamic_symbols((*wheel, *torch), "--defined-only")}
    this_process = ctypes.CDLL(None)
    return {name for name in wanted - shipped if not hasattr(this_process, name)}


def dynamic_symbols(paths: tuple[Path, ...] | list[Path], which: str, types: str = "") -> set[str]:
    """Return the symbols of these libraries that the loader sees; ``types`` are nm's ("U"; weak ones are "w")."""
    # "                 U aclInit" or "0000000000123abc T aclInit"
    lines = (line.split() for line in run("nm", "--dynamic", which, *paths).splitlines())
    return {fields[-1] for fields in lines if len(fields) >= 2 and (not types or fields[-2] in types)}


def operator_names(wheel: list[Path]) -> set[str]:
    """Return the functions of operators that ``wheel`` may look up. Their names are strings in its libraries."""
    names = (re.findall(rb"\0(aclnn[A-Z]\w*)(?=\0)", path.read_bytes()) for path in wheel)
    return {name.decode() for found in names for name in found}


def compile_stub(path: Path, symbols: set[str], operators: set[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        defined, rest = Path(temporary, "cann.o"), Path(temporary, "rest.c")
        run("gcc", "-c", "-fPIC", "-O1", Path(__file__).with_name("cann.c"), "-o", defined)
        names = {line.split()[-1] for line in run("nm", "--defined-only", defined).splitlines()}
        # Mangled C++ names are valid C names.
        functions = [f"long {name}(void) {{ return 0; }}" for name in sorted(symbols - names)]
        functions += [f"int {name}(void) {{ return {NOT_SUPPORTED}; }}" for name in sorted(operators)]
        rest.write_text("\n".join(functions))
        run("gcc", "-shared", "-fPIC", "-O1", "-fno-builtin", rest, defined, f"-Wl,-soname,{STUB}", "-o", path)


def run(*command: str | Path) -> str:
    """Run the command and return its standard output."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    except FileNotFoundError:
        sys.exit(f"error: {words[0]} is needed to build the stub of CANN; install gcc and binutils")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {shlex.join(words)} failed with exit code {error.returncode}")


if __name__ == "__main__":
    main()
