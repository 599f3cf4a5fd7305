"""Element-wise operators."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchtitan_npu.emulator.kernels.families import Function, register, write, write_all
from torchtitan_npu.emulator.kernels.formulas import add, addcdiv, addcmul, clamp_max, clamp_min, subtract
from torchtitan_npu.emulator.kernels.registry import kernel

aten = torch.ops.aten
ROUNDING_MODES = {0: None, 1: "trunc", 2: "floor"}
"""The argument ``mode`` of ``aclnnDivMod``."""


def reverse_subtract(left, right, alpha):
    return torch.rsub(left, right, alpha=alpha)


def divide(left, right, mode):
    return torch.div(left, right, rounding_mode=ROUNDING_MODES[mode])


def add_to_scalar(left, right, alpha):
    return torch.add(torch.as_tensor(left), right, alpha=alpha)


def add_relu(left, right, alpha):
    return torch.relu(torch.add(left, right, alpha=alpha))


def logit(x, eps):
    return torch.logit(x, None if eps < 0 else eps)


def logit_gradient(x, gradient, eps):
    return aten.logit_backward(gradient, x, None if eps < 0 else eps)


def tanh_gelu(x):
    """Return the approximation by tanh, as CANN documents ``aclnnGelu``.

    torch_npu calls it for ``F.gelu(x)``, whatever ``approximate`` is, unless it is told to be compatible with torch.
    """
    return F.gelu(x, approximate="tanh")


def tanh_gelu_gradient(gradient, x):
    return aten.gelu_backward(gradient, x, approximate="tanh")


def fast_gelu(x):
    """Return x * sigmoid(1.702 x), as CANN documents this operator."""
    return (x.float() * torch.sigmoid(1.702 * x.float())).to(x.dtype)


def fast_gelu_gradient(gradient, x):
    sigmoid = torch.sigmoid(1.702 * x.float())
    return gradient.float() * sigmoid * (1 + 1.702 * x.float() * (1 - sigmoid))


ONE_TENSOR: dict[str, Function] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "AngleV2": torch.angle,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Erfc": torch.erfc,
    "Erfinv": torch.erfinv,
    "Exp": torch.exp,
    "Exp2": torch.exp2,
    "Expm1": torch.expm1,
    "Floor": torch.floor,
    "Frac": torch.frac,
    "IsFinite": torch.isfinite,
    "IsNegInf": torch.isneginf,
    "IsPosInf": torch.isposinf,
    "Log": torch.log,
    "Log10": torch.log10,
    "Log1p": torch.log1p,
    "Log2": torch.log2,
    "LogicalNot": torch.logical_not,
    "Neg": torch.neg,
    "Reciprocal": torch.reciprocal,
    "Round": torch.round,
    "Rsqrt": torch.rsqrt,
    "Sign": torch.sgn,
    "Signbit": torch.signbit,
    "Sin": torch.sin,
    "Sinc": torch.sinc,
    "Sinh": torch.sinh,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
    "Trunc": torch.trunc,
}

ARITHMETIC: dict[str, Function] = {
    "Add": add,
    "AddRelu": add_relu,
    "AddV3": add_to_scalar,
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
    "RoundDecimals": lambda x, decimals: torch.round(x, decimals=decimals),
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

ACTIVATIONS: dict[str, Function] = {
    "Celu": F.celu,
    "Elu": aten.elu,
    "EluBackward": aten.elu_backward,
    "FastGelu": fast_gelu,
    "FastGeluBackward": fast_gelu_gradient,
    "Gelu": tanh_gelu,
    "GeluBackward": tanh_gelu_gradient,
    "GeluBackwardV2": lambda gradient, x, approximate: aten.gelu_backward(gradient, x, approximate=approximate),
    "GeluV2": lambda x, approximate: F.gelu(x, approximate="tanh" if approximate else "none"),
    "Glu": F.glu,
    "GluBackward": aten.glu_backward,
    "Hardshrink": F.hardshrink,
    "HardshrinkBackward": aten.hardshrink_backward,
    "Hardsigmoid": F.hardsigmoid,
    "HardsigmoidBackward": aten.hardsigmoid_backward,
    "Hardswish": F.hardswish,
    "HardswishBackward": aten.hardswish_backward,
    "HardswishBackwardV2": aten.hardswish_backward,
    "Hardtanh": F.hardtanh,
    "HardtanhBackward": aten.hardtanh_backward,
    "LeakyRelu": F.leaky_relu,
    "LeakyReluBackward": aten.leaky_relu_backward,
    "LogSigmoid": F.logsigmoid,
    "Mish": F.mish,
    "MishBackward": aten.mish_backward,
    "Prelu": F.prelu,
    "Relu": torch.relu,
    "Sigmoid": torch.sigmoid,
    "SigmoidBackward": aten.sigmoid_backward,
    "Silu": F.silu,
    "SiluBackward": aten.silu_backward,
    "Softplus": F.softplus,
    "SoftplusBackward": aten.softplus_backward,
    "Softshrink": F.softshrink,
    "SoftshrinkBackward": aten.softshrink_backward,
    "TanhBackward": aten.tanh_backward,
    "Threshold": F.threshold,
    "ThresholdBackward": aten.threshold_backward,
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
register(ACTIVATIONS, in_place="Celu Elu Hardsigmoid Hardswish Hardtanh LeakyRelu Mish Relu Sigmoid Threshold")


@kernel("aclnnLogSigmoidForward")
def log_sigmoid(x, out, buffer):
    write(out, F.logsigmoid(x))


@kernel("aclnnLogSigmoidBackward")
def log_sigmoid_gradient(gradient, x, buffer, out):
    # The buffer is what torch's CPU operator keeps for its gradient; the NPU recomputes.
    write(out, gradient * torch.sigmoid(-x))


@kernel("aclnnPreluBackward")
def prelu_gradient(gradient, x, weight, gradient_x, gradient_weight):
    shape = [1, -1, *[1] * (x.dim() - 2)] if weight.numel() > 1 else [1] * x.dim()
    positive = x > 0
    write(gradient_x, torch.where(positive, gradient, gradient * weight.reshape(shape)))
    of_weight = torch.where(positive, 0, gradient * x)
    write(gradient_weight, of_weight.sum_to_size([x.shape[1] if n == -1 else n for n in shape]))


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
