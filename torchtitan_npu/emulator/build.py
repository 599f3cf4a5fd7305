"""Compile the emulator of CANN for the torch_npu of this environment.

torch_npu's libraries resolve their symbols when they are loaded. The emulator defines those that matter
(``runtime/*.c``); calling any other one is an error that names it. Operators (``aclnn…``) are looked up by name when
they are called; their C functions are generated from the prototypes in ``prototypes.json``. An operator that the
emulated version of CANN does not have is not defined: torch_npu takes another path, or reports that the symbol is
missing.

The result is a folder as ``ASCEND_HOME_PATH`` points to. It is cached by everything that it depends on. Builds for
several versions of CANN differ in the operators and their dtypes alone; the rest is compiled for the first one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torchtitan_npu import chips

RUNTIME_FOLDER = Path(__file__).with_name("runtime")
PROTOTYPES = Path(__file__).with_name("prototypes.json")
TENSORS = Path(__file__).with_name("cann_tensors.json")
"""The dtypes and ranks that CANN's documents list for operators, by argument and version of CANN."""

RUNTIME = "libascendcl.so"
"""The emulator's library. CANN's other libraries are links to it, so that the loader maps it once."""

OPERATORS = "libopapi.so"
"""The library in which torch_npu looks up operators."""

OPENED_AT_RUN_TIME = (OPERATORS, "libhcomm.so", "libms_tools_ext.so", "libmsprofiler.so", "libascend_hal.so")
"""Libraries that torch_npu opens by name, besides those it links to."""

BRIDGE_OBJECT = "bridge.o"
"""Part of ``_bridge.so``, which Python imports."""

TASK_QUEUE_OBJECT = "task_queue.o"
"""Part of :data:`TASK_QUEUE`."""

OTHER_OBJECTS = (BRIDGE_OBJECT, TASK_QUEUE_OBJECT)
"""All other sources of the runtime are in :data:`RUNTIME`."""

OPERATOR_NAMES = "operators.json"
"""The result of :func:`operator_names`, in the folder of a build."""

LAUNCH = """static int launch(void *workspace, uint64_t size, void *executor, void *stream) {
    return emulator_launch_call(executor, stream);
}"""
"""The second function of every operator."""

MEMORY_TOOL = "libascend_kernel_hook.so"
"""A preloaded library of this name makes torch_npu's allocator report its blocks (``runtime/allocator.c``)."""

TASK_QUEUE = "libemulator_task_queue.so"
"""A preloaded library that torch_npu's task queue needs (``runtime/task_queue.c``)."""

GRAPH_ENGINE = "ge::"
"""Names of C++ functions that return objects or nothing, so that they cannot return an error."""

RETURN_POINTERS = (
    "acltdtCreateChannelWithCapacity",
    "acltdtCreateDataset",
    "acltdtGetDataAddrFromItem",
    "acltdtGetDataItem",
)
"""C functions that return NULL after an error, among those that the emulator does not have."""

RETURN_NUMBERS = (
    "MsprofGetHashId",
    "MsprofSysCycleTime",
    "_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE",
    "aclGetTensorDescFormat",
    "aclGetTensorDescNumDims",
    "aclGetTensorDescType",
    "acltdtGetDataSizeFromItem",
    "acltdtGetDataTypeFromItem",
    "acltdtGetDatasetSize",
    "acltdtGetDimNumFromItem",
)
"""Functions that return a size, a time or an enumerator and no error code, likewise. They return 0."""

PACKAGES = ("lib64", "opp", "runtime", "compiler")
"""Folders of a CANN installation. torch_npu checks that they exist."""

CANN_VERSIONS = {"8.5": "8.5.0", "9.0": "9.0.0", "9.1": "9.1.0", "master": "9.2.0"}
"""Versions of CANN by their short names, oldest first. ``master`` answers the version after the last release."""

DEFAULT_CANN_VERSION = "9.1"

UNUSED_SECONDS = 30 * 24 * 3600
"""A build that was not used for as long is removed when another one is made."""

C_TYPES = {
    **dict.fromkeys("tTsSIFBzpo", "void *"),
    "d": "double",
    "f": "float",
    "q": "int64_t",
    "Q": "uint64_t",
    "i": "int32_t",
    "u": "uint32_t",
    "b": "int8_t",
    "c": "uint8_t",
    "h": "int16_t",
    "?": "_Bool",
    "e": "int",
}
"""The C type of an argument by its letter in ``types`` of the prototypes."""

FIELDS = {"d": "real", "f": "single", **dict.fromkeys("tTsSIFBzpo", "pointer")}
"""The field of ``Argument`` in ``runtime/calls.h`` that holds it; integers otherwise."""


ACL_DTYPES = {
    **{"float32": 0, "float16": 1, "int8": 2, "int32": 3, "uint8": 4, "int16": 6, "uint16": 7, "uint32": 8, "int64": 9},
    **{"uint64": 10, "float64": 11, "bool": 12, "complex64": 16, "complex128": 17, "bfloat16": 27, "complex32": 33},
    **{"hifloat8": 34, "float8_e5m2": 35, "float8_e4m3fn": 36, "float8_e8m0fnu": 37},
}
"""The numbers of ``aclDataType``; ``runtime/arguments.c`` has the same."""

ANY_DTYPE = 2**48 - 1
ANY_RANK = 2**9 - 1
RANK_BIT = ANY_DTYPE.bit_length()
"""The runtime has the sets of dtypes and ranks of an argument in one number, ranks from this bit on."""


class BuildError(Exception):
    """The emulator cannot be built here; the message says what to install."""


def build(report: Callable[[str], None] = print, cann: str = "") -> Path:
    """Return the folder of the emulator; compile it if it is not cached. ``report`` is called before a compilation.

    ``cann`` is the version of CANN to emulate, ``"9.1"`` or ``"9.1.0"`` (default: ``NPU_EMULATOR_CANN``).
    """
    version = _short_name(cann or os.environ.get("NPU_EMULATOR_CANN") or DEFAULT_CANN_VERSION)
    wheel = libraries_of("torch_npu")
    folder = _cache_folder() / _key(wheel, version)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if _is_cached(folder):
        return folder
    with _lock(folder.parent / "build.lock"):  # another process may build the same, or a version to copy from
        if not _is_cached(folder):
            report(f"building the emulator of CANN in {folder}, once")
            _build(folder, version, wheel)
    return folder


def _build(folder: Path, cann: str, wheel: list[Path]) -> None:
    names = [folder.name.replace(f"-cann-{cann}-", f"-cann-{other}-") for other in CANN_VERSIONS if other != cann]
    siblings = [folder.with_name(name) for name in names]
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="new-") as temporary:
        built = Path(temporary) / "built"
        if found := [other for other in siblings if _is_cached(other)]:
            shutil.copytree(found[0], built, symlinks=True, ignore=shutil.ignore_patterns("complete"))
        else:
            _compile_common(built, wheel, libraries_of("torch"))
        _compile_version(built, cann)
        (built / "complete").touch()
        with _lock(folder.parent / "lock"):
            shutil.rmtree(folder, ignore_errors=True)
            built.rename(folder)
            unused = [each.rename(Path(temporary) / each.name) for each in unused_builds(folder.parent, folder)]
        for each in unused:
            shutil.rmtree(each, ignore_errors=True)


def _is_cached(folder: Path) -> bool:
    """Return whether the build exists, and note that it is used now. The lock excludes its removal in between."""
    try:
        with _lock(folder.parent / "lock"):
            os.utime(folder / "complete")
    except FileNotFoundError:
        return False
    except PermissionError:  # a cache that was built before, for all users
        return (folder / "complete").exists()
    return True


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def unused_builds(cache: Path, current: Path) -> list[Path]:
    """Return the builds, and what interrupted builds have left, that were not used for :data:`UNUSED_SECONDS`."""
    found = []
    for folder in cache.iterdir():
        used = folder / "complete" if (folder / "complete").exists() else folder
        if folder.is_dir() and folder != current and time.time() - used.stat().st_mtime > UNUSED_SECONDS:
            found.append(folder)
    return found


def _short_name(cann: str) -> str:
    for name, version in CANN_VERSIONS.items():
        if cann in (name, version):
            return name
    raise BuildError(f"the emulator has no CANN {cann}; it has {', '.join(CANN_VERSIONS)}")


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchtitan_npu" / "emulator"


def _key(wheel: list[Path], cann: str) -> str:
    compiler = _run("gcc", "--version").splitlines()[0]
    version = importlib.metadata.version("torch_npu")
    content = hashlib.sha256(f"{compiler} {sys.version} {wheel[0].parent} {platform.machine()}".encode())
    for package in ("torch", "torch_npu"):
        content.update(_content_of(package).encode())
    for path in sorted((*RUNTIME_FOLDER.iterdir(), PROTOTYPES, TENSORS, Path(chips.__file__), Path(__file__))):
        if path.is_file():
            content.update(path.read_bytes())
    return f"torch_npu-{version}-cann-{cann}-{content.hexdigest()[:16]}"


def _content_of(package: str) -> str:
    """Return a text that changes with the content of an installed package: its version and the hashes of its files.

    A package that was not installed from a wheel has no hashes; it has the sizes and times of its libraries.
    """
    distribution = importlib.metadata.distribution(package)
    record = distribution.read_text("RECORD")
    if record is None:
        stats = [(str(path), path.stat()) for path in libraries_of(package)]
        record = "\n".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats)
    return f"{package} {distribution.version}\n{record}"


def libraries_of(package: str) -> list[Path]:
    """Return the shared libraries of an installed package, without importing it: torch would load torch_npu."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise BuildError(f"{package} is not installed: pip install torchtitan-npu[npu]")
    return sorted(Path(spec.origin).parent.glob("**/*.so*"))


def _compile_common(folder: Path, wheel: list[Path], torch: list[Path]) -> None:
    """Make everything but the libraries of a version."""
    for name in PACKAGES:
        (folder / name).mkdir(parents=True)
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").exists():
        raise BuildError(f"Python's headers are not in {include}: install them (python3-dev)")
    defined: set[str] = set()
    for source in sorted(RUNTIME_FOLDER.glob("*.c")):
        compiled = folder / f"{source.stem}.o"
        _run("gcc", "-c", "-fPIC", "-O2", "-w", "-I", include, source, "-o", compiled)
        if compiled.name not in OTHER_OBJECTS:
            lines = _run("nm", "--defined-only", compiled).splitlines()
            defined |= {line.split()[-1] for line in lines if line.strip()}
    generated = folder / "generated.c"
    unknown = unknown_functions(sorted(missing_symbols(wheel, torch) - defined))
    generated.write_text("\n".join([_chip_table(), *unknown]))
    _run("gcc", "-c", "-fPIC", "-w", "-fno-builtin", generated, "-o", generated.with_suffix(".o"))
    tool = folder / "memory_tool.c"
    tool.write_text("const char emulator_memory_tool = 1;")  # device.c tests for it
    _run("gcc", "-shared", "-fPIC", tool, "-o", folder / "lib64" / MEMORY_TOOL)
    queue = (folder / TASK_QUEUE_OBJECT, folder / "gil.o", "-ldl")
    _run("gcc", "-shared", "-fPIC", *queue, "-o", folder / "lib64" / TASK_QUEUE)
    for name in {*missing_libraries(wheel, torch), *OPENED_AT_RUN_TIME} - {RUNTIME, OPERATORS}:
        (folder / "lib64" / name).symlink_to(RUNTIME)
    (folder / OPERATOR_NAMES).write_text(json.dumps(sorted(operator_names(wheel))))


def unknown_functions(symbols: list[str]) -> list[str]:
    """Return C functions for symbols that the emulator does not have: a call is an error that names the function."""
    declarations = [
        "int refuse_unknown_function(const char *, _Bool *);",
        "void abort_in_unknown_function(const char *);",
    ]
    names = _run("c++filt", *symbols).splitlines() if symbols else []
    return [*declarations, *(_unknown_function(*each) for each in zip(symbols, names, strict=True))]


def _unknown_function(symbol: str, name: str) -> str:
    """Return the C function for one symbol. A mangled name is a valid C name."""
    if name.startswith(GRAPH_ENGINE):
        return f'void {symbol}(void) {{ abort_in_unknown_function("{name}"); }}'
    refuse = f'refuse_unknown_function("{name}", &printed)'
    if symbol in RETURN_POINTERS:
        return f"void *{symbol}(void) {{ static _Bool printed; {refuse}; return 0; }}"
    if symbol in RETURN_NUMBERS:
        return f"unsigned long long {symbol}(void) {{ static _Bool printed; {refuse}; return 0; }}"
    return f"int {symbol}(void) {{ static _Bool printed; return {refuse}; }}"


def _compile_version(folder: Path, cann: str) -> None:
    """Make the libraries of a version of CANN in a folder with everything else."""
    libraries = folder / "lib64"
    shared = ("gcc", "-shared", "-fPIC", "-w", "-Wl,-Bsymbolic")  # or another library could replace short names
    version = folder / "version.c"
    version.write_text(f'const char cann_version[] = "{CANN_VERSIONS[cann]}";')
    objects = [path for path in sorted(folder.glob("*.o")) if path.name not in OTHER_OBJECTS]
    system = ("-lm", "-lpthread", "-ldl")
    _run(*shared, version, *objects, f"-Wl,-soname,{RUNTIME}", *system, "-o", libraries / RUNTIME)
    entries = folder / "entries.c"
    entries.write_text(operator_entries(json.loads((folder / OPERATOR_NAMES).read_text()), cann))
    link = ("-L", libraries, "-lascendcl", "-Wl,-rpath,$ORIGIN")
    _run(*shared, "-Og", "-I", RUNTIME_FOLDER, entries, *link, "-o", libraries / OPERATORS)  # -O1 takes twice as long
    _run(*shared, folder / BRIDGE_OBJECT, *link, "-o", libraries / "_bridge.so")


def operator_entries(names: Iterable[str], cann: str) -> str:
    """Return the C source of every operator that this version of CANN has.

    ``aclnnXGetWorkspaceSize`` keeps the arguments, ``aclnnX`` launches.
    """
    prototypes = json.loads(PROTOTYPES.read_text())
    documents = json.loads(TENSORS.read_text())
    versions = list(CANN_VERSIONS)
    lines = ['#include "operators.h"', LAUNCH]
    for name in sorted({name.removesuffix("GetWorkspaceSize") for name in names} & prototypes.keys()):
        since = prototypes[name].get("since", versions[0])
        if versions.index(since) <= versions.index(cann):
            prototype = {key: prototypes[name][key] for key in ("types", "arguments", "outputs")}
            lines += _entry(name, **prototype, document=documents.get(name), cann=cann)
    return "\n".join(lines)


def _entry(
    name: str, types: str, arguments: list[str], outputs: list[str], document: dict[str, Any] | None, cann: str
) -> list[str]:
    mask = sum(1 << i for i, argument in enumerate(arguments) if argument in outputs)
    parameters = "".join(f"{C_TYPES[letter]} a{i}, " for i, letter in enumerate(types))
    values = ", ".join(f"{{.{FIELDS.get(letter, 'integer')} = a{i}}}" for i, letter in enumerate(types)) or "{0}"
    allowed, source = "0", ""
    lines = []
    if document is not None:
        allowed, source = f"{name}_allowed", document["source"]
        sets = [
            dtype_set(document.get("dtypes", {}), argument, series, cann)
            | rank_set(document.get("ranks", {}), argument, cann) << RANK_BIT
            for series in chips.SERIES
            for argument in arguments
        ]
        lines.append(f"static const uint64_t {allowed}[] = {{{', '.join(f'{each:#x}' for each in sets)}}};")
    names = ",".join(arguments)
    return [
        *lines,
        f'static Operator {name}_operator = {{"{name}", "{types}", "{names}", {mask:#x}, {allowed}, "{source}", 0}};',
        f"int {name}GetWorkspaceSize({parameters}uint64_t *workspace, void **executor) {{"
        f" Argument all[] = {{{values}}};"
        f" return emulator_prepare_call(&{name}_operator, all, {len(types)}, workspace, executor); }}",
        f'int {name}(void *, uint64_t, void *, void *) __attribute__((alias("launch")));',
    ]


def dtype_set(document: dict[str, Any], argument: str, series: str, cann: str) -> int:
    """Return the dtypes that an argument may have, bit i for number i of ``aclDataType``."""
    for arguments, by_series in document.items():
        if argument in arguments.split():
            for several, history in by_series.items():
                if series in several.split():
                    dtypes = in_version(cann, history)
                    return ANY_DTYPE if dtypes is None else sum(1 << ACL_DTYPES[name] for name in dtypes.split())
    return ANY_DTYPE


def rank_set(document: dict[str, Any], argument: str, cann: str) -> int:
    """Return the numbers of dimensions that an argument may have, bit i for i dimensions."""
    for arguments, history in document.items():
        if argument in arguments.split() and (ranks := in_version(cann, history)):
            return sum(1 << int(rank) for rank in ranks.split())
    return ANY_RANK


def in_version(cann: str, history: dict[str, Any]) -> Any:
    """Return the entry of a version in ``{first version: entry}``; ``None`` if there is none."""
    versions = list(CANN_VERSIONS)
    until = versions[: versions.index(cann) + 1]
    return next((history[each] for each in reversed(until) if each in history), None)


def _chip_table() -> str:
    series = list(chips.SERIES)
    rows = [f'{{"{name}", {series.index(chip.series)}}}' for name, chip in chips.CHIPS.items()]
    hidden = '__attribute__((visibility("hidden")))'
    return f"{hidden} const struct {{ const char *name; int series; }} chips[] = {{{', '.join(rows)}, {{0, 0}}}};"


def missing_libraries(wheel: list[Path], torch: list[Path]) -> set[str]:
    """Return CANN's libraries that ``wheel`` links to. Unlike the system's, their names have no version number."""
    shipped = {path.name for path in (*wheel, *torch)}
    # "... (NEEDED)  Shared library: [libascendcl.so]"
    lines = _run("readelf", "--dynamic", "--wide", *wheel).splitlines()
    needed = {line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line}
    return {name for name in needed - shipped if name.endswith(".so")}


def missing_symbols(wheel: list[Path], torch: list[Path]) -> set[str]:
    """Return the symbols that ``wheel`` needs and that torch, torch_npu, Python and the C library do not define."""
    # The system's symbols have a version: "memcpy@GLIBC_2.17".
    needed = {name for name in _dynamic_symbols(wheel, "--undefined-only", types="U") if "@" not in name}
    shipped = {name.partition("@")[0] for name in _dynamic_symbols([*wheel, *torch], "--defined-only")}
    this_process = ctypes.CDLL(None)
    return {name for name in needed - shipped if not hasattr(this_process, name)}


def _dynamic_symbols(paths: list[Path], which: str, types: str = "") -> set[str]:
    """Return the symbols of these libraries that the loader sees; ``types`` are nm's ("U"; weak ones are "w")."""
    # "                 U aclInit" or "0000000000123abc T aclInit"
    lines = (line.split() for line in _run("nm", "--dynamic", which, *paths).splitlines())
    return {fields[-1] for fields in lines if len(fields) >= 2 and (not types or fields[-2] in types)}


def operator_names(wheel: list[Path]) -> set[str]:
    """Return the functions of operators that ``wheel`` may look up. Their names are strings in its libraries."""
    names = (re.findall(rb"\0(aclnn[A-Z]\w*)(?=\0)", path.read_bytes()) for path in wheel)
    return {name.decode() for found in names for name in found}


def _run(*command: str | Path) -> str:
    """Run the command and return its standard output."""
    words = [str(word) for word in command]
    try:
        return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True).stdout
    except FileNotFoundError:
        raise BuildError(f"{words[0]} is needed to build the emulator: install gcc and binutils") from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{shlex.join(words)} failed with exit code {error.returncode}") from None


if __name__ == "__main__":
    print(build())
