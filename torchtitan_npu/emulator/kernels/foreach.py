"""Operators on lists of tensors. A scalar is a number, a list of numbers, or a tensor with one or with all of them."""

from __future__ import annotations

from itertools import repeat

import torch

from torchtitan_npu.emulator.kernels.families import Function, write
from torchtitan_npu.emulator.kernels.formulas import add, addcdiv, addcmul, clamp_max, clamp_min, subtract
from torchtitan_npu.emulator.kernels.registry import Kernel, kernel

ROUNDING = {1: torch.round, 2: torch.floor, 3: torch.ceil, 5: torch.trunc, 7: torch.frac}
"""The argument ``roundMode`` of ``aclnnForeachRoundOffNumber``."""


def for_each(function: Function) -> Kernel:
    """Return a kernel that applies ``function`` to the items of its arguments and writes to those of the last."""

    def run(*arguments):
        for out, *items in zip(arguments[-1], *map(items_of, arguments[:-1]), strict=False):
            write(out, function(*items))

    return run


def items_of(argument):
    if isinstance(argument, list):
        return argument
    if isinstance(argument, torch.Tensor):
        argument = argument.tolist()  # a number, or as many as there are tensors
        if isinstance(argument, list) and len(argument) > 1:
            return argument
        argument = argument[0] if isinstance(argument, list) else argument
    return repeat(argument)


ONE_LIST = (
    "Abs Acos Asin Atan Cos Cosh Erf Erfc Exp Expm1 Log Log10 Log1p Log2 Neg Reciprocal Sigmoid Sign Sin Sinh Sqrt Tan"
    " Tanh"
)
for name in ONE_LIST.split():
    kernel(f"aclnnForeach{name}")(for_each(getattr(torch, name.lower())))

LISTS: dict[str, Function] = {
    "AddList": add,
    "AddListV2": add,
    "Copy": lambda x: x,
    "DivList": torch.div,
    "LerpList": torch.lerp,
    "LerpScalar": torch.lerp,
    "MaximumList": torch.maximum,
    "MinimumList": torch.minimum,
    "MulList": torch.mul,
    "PowList": torch.pow,
    "PowScalarAndTensor": torch.pow,
    "RoundOffNumber": lambda x, mode: ROUNDING[int(mode)](x),
    "RoundOffNumberV2": lambda x, mode: ROUNDING[int(mode)](x),
    "SubList": subtract,
    "SubListV2": subtract,
}
for name, function in LISTS.items():
    kernel(f"aclnnForeach{name}")(for_each(function))

WITH_SCALAR: dict[str, Function] = {
    "Add": torch.add,
    "Addcdiv": addcdiv,
    "Addcmul": addcmul,
    "Div": torch.div,
    "Maximum": clamp_min,
    "Minimum": clamp_max,
    "Mul": torch.mul,
    "Pow": torch.pow,
    "Sub": torch.sub,
}
for name, function in WITH_SCALAR.items():
    for variant in ("Scalar", "ScalarV2", "ScalarList"):
        kernel(f"aclnnForeach{name}{variant}")(for_each(function))


@kernel("aclnnForeachNorm")
def norms(tensors, order, outputs):
    for x, out in zip(tensors, outputs, strict=True):
        write(out, torch.linalg.vector_norm(x, order, dtype=out.dtype))


@kernel("aclnnForeachZeroInplace")
def zero(tensors):
    for x in tensors:
        x.zero_()


@kernel("aclnnForeachNonFiniteCheckAndUnscale")
def unscale(gradients, found, inverse_scale):
    for gradient in gradients:
        if not bool(gradient.isfinite().all()):
            found.fill_(1)
        gradient.mul_(inverse_scale.reshape(()))
