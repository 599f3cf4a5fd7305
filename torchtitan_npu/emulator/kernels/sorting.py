"""Sorting and searching, and operators whose output size depends on the data.

Equal elements may come in another order than on the NPU where an operator does not promise a stable one.
"""

from __future__ import annotations

import torch

from torchtitan_npu.emulator.kernels.families import register, to_last_two
from torchtitan_npu.emulator.kernels.registry import kernel


def sort(x, stable, dim, descending):
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


register(
    {
        "Sort": sort,
        "Topk": torch.topk,
        "TopkV2": lambda x, k, dim, largest, sort, reserved: torch.topk(x, k, dim, largest, sort),
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
