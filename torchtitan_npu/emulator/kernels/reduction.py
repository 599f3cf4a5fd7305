"""Reductions, norms, running sums, sorting and searching.

An empty list of dimensions stands for all of them. Equal elements may come in another order than on the NPU where an
operator does not promise a stable one.
"""

from __future__ import annotations

import torch

from torchtitan_npu.emulator.kernels.registry import (
    kernel,
    register,
    to_last_in_its_dtype,
    to_last_two,
    write,
    write_all,
)

register(
    {
        "Cumprod": lambda x, dim, dtype: torch.cumprod(x, int(dim), dtype=dtype),
        "Cumsum": torch.cumsum,
        "LinalgVectorNorm": lambda x, order, dims, keep, dtype: torch.linalg.vector_norm(
            x, order, dims or None, keep, dtype=dtype
        ),
        "Mean": lambda x, dims, keep, dtype: torch.mean(x, dims or (), keep, dtype=dtype),
        "Prod": torch.prod,
        "ProdDim": torch.prod,
        "ReduceNansum": lambda x, dims, keep, dtype: torch.nansum(x, dims or (), keep, dtype=dtype),
        "ReduceSum": lambda x, dims, keep, dtype: torch.sum(x, dims or (), keep, dtype=dtype),
    },
    make=to_last_in_its_dtype,
)


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


register(
    {
        "All": lambda x, dims, keep: torch.all(x, dims or None, keep),
        "Amax": lambda x, dims, keep: torch.amax(x, dims or (), keep),
        "Amin": lambda x, dims, keep: torch.amin(x, dims or (), keep),
        "Any": lambda x, dims, keep: torch.any(x, dims or None, keep),
        "ArgMax": torch.argmax,
        "ArgMin": torch.argmin,
        "Bincount": torch.bincount,
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
        "Sort": lambda x, stable, dim, descending: torch.sort(x, dim=dim, descending=descending, stable=stable),
        "StdMeanCorrection": lambda x, dims, correction, keep: torch.std_mean(
            x, dims or None, correction=correction, keepdim=keep
        ),
        "Topk": torch.topk,
        "TopkV2": lambda x, k, dim, largest, sort, reserved: torch.topk(x, k, dim, largest, sort),
        "VarMean": lambda x, dims, correction, keep: torch.var_mean(
            x, dims or None, correction=correction, keepdim=keep
        ),
    },
    make=to_last_two,
)


def search(sequence, values, int32, right, sorter):
    return torch.searchsorted(sequence, values, right=right, sorter=sorter)


register(
    {
        "Bucketize": lambda x, boundaries, int32, right: torch.bucketize(x, boundaries, right=right),
        "SearchSorted": search,
        "SearchSorteds": search,
    }
)


def write_front(out, result):
    """Write ``result`` to the front of the output's memory, which has room for the largest result."""
    out.view(-1)[: result.numel()].copy_(result.reshape(-1))
    return tuple(result.shape)


@kernel("aclnnNonzero")
def nonzero(x, out):
    return {1: write_front(out, torch.nonzero(x))}


@kernel("aclnnNonzeroV2")
def nonzero_transposed(x, out):
    return {1: write_front(out, torch.nonzero(x).t())}


@kernel("aclnnMaskedSelect")
def masked_select(x, mask, out):
    return {2: write_front(out, torch.masked_select(x, mask.bool()))}


@kernel("aclnnUnique")
def unique(x, sort, with_inverse, values, inverse):
    found, positions = torch.unique(x, sorted=True, return_inverse=True)
    if with_inverse:
        write_front(inverse, positions)
    return {3: write_front(values, found)}


@kernel("aclnnUnique2")
def unique_with_counts(x, sort, with_inverse, with_counts, values, inverse, counts):
    found, positions, numbers = torch.unique(x, sorted=True, return_inverse=True, return_counts=True)
    sizes = {4: write_front(values, found)}
    if inverse.numel():
        write_front(inverse, positions)
    if with_counts:
        sizes[6] = write_front(counts, numbers)
    return sizes


@kernel("aclnnUniqueDim")
def unique_along(x, sort, with_inverse, dim, values, inverse, counts):
    found, positions, numbers = torch.unique(x, sorted=True, return_inverse=True, return_counts=True, dim=dim)
    write_front(inverse, positions)
    return {4: write_front(values, found), 6: write_front(counts, numbers)}


@kernel("aclnnUniqueConsecutive")
def unique_consecutive(x, with_inverse, with_counts, dim, values, inverse, counts):
    of_all = dim == 1000  # torch_npu's number for no dimension
    found, positions, numbers = torch.unique_consecutive(
        x, return_inverse=True, return_counts=True, dim=None if of_all else dim
    )
    sizes = {4: write_front(values, found)}
    if with_inverse:
        sizes[5] = write_front(inverse, positions)
    if with_counts:
        sizes[6] = write_front(counts, numbers)
    return sizes
