"""Run a kernel for the runtime: find it, call it, and turn what goes wrong into an error of ACL."""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchtitan_npu.emulator.kernels.registry import (
    CHECKS,
    FAMILIES,
    KERNELS,
    Refused,
    argument_names,
    describe_call,
    prototypes,
)
from torchtitan_npu.torch_internals.autograd import tensor_of_capsule
from torchtitan_npu.torch_internals.dispatch import without_function_modes

PARAMETER_ERROR = 161002
"""ACLNN_ERR_PARAM_INVALID: the arguments are refused."""

INTERNAL_ERROR = 561000
"""ACLNN_ERR_INNER: the operator failed."""


def run(name: str, stream: int, arguments: tuple[Any, ...]) -> Any:
    """Compute one call. Return sizes of outputs that depend on the data, None, or (error code, message)."""
    function = KERNELS.get(name)
    if function is None:
        return INTERNAL_ERROR, _missing(name, arguments)
    with without_function_modes():
        return function(*arguments)


def check(name: str, stream: int, arguments: tuple[Any, ...]) -> Any:
    """Check the arguments of a call. Return bytes of workspace, or (error code, message)."""
    try:
        with without_function_modes():
            return CHECKS[name](*arguments) or 0
    except Refused as error:
        return PARAMETER_ERROR, f"{describe_call(name, arguments)}: {error}"


def failure(name: str, arguments: tuple[Any, ...] | None, error: BaseException) -> str:
    """Return the message of an exception in a kernel or a check, which the runtime returns as the device's error."""
    call = name if arguments is None else describe_call(name, arguments)
    return f"{call} failed in the emulator:\n{''.join(traceback.format_exception(error))}"


def _missing(name: str, arguments: tuple[Any, ...]) -> str:
    prototype, names = prototypes()[name], argument_names(name)
    outputs = [
        python_name
        for python_name, argument in zip(names, prototype["arguments"], strict=True)
        if argument in prototype["outputs"]
    ]
    function = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.removeprefix("aclnn")).lower()
    return (
        f"the emulator has no kernel for {describe_call(name, arguments)}. "
        f"Add to torchtitan_npu/emulator/kernels/{_family_of(prototype['source'])}.py:\n\n"
        f'@kernel("{name}")\n'
        f"def {function}({', '.join(names)}):\n"
        f"    ...  # write {', '.join(outputs)} in place\n"
    )


def _family_of(source: str) -> str:
    """Return the module with most operators that CANN declares in the folder of ``source``, or one for any."""
    folder = source.split("/")[:3]  # owner, repository, folder
    near = (FAMILIES[name] for name in KERNELS if prototypes()[name]["source"].split("/")[:3] == folder)
    most = Counter(near).most_common(1)
    return most[0][0] if most else "pointwise"


def install() -> None:
    """Give the runtime these functions."""
    path = str(Path(os.environ["ASCEND_HOME_PATH"], "lib64", "_bridge.so"))
    spec = importlib.util.spec_from_file_location(
        "_bridge", path, loader=importlib.machinery.ExtensionFileLoader("_bridge", path)
    )
    assert spec is not None and spec.loader is not None
    bridge = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bridge)
    runner: Callable[[str, int, tuple[Any, ...]], Any] = run
    if os.environ.get("NPU_EMULATOR_CHECK_NAN"):
        from torchtitan_npu.emulator.nan_check import stop_at_first_nan

        runner = stop_at_first_nan(run)
    if os.environ.get("NPU_EMULATOR_RECORD"):
        from torchtitan_npu.emulator.records import mark_training_steps

        mark_training_steps(bridge.mark_step)
    bridge.install(tensor_of_capsule, runner, check, CHECKS, failure)
    atexit.register(_finish_queue, bridge.finish_queue)


def _finish_queue(finish: Callable[[], str | None]) -> None:
    """Run what is still queued when the program ends: later there is no interpreter for it."""
    failed = finish()
    if failed is not None:
        print(f"emulator: a queued call failed: {failed}", file=sys.stderr)
