"""The runtime's C functions, called without torch_npu: memory, forks, strings, symbols."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from torchtitan_npu.emulator.build import RETURN_NUMBERS, RUNTIME, RUNTIME_FOLDER

LIBRARY = Path(os.environ["ASCEND_HOME_PATH"], "lib64", RUNTIME)
PROLOG = f"""
import ctypes, os, sys, threading
runtime = ctypes.CDLL({str(LIBRARY)!r})
runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
def allocate(size):
    address = ctypes.c_void_p()
    return runtime.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(size), 0), address
"""


def start(program: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROLOG + program],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("path", sorted(RUNTIME_FOLDER.glob("*.c")), ids=lambda path: path.name)
def test_sources_compile_without_warnings(path: Path) -> None:
    include = sysconfig.get_paths()["include"]
    command = ["gcc", "-Wall", "-Wextra", "-Werror", "-O2", "-fsyntax-only", "-I", include, str(path)]
    subprocess.run(command, check=True)


def test_files_use_only_those_above_them() -> None:
    """The order that ``base.h`` states holds for includes and for symbols."""
    table = (RUNTIME_FOLDER / "base.h").read_text().partition("test_runtime.py):")[2].partition(" * Besides")[0]
    order = [name for row in re.findall(r"^ \*   (.*?)   ", table, re.MULTILINE) for name in row.split()]
    assert sorted(order) == sorted(path.stem for path in RUNTIME_FOLDER.glob("*.c"))
    symbols = {name: symbols_of(LIBRARY.parents[1] / f"{name}.o") for name in order}
    wrong = [
        f"{name}.c uses {', '.join(used)} of {later}.c"
        for name, later in itertools.combinations(order, 2)
        if (used := symbols[name][1] & symbols[later][0])
    ]
    assert not wrong
    for name in order:
        headers = re.findall(r'#include "(\w+)\.h"', (RUNTIME_FOLDER / f"{name}.c").read_text())
        later = set(order[order.index(name) + 1 :])
        assert not {header for header in headers if header in later}, f"{name}.c includes the header of a later file"


def symbols_of(compiled: Path) -> tuple[set[str], set[str]]:
    """Return the names that an object file defines for others, and those that it needs."""
    listed = subprocess.run(["nm", compiled], capture_output=True, text=True, check=True).stdout
    symbols = [line.split()[-2:] for line in listed.splitlines()]
    needed = {name for kind, name in symbols if kind == "U"}
    return {name for kind, name in symbols if kind.isupper()} - needed, needed


PREFIXES = ("acl", "Hccl", "hal", "mstx", "Msprof", "rt", "_ZN2ge", "_ZNK2ge", "_ZN3atb", "emulator_")
"""Names of CANN's functions begin so, and names of the emulator's that its other libraries call."""
OTHER_EXPORTS = {"cann_version", "snprintf_s", "strcpy_s", "vsnprintf_s"}


def test_only_names_of_cann_are_exported() -> None:
    """If the library is preloaded, an exported ``reduce`` would replace one of another library."""
    lines = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in lines.splitlines()}
    assert {"aclrtMalloc", "HcclAllReduce", "emulator_launch_call"} <= names
    assert {name for name in names if not name.startswith(PREFIXES)} == OTHER_EXPORTS


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("NPU_EMULATOR_SEED", "start the program with torchtitan-npu emulate --seed"),
        ("TASK_QUEUE_ENABLE", "set it before torchtitan-npu emulate"),
    ],
)
def test_a_library_that_is_not_preloaded_is_an_error(variable: str, advice: str) -> None:
    ran = start("print(runtime.aclrtSetDevice(0)); print(runtime.aclGetRecentErrMsg())", **{variable: "2"})
    output, _ = ran.communicate()
    assert output.startswith("207000") and advice in output


FORKS = """
def use():
    for _ in range(20):
        runtime.aclDestroyIntArray(ctypes.c_void_p(create(None, 0)))
        runtime.aclrtFree(allocate(512)[1])

create = runtime.aclCreateIntArray
create.restype = ctypes.c_void_p
stop = False
def use_until_stopped():
    while not stop:
        use()
threads = [threading.Thread(target=use_until_stopped) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(60):
    child = os.fork()
    if child == 0:
        use()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop = True
"""


def test_a_forked_child_finds_no_lock_taken() -> None:
    ran = start(FORKS)
    try:
        _, errors = ran.communicate(timeout=30)
    finally:
        ran.kill()
    assert ran.returncode == 0, errors


HOLD = """
print(allocate(768 << 10)[0], flush=True)
sys.stdin.read()
"""

ASK = """
for _ in range(2):
    print(allocate(512 << 10)[0], runtime.aclGetRecentErrMsg(), flush=True)
    sys.stdin.readline()
"""


def test_processes_share_the_memory_of_a_device(tmp_path: Path) -> None:
    machine = {"NPU_EMULATOR_FOLDER": str(tmp_path), "NPU_EMULATOR_MEMORY": str(1 << 20)}
    one = start(HOLD, **machine)
    assert one.stdout is not None and one.stdout.readline() == "0\n"
    other = start(ASK, **machine)
    assert other.stdout is not None and other.stdin is not None
    refused = other.stdout.readline()
    assert refused.startswith("207001") and f"other processes use {768 << 10}" in refused
    one.send_signal(signal.SIGKILL)
    one.wait()
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline().startswith("0 "), "a process that has ended uses nothing"
    other.communicate("\n")


FREED = """
address = allocate(512)[1]
ctypes.memset(address, 1, 512)
runtime.aclrtFree(address)
print("freed", flush=True)
ctypes.string_at(address, 1)
"""

UNMAPPED = """
address, physical = ctypes.c_void_p(), ctypes.c_void_p()
page = ctypes.c_size_t(1 << 21)
runtime.aclrtReserveMemAddress(ctypes.byref(address), page, ctypes.c_size_t(0), None, ctypes.c_uint64(0))
runtime.aclrtMallocPhysical(ctypes.byref(physical), page, None, ctypes.c_uint64(0))
for _ in range(2):
    assert runtime.aclrtMapMem(address, page, ctypes.c_size_t(0), physical, ctypes.c_uint64(0)) == 0
    ctypes.memset(address, 1, page.value)
    assert runtime.aclrtUnmapMem(address) == 0
print("freed", flush=True)
ctypes.string_at(address, 1)
"""


@pytest.mark.parametrize("program", [FREED, UNMAPPED], ids=["freed", "unmapped"])
def test_freed_memory_is_inaccessible(program: str) -> None:
    ran = start(program)
    output, errors = ran.communicate()
    assert output == "freed\n" and ran.returncode == -signal.SIGSEGV
    assert "a pointer to device memory was used after aclrtFree or aclrtUnmapMem" in errors


class Range(ctypes.Structure):
    _fields_ = [("device", ctypes.c_uint32), ("start", ctypes.c_void_p), ("size", ctypes.c_uint64)]


class Blocks(ctypes.Structure):
    _fields_ = [
        ("heap", ctypes.c_void_p),
        ("type", ctypes.c_int),
        ("count", ctypes.c_size_t),
        ("ranges", ctypes.POINTER(Range)),
        ("handles", ctypes.c_void_p),
    ]


class Reference(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("start", ctypes.c_void_p)]


class References(ctypes.Structure):
    _fields_ = [("count", ctypes.c_size_t), ("blocks", ctypes.POINTER(Reference))]


def test_many_blocks_in_ascending_order() -> None:
    """The first copy to a block fills the rest of it with NaN. A block that was returned is not touched.

    A block is found in logarithmic time: in a list of as many it would take several seconds.
    """
    count, size = 60_000, 16
    runtime = ctypes.CDLL(str(LIBRARY))
    memory, zero = (ctypes.c_ubyte * (count * size))(), ctypes.create_string_buffer(1)
    starts = [ctypes.addressof(memory) + size * i for i in range(count)]
    ranges = (Range * count)(*(Range(0, start, size) for start in starts))
    returned = (Reference * (count // 2))(*(Reference(0, start) for start in starts[::2]))
    copy = runtime.aclrtMemcpy
    copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
    began = time.process_time()
    runtime.mstxMemRegionsRegister(None, ctypes.byref(Blocks(None, 0, count, ranges, None)))
    runtime.mstxMemRegionsUnregister(None, ctypes.byref(References(len(returned), returned)))
    for start in starts:
        copy(start + 5, 1, zero, 1, 0)
    seconds = time.process_time() - began
    untouched, poisoned = bytes(size), b"\xff" * 5 + b"\0" + b"\xff" * (size - 6)
    assert bytes(memory) == (untouched + poisoned) * (count // 2)
    assert seconds < 2


def test_a_fill_poisons_the_rest_of_its_block() -> None:
    runtime = ctypes.CDLL(str(LIBRARY))
    memory = (ctypes.c_ubyte * 16)()
    block = (Range * 1)(Range(0, ctypes.addressof(memory), len(memory)))
    runtime.mstxMemRegionsRegister(None, ctypes.byref(Blocks(None, 0, 1, block, None)))
    assert runtime.aclrtMemset(ctypes.byref(memory, 5), ctypes.c_size_t(1), 7, ctypes.c_size_t(1)) == 0
    returned = (Reference * 1)(Reference(0, ctypes.addressof(memory)))
    runtime.mstxMemRegionsUnregister(None, ctypes.byref(References(1, returned)))
    assert bytes(memory) == b"\xff" * 5 + b"\7" + b"\xff" * 10


DUMP = """
import torch
x = torch.ones(2, device="npu")
for _ in range(2):
    torch.npu.init_dump()  # torch_npu ignores that this fails
print(runtime.aclmdlInitDump(), runtime.aclGetRecentErrMsg().decode())
"""


def test_a_function_that_the_emulator_does_not_have_is_an_error() -> None:
    output, errors = start(DUMP).communicate()
    message = "aclmdlInitDump is a function of CANN that the emulator does not have"
    assert output == f"207000 {message}\n", errors
    assert errors.splitlines().count(f"emulator: {message}") == 1, "it is printed once"


def test_a_number_is_no_error_code() -> None:
    runtime = ctypes.CDLL(str(LIBRARY))
    for symbol in RETURN_NUMBERS:
        runtime[symbol].restype = ctypes.c_uint64
        assert runtime[symbol](None) == 0


def test_a_function_without_an_error_code_ends_the_process() -> None:
    """A function of the graph engine, which returns an object."""
    ran = start("runtime._ZN2ge5GraphC1EPKc()")
    _, errors = ran.communicate()
    assert ran.returncode == -signal.SIGABRT and "ge::Graph::Graph(char const*) is a function of CANN" in errors


def test_secure_string_functions() -> None:
    runtime = ctypes.CDLL(str(LIBRARY))
    text = ctypes.create_string_buffer(8)
    assert runtime.strcpy_s(text, ctypes.c_size_t(8), b"seven c") == 0 and text.value == b"seven c"
    assert runtime.strcpy_s(text, ctypes.c_size_t(8), b"eight ch") != 0 and text.value == b""
    room, most = ctypes.c_size_t(8), ctypes.c_size_t(7)
    assert runtime.snprintf_s(text, room, most, b"%s-%d", b"abc", ctypes.c_int(42)) == 6 and text.value == b"abc-42"
    assert runtime.snprintf_s(text, room, most, b"%s", b"too long for it") == -1 and text.value == b"too lon"
