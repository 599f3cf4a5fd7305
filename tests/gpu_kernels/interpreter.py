"""Triton's interpreter, quicker and on tensors between memory pages that cannot be accessed.

A kernel that reads or writes beyond a tensor then ends the process. On a GPU, compute-sanitizer finds such an access.
"""

from __future__ import annotations

import ctypes
import inspect
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor

PAGE = mmap.PAGESIZE
NOTHING = 0
"""No access to a page, for mprotect."""
libc = ctypes.CDLL(None)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@contextmanager
def forbidden_pages() -> Iterator[None]:
    """Run every kernel on copies with a forbidden page before the tensor and one directly after it."""
    launch = GridExecutor.__call__

    def launch_on_copies(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        copies: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

        def copied(arg: Any) -> Any:
            if not isinstance(arg, Tensor) or not arg.numel():
                return arg
            memory = arg.data_ptr(), extent(arg)  # one tensor may be passed for two arguments
            if memory not in copies:
                copies[memory] = arg, copy_of(arg)
            return copies[memory][1].view(arg.dtype).as_strided(arg.shape, arg.stride())

        launch(executor, *map(copied, args), **{name: copied(value) for name, value in kwargs.items()})
        for arg, copy in copies.values():
            ctypes.memmove(arg.data_ptr(), copy.data_ptr(), extent(arg))

    with patch.object(GridExecutor, "__call__", launch_on_copies):
        yield


def extent(tensor: Tensor) -> int:
    """Return the bytes from the first element to the last."""
    steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(steps)) * tensor.element_size()


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor's memory as bytes, between forbidden pages."""
    size = extent(tensor)
    pages = -(-size // PAGE)
    memory = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=(pages + 1) * PAGE - size)
    ctypes.memmove(copy.data_ptr(), tensor.data_ptr(), size)
    for page in (0, pages + 1):
        if libc.mprotect(start + page * PAGE, PAGE, NOTHING):
            raise OSError("mprotect failed")
    return copy


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Prepare ``triton.language`` once per launch, and store the NumPy dtypes: half of the time of a small kernel.

    Otherwise each call of a function replaces the functions of ``triton.language`` again, and each operation builds the
    table of NumPy dtypes.
    """
    replace, launch, np_dtype = interpreter._patch_lang, GridExecutor.__call__, interpreter._get_np_dtype
    done: set[Any] = set()
    known: dict[str, Any] = {}

    def replace_once(fn: Any) -> Any:
        modules = {value for value in fn.__globals__.values() if inspect.ismodule(value) and value in (tl, tl.core)}
        if modules and modules <= done:
            return interpreter._LangPatchScope()
        done.update(modules)
        return replace(fn)

    def launch_afresh(executor: Any, *args: Any, **kwargs: Any) -> None:
        done.clear()
        launch(executor, *args, **kwargs)

    def known_np_dtype(of: Any) -> Any:
        of = of.element_ty if isinstance(of, tl.block_type) else of
        name = "pointer" if isinstance(of, tl.pointer_type) else of.name
        if name not in known:
            known[name] = np_dtype(of)
        return known[name]

    with (
        patch.object(interpreter, "_patch_lang", replace_once),
        patch.object(GridExecutor, "__call__", launch_afresh),
        patch.object(interpreter, "_get_np_dtype", known_np_dtype),
    ):
        yield
