"""The ways to share a matrix product, and its gradient, over the ranks of one mesh dimension.

A product is an einsum, ``bmk, kn -> bmn``. Cutting one of its letters cuts every tensor that has it; a result without
the letter is a sum that is still to be taken (``Partial``). Besides, a product is linear in each of its factors: of one
factor that is such a sum it makes another. There are no further ways, and from these follows everything: uneven cuts
too, since a letter is cut alike wherever it appears.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.types import IntLikeType

Letters: TypeAlias = Sequence[str | None]
"""A letter for each dimension of a tensor; ``None`` for one that is not cut, since it is broadcast."""

WHOLE = Replicate()


class Way(NamedTuple):
    """Over one mesh dimension: where each input has to be, and where each output then is."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


def letters(left: Sequence[int], right: Sequence[int]) -> tuple[Letters, Letters, Letters]:
    """The letters of ``left @ right`` and of their product, from the two shapes."""
    left_batch, right_batch = left[:-2], right[:-2]
    count = max(len(left_batch), len(right_batch))
    batch = [f"batch{i}" for i in range(count)]

    def of(shape: Sequence[int], other: Sequence[int]) -> list[str | None]:
        """Batch dimensions, aligned at the end. One of size 1 is broadcast if the other operand has more."""
        sizes = dict(zip(reversed(batch), reversed(other), strict=False))
        own = zip(batch[count - len(shape) :], shape, strict=True)
        return [None if size == 1 and sizes.get(name, 1) != 1 else name for name, size in own]

    rows, columns = ["m"] * (len(left) > 1), ["n"] * (len(right) > 1)
    return (
        [*of(left_batch, right_batch), *rows, "k"],
        [*of(right_batch, left_batch), "k", *columns],
        [*batch, *rows, *columns],
    )


def product_ways(
    left: Letters, right: Letters, product: Letters, here: Sequence[Placement]
) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Placements of the two factors and of their product; replicated ones first, then rows cut, as a sequence is.

    ``here`` are the placements that the inputs have now: partial sums are kept where there are any, never made, and a
    cut in an unusual order (``_StridedShard``) is as good as any if all tensors are cut in it.

    torch's ``gen_single_dim_einsum_strategies``, which is private, makes nearly the same list from an equation. But it
    has no dimension that is broadcast, offers sums where there are none, which is more to choose from and takes the
    host longer, and gives placeholders that only the machinery for strategies of a single mesh dimension can fill in:
    that asks for one list for both gradients, and leaves no room for the order among equals.
    """
    yield WHOLE, WHOLE, WHOLE
    strides = {None: None} | {cut.split_factor: None for cut in here if isinstance(cut, _StridedShard)}
    present = dict.fromkeys(x for x in (*left, *right) if x is not None)
    for letter in sorted(present, key=lambda x: x.startswith("batch")):  # a stable order, the same on all ranks
        for stride in strides:
            factors = (_cut(left, letter, stride) or WHOLE, _cut(right, letter, stride) or WHOLE)
            yield *factors, _cut(product, letter, stride) or Partial()
    for total in dict.fromkeys(x for x in here if is_sum(x)):
        yield total, WHOLE, total
        yield WHOLE, total, total


def matmul_ways(left: Sequence[int], right: Sequence[int], here: Sequence[Placement]) -> list[Way]:
    """The ways of ``left @ right``, from their shapes and present placements."""
    return [Way((a, b), (c,)) for a, b, c in product_ways(*letters(left, right), here)]


def matmul_backward_ways(
    left: Sequence[int], right: Sequence[int], here: Sequence[Placement], mask: Sequence[bool]
) -> list[Way]:
    """The ways to compute the gradients of ``left`` and ``right`` that ``mask`` wants; ``here`` begins with grad.

    Two products, ``grad @ right.T`` and ``left.T @ grad``: any two ways with the same placement of ``grad`` make one of
    the whole, if each gradient is cut as its operand is. It has to be, because one call computes both, and sums each
    to its operand's local shape; and it is what the optimizer wants. Of an operand that no wanted gradient is computed
    from only that shape matters. An unwanted gradient counts as placed like its operand: kernels leave it out, but
    torch_npu's shape functions do not.
    """
    a, b, c = letters(left, right)
    grad_here, left_here, right_here = here
    left_grads = list(product_ways(c, b, a, here)) if mask[0] else []
    right_grads = list(product_ways(c, a, b, here)) if mask[1] else []
    if mask[0] and mask[1]:
        return [
            Way((grad, left_at, right_at), (left_grad, right_grad))
            for grad, right_at, left_grad in left_grads
            for same_grad, left_at, right_grad in right_grads
            if grad == same_grad and _cut_alike(left_at, left_grad) and _cut_alike(right_at, right_grad)
        ]
    if mask[0]:
        return [Way((g, _shape_of(dx, left_here), w), (dx, w)) for g, w, dx in left_grads]
    if mask[1]:
        return [Way((g, x, _shape_of(dw, right_here)), (x, dw)) for g, x, dw in right_grads]
    return [Way((grad_here, left_here, right_here), (left_here, right_here))]


def is_sum(placement: Placement) -> bool:
    """Whether the tensor is a sum or mean over the ranks; no maximum, and no sum with conditions, as subclasses are."""
    return type(placement) is Partial and placement.reduce_op in Partial.LINEAR_REDUCE_OPS


def is_cut(placement: Placement) -> bool:
    return isinstance(placement, Shard | _StridedShard)


def _cut(tensor: Letters, letter: str, stride: IntLikeType | None) -> Placement | None:
    if letter not in tensor:
        return None
    dim = tensor.index(letter)
    return Shard(dim) if stride is None else _StridedShard(dim, split_factor=stride)


def _cut_alike(one: Placement, other: Placement) -> bool:
    return one == other or not (is_cut(one) or is_cut(other))


def _shape_of(gradient: Placement, here: Placement) -> Placement:
    """The cheapest placement of an operand that is read for its shape alone: as its gradient is cut."""
    if is_cut(gradient):
        return gradient
    return here if here.is_partial() else WHOLE
