"""Matrix products. The argument that allows the NPU a lower precision (HF32) is ignored: float32 stays float32."""

from __future__ import annotations

import torch

from torchtitan_npu.emulator.kernels.families import register, write
from torchtitan_npu.emulator.kernels.registry import kernel


@kernel("aclnnMatmul", "aclnnMm", "aclnnBatchMatMul", "aclnnMv")
def matmul(left, right, out, precision):
    dtype = torch.promote_types(left.dtype, out.dtype)  # bfloat16 inputs with a float32 output round nowhere
    write(out, torch.matmul(left.to(dtype), right.to(dtype)))


def add_product(function):
    """Return a kernel for ``beta * self + alpha * left @ right``."""

    def run(x, left, right, beta, alpha, out, precision):
        write(out, function(x, left, right, beta=beta, alpha=alpha))

    return run


kernel("aclnnAddmm")(add_product(torch.addmm))
kernel("aclnnAddbmm")(add_product(torch.addbmm))
kernel("aclnnBaddbmm")(add_product(torch.baddbmm))


@kernel("aclnnInplaceAddmm")
def addmm_in_place(x, left, right, beta, alpha, precision):
    write(x, torch.addmm(x, left, right, beta=beta, alpha=alpha))


@kernel("aclnnAddmv")
def addmv(x, matrix, vector, alpha, beta, out, precision):
    write(out, torch.addmv(x, matrix, vector, beta=beta, alpha=alpha))


def outer_product(x, left, right, beta, alpha):
    return torch.addr(x, left, right, beta=1 if beta is None else beta, alpha=1 if alpha is None else alpha)


register(
    {
        "Addr": outer_product,
        "Dot": torch.dot,
        "Inverse": torch.linalg.inv,
        "LinalgCholesky": lambda x, upper: torch.linalg.cholesky(x, upper=upper),
        "LinalgCross": lambda left, right, dim: torch.linalg.cross(left, right, dim=dim),
    },
    in_place="Addr",
)
