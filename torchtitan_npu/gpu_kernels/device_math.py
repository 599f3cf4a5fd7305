"""Functions for Triton kernels: an accurate sigmoid, and integers in the order of floats."""

import triton
import triton.language as tl

from torchtitan_npu.gpu_kernels.launch import LOG2_E

LN_2_HIGH = tl.constexpr(0.693145751953125)  # 16 bits: exact times any exponent
LN_2_LOW = tl.constexpr(1.42860682030941723212e-6)


@triton.jit
def exact_sigmoid(a):
    """Return the sigmoid of the float32 ``a``, within 3 units in the last place for ``a`` above -88.3.

    Below -88.4, where the sigmoid is under 4.2e-39, a subnormal number, the result is 0. The error of Triton's own
    exponential grows with its argument.
    """
    x = tl.minimum(tl.maximum(-a, -100.0), 100.0)  # beyond that, the result is 1 or 0
    whole = tl.floor(x * LOG2_E + 0.5)
    rest = tl.fma(whole, -LN_2_LOW, tl.fma(whole, -LN_2_HIGH, x))
    return tl.div_rn(tl.full(a.shape, 1.0, tl.float32), 1.0 + tl.exp2(rest * LOG2_E) * tl.exp2(whole))


@triton.jit
def ordered(value):
    """Return integers in the order of the float32 ``value``. -0 equals 0, and NaN is above all."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
