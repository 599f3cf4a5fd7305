"""Reductions, norms and running sums. An empty list of dimensions stands for all of them."""

from __future__ import annotations

import torch

from torchtitan_npu.emulator.kernels.families import register, to_last_two, write, write_all
from torchtitan_npu.emulator.kernels.registry import kernel


@kernel("aclnnReduceSum")
def sum_(x, dims, keep, dtype, out):
    write(out, torch.sum(x, dims or (), keep, dtype=out.dtype))


@kernel("aclnnReduceNansum")
def nansum(x, dims, keep, dtype, out):
    write(out, torch.nansum(x, dims or (), keep, dtype=out.dtype))


@kernel("aclnnMean")
def mean(x, dims, keep, dtype, out):
    write(out, torch.mean(x, dims or (), keep, dtype=out.dtype))


@kernel("aclnnProd")
def product(x, dtype, out):
    write(out, torch.prod(x, dtype=out.dtype))


@kernel("aclnnProdDim")
def product_along(x, dim, keep, dtype, out):
    write(out, torch.prod(x, dim, keep, dtype=out.dtype))


@kernel("aclnnCumsum")
def running_sum(x, dim, dtype, out):
    write(out, torch.cumsum(x, dim, dtype=out.dtype))


@kernel("aclnnCumprod")
def running_product(x, dim, dtype, out):
    write(out, torch.cumprod(x, int(dim), dtype=out.dtype))


@kernel("aclnnLinalgVectorNorm")
def vector_norm(x, order, dims, keep, dtype, out):
    write(out, torch.linalg.vector_norm(x, order, dims or None, keep, dtype=out.dtype))


@kernel("aclnnNorm")
def norm(x, order, dims, keep, out):
    write(out, torch.linalg.vector_norm(x, 2 if order is None else order, dims or None, keep))


@kernel("aclnnAminmax")
def amin_and_amax(x, dims, keep, minimum, maximum):
    write_all((minimum, maximum), (torch.amin(x, dims or (), keep), torch.amax(x, dims or (), keep)))


@kernel("aclnnAminmaxDim")
def aminmax_along(x, dim, keep, minimum, maximum):
    write_all((minimum, maximum), torch.aminmax(x, dim=dim, keepdim=keep))


@kernel("aclnnHistc")
def histogram(x, bins, low, high, out):
    exact = x if x.dtype == torch.float32 else x.double()
    write(out, torch.histc(exact, bins, low, high))


def bincount(x, weights, length):
    return torch.bincount(x, weights, length)


register(
    {
        "All": lambda x, dims, keep: torch.all(x, dims or None, keep),
        "Amax": lambda x, dims, keep: torch.amax(x, dims or (), keep),
        "Amin": lambda x, dims, keep: torch.amin(x, dims or (), keep),
        "Any": lambda x, dims, keep: torch.any(x, dims or None, keep),
        "ArgMax": torch.argmax,
        "ArgMin": torch.argmin,
        "Bincount": bincount,
        "LogSumExp": lambda x, dims, keep: torch.logsumexp(x, dims or tuple(range(x.dim())), keep),
        "Max": torch.max,
        "Median": torch.median,
        "Min": torch.min,
        "NanMedian": torch.nanmedian,
        "Renorm": torch.renorm,
        "Std": lambda x, dims, correction, keep: torch.std(x, dims or None, correction=correction, keepdim=keep),
        "Trace": torch.trace,
        "VarCorrection": lambda x, dims, correction, keep: torch.var(
            x, dims or None, correction=correction, keepdim=keep
        ),
    },
    in_place="Renorm",
)
register(
    {
        "AminmaxAll": torch.aminmax,
        "Cummax": torch.cummax,
        "Cummin": torch.cummin,
        "Kthvalue": torch.kthvalue,
        "MaxDim": torch.max,
        "MedianDim": torch.median,
        "MinDim": torch.min,
        "NanMedianDim": torch.nanmedian,
        "StdMeanCorrection": lambda x, dims, correction, keep: torch.std_mean(
            x, dims or None, correction=correction, keepdim=keep
        ),
        "VarMean": lambda x, dims, correction, keep: torch.var_mean(
            x, dims or None, correction=correction, keepdim=keep
        ),
    },
    make=to_last_two,
)
