"""Gated activations."""

from torchtitan_npu.emulator.kernels.fused import fused


@fused("npu_swiglu", "aclnnSwiGlu")
def swiglu(x, dim, out):
    return {"input": x, "dim": dim}, (out,)


@fused("npu_swiglu_backward", "aclnnSwiGluGrad")
def swiglu_grad(y_grad, x, dim, out):
    return {"grad_output": y_grad, "input": x, "dim": dim}, (out,)
