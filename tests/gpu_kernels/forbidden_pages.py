"""Run Triton's interpreter on tensors between memory pages that cannot be accessed.

A kernel that reads or writes beyond a tensor then ends the process. On a GPU, compute-sanitizer finds such an access.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
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
            place = arg.data_ptr(), extent(arg)  # one tensor may be passed for two arguments
            if place not in copies:
                copies[place] = arg, copy_of(arg)
            return copies[place][1].view(arg.dtype).as_strided(arg.shape, arg.stride())

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
