"""Element-wise operators, on tensors and on lists of tensors.

A scalar of the operators on lists is a number, a list of numbers, or a tensor with one or with all of them.
"""

from __future__ import annotations

from itertools import repeat

import torch

from torchtitan_npu.emulator.kernels.registry import Function, Kernel, kernel, register, write, write_all

aten = torch.ops.aten
ROUNDING_MODES = {0: None, 1: "trunc", 2: "floor"}
"""The argument ``mode`` of ``aclnnDivMod``."""
ROUNDING = {1: torch.round, 2: torch.floor, 3: torch.ceil, 5: torch.trunc, 7: torch.frac}
"""The argument ``roundMode`` of ``aclnnForeachRoundOffNumber``."""


def by_keyword(function: Function, keyword: str) -> Function:
    """Return ``function`` with its last argument passed by this keyword."""
    return lambda *arguments: function(*arguments[:-1], **{keyword: arguments[-1]})


add = by_keyword(torch.add, "alpha")
subtract = by_keyword(torch.sub, "alpha")
reverse_subtract = by_keyword(torch.rsub, "alpha")
addcmul = by_keyword(torch.addcmul, "value")
addcdiv = by_keyword(torch.addcdiv, "value")
clamp_min = by_keyword(torch.clamp, "min")
clamp_max = by_keyword(torch.clamp, "max")


def divide(left, right, mode):
    return torch.div(left, right, rounding_mode=ROUNDING_MODES[mode])


def logit(x, eps):
    return torch.logit(x, None if eps < 0 else eps)


def logit_gradient(x, gradient, eps):
    return aten.logit_backward(gradient, x, None if eps < 0 else eps)


SAME_NAME = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Erfc Erfinv Exp Exp2 Expm1 Floor Frac IsFinite IsNegInf"
    " IsPosInf Log Log10 Log1p Log2 Neg Reciprocal Round Rsqrt Signbit Sin Sinc Sinh Sqrt Tan Tanh Trunc"
)
ONE_TENSOR: dict[str, Function] = {
    **{name: getattr(torch, name.lower()) for name in SAME_NAME.split()},
    "AngleV2": torch.angle,
    "BitwiseNot": torch.bitwise_not,
    "LogicalNot": torch.logical_not,
    "Sign": torch.sgn,
}

ARITHMETIC: dict[str, Function] = {
    "Add": add,
    "AddRelu": lambda left, right, alpha: torch.relu(add(left, right, alpha)),
    "AddV3": lambda left, right, alpha: add(torch.as_tensor(left), right, alpha),
    "Addcdiv": addcdiv,
    "Addcmul": addcmul,
    "Adds": add,
    "Atan2": torch.atan2,
    "Clamp": torch.clamp,
    "ClampMax": clamp_max,
    "ClampMaxTensor": clamp_max,
    "ClampMin": clamp_min,
    "ClampMinTensor": clamp_min,
    "ClampTensor": torch.clamp,
    "Complex": torch.complex,
    "Div": torch.div,
    "DivMod": divide,
    "DivMods": divide,
    "Divs": torch.div,
    "FloorDivide": torch.floor_divide,
    "FloorDivides": torch.floor_divide,
    "FmodScalar": torch.fmod,
    "FmodTensor": torch.fmod,
    "Gcd": torch.gcd,
    "IsClose": torch.isclose,
    "Lerp": torch.lerp,
    "Lerps": torch.lerp,
    "LogAddExp": torch.logaddexp,
    "LogAddExp2": torch.logaddexp2,
    "Logit": logit,
    "LogitGrad": logit_gradient,
    "Maximum": torch.maximum,
    "Minimum": torch.minimum,
    "Mul": torch.mul,
    "Muls": torch.mul,
    "NanToNum": torch.nan_to_num,
    "Polar": torch.polar,
    "PowScalarTensor": torch.pow,
    "PowTensorScalar": torch.pow,
    "PowTensorTensor": torch.pow,
    "RemainderScalarTensor": torch.remainder,
    "RemainderTensorScalar": torch.remainder,
    "RemainderTensorTensor": torch.remainder,
    "RoundDecimals": by_keyword(torch.round, "decimals"),
    "Rsub": reverse_subtract,
    "Rsubs": reverse_subtract,
    "Sub": subtract,
    "Subs": subtract,
    "SWhere": lambda condition, x, otherwise: torch.where(condition.bool(), x, otherwise),
    "XLogYScalarOther": torch.xlogy,
    "XLogYScalarSelf": torch.xlogy,
    "XLogYTensor": torch.xlogy,
}

LOGIC: dict[str, Function] = {
    "BitwiseAndScalar": torch.bitwise_and,
    "BitwiseAndTensor": torch.bitwise_and,
    "BitwiseOrScalar": torch.bitwise_or,
    "BitwiseOrTensor": torch.bitwise_or,
    "BitwiseXorScalar": torch.bitwise_xor,
    "BitwiseXorTensor": torch.bitwise_xor,
    "EqScalar": torch.eq,
    "EqTensor": torch.eq,
    "GeScalar": torch.ge,
    "GeTensor": torch.ge,
    "GtScalar": torch.gt,
    "GtTensor": torch.gt,
    "LeScalar": torch.le,
    "LeTensor": torch.le,
    "LeftShift": torch.bitwise_left_shift,
    "LeftShifts": torch.bitwise_left_shift,
    "LogicalAnd": torch.logical_and,
    "LogicalOr": torch.logical_or,
    "LogicalXor": torch.logical_xor,
    "LtScalar": torch.lt,
    "LtTensor": torch.lt,
    "NeScalar": torch.ne,
    "NeTensor": torch.ne,
    "RightShift": torch.bitwise_right_shift,
}

register(
    ONE_TENSOR,
    in_place="Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Erfc Erfinv Exp Exp2 Expm1 Floor Frac Log Log10 Log1p"
    " Log2 LogicalNot Reciprocal Rsqrt Sin Sinc Sinh Sqrt Tan Tanh",
)
register(
    ARITHMETIC,
    in_place="Add AddRelu Addcdiv Addcmul Adds Atan2 ClampMax ClampMaxTensor ClampMinTensor Div DivMod DivMods Divs"
    " FloorDivide FloorDivides FmodScalar FmodTensor Lerp Lerps Mul Muls NanToNum PowTensorScalar PowTensorTensor"
    " RemainderTensorScalar RemainderTensorTensor RoundDecimals Sub Subs XLogYScalarOther",
)
register(
    LOGIC,
    in_place="BitwiseAndScalar BitwiseAndTensor BitwiseXorScalar BitwiseXorTensor EqScalar EqTensor GeScalar GeTensor"
    " GtScalar GtTensor LeScalar LeTensor LogicalAnd LogicalOr LtScalar LtTensor NeScalar NeTensor",
)


@kernel("aclnnIsInScalarTensor", "aclnnIsInTensorScalar")
def is_in(elements, among, assume_unique, invert, out):
    write(out, torch.isin(elements, among, assume_unique=assume_unique, invert=invert))


@kernel("aclnnEqual")
def equal(left, right, out):
    out.fill_(torch.equal(left, right))


@kernel("aclnnAmpUpdateScale")
def update_scale(scale, tracker, found, growth_factor, backoff_factor, growth_interval, new_scale, new_tracker):
    if found.item():
        write_all((new_scale, new_tracker), (scale * backoff_factor, torch.zeros_like(tracker)))
    elif tracker.item() + 1 == growth_interval:
        grown = scale * growth_factor
        write_all((new_scale, new_tracker), (torch.where(grown.isfinite(), grown, scale), torch.zeros_like(tracker)))
    else:
        write_all((new_scale, new_tracker), (scale, tracker + 1))


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
