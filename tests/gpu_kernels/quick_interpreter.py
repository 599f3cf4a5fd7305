"""Make Triton's interpreter quicker: it spends half of the time of a small kernel on preparations.

Each call of a function replaces the functions of ``triton.language`` again, although the launch has replaced them, and
each operation builds the table of NumPy dtypes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import triton.language as tl
from triton.runtime import interpreter


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Prepare ``triton.language`` once per launch, and keep the NumPy dtypes."""
    replace, launch, np_dtype = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
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
        patch.object(interpreter.GridExecutor, "__call__", launch_afresh),
        patch.object(interpreter, "_get_np_dtype", known_np_dtype),
    ):
        yield
