"""The valid placements of a matrix product, and of its gradients, over one mesh dimension.

A product is an einsum, ``bmk, kn -> bmn``. Sharding one of its letters shards every tensor that has it; a result
without the letter is a sum over the ranks (``Partial``). A product is also linear in each factor: one factor that is
``Partial`` makes the result ``Partial``. There are no other valid placements. Uneven shards are covered, because a
letter is sharded equally wherever it appears.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.types import IntLikeType

from torchtitan_npu.torch_internals.dtensor import StridedShard

Letters: TypeAlias = Sequence[str | None]
"""One letter per dimension of a tensor; ``None`` for a dimension that is broadcast and cannot be sharded."""

REPLICATE = Replicate()


class Strategy(NamedTuple):
    """Placements over one mesh dimension: those that the inputs need, and those of the outputs."""

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


def letters(left: Sequence[int], right: Sequence[int]) -> tuple[Letters, Letters, Letters]:
    """Return the letters of ``left``, ``right`` and ``left @ right``, from the two shapes."""
    left_batch, right_batch = left[:-2], right[:-2]
    count = max(len(left_batch), len(right_batch))
    batch = [f"batch{i}" for i in range(count)]

    def of(shape: Sequence[int], other: Sequence[int]) -> list[str | None]:
        """Return the letters of batch dimensions, aligned at the end. Size 1 is broadcast if ``other`` has more."""
        sizes = dict(zip(reversed(batch), reversed(other), strict=False))
        named = zip(batch[count - len(shape) :], shape, strict=True)
        return [None if size == 1 and sizes.get(name, 1) != 1 else name for name, size in named]

    rows, columns = ["m"] * (len(left) > 1), ["n"] * (len(right) > 1)
    return (
        [*of(left_batch, right_batch), *rows, "k"],
        [*of(right_batch, left_batch), "k", *columns],
        [*batch, *rows, *columns],
    )


def product_placements(
    left: Letters, right: Letters, product: Letters, current: Sequence[Placement]
) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Yield placements of the two factors and of their product: replicated first, then sharded rows.

    ``current`` are the present placements of the inputs. ``Partial`` stays where an input has it, and is never
    introduced. A strided shard (``_StridedShard``) is valid if all tensors have the same stride.

    torch's private ``gen_single_dim_einsum_strategies`` makes nearly the same list. It has no broadcast dimensions, and
    it introduces ``Partial``, which means more candidates and more host time.
    """
    yield REPLICATE, REPLICATE, REPLICATE
    strides = {None: None} | {shard.split_factor: None for shard in current if isinstance(shard, StridedShard)}
    present = dict.fromkeys(x for x in (*left, *right) if x is not None)
    for letter in sorted(present, key=lambda x: x.startswith("batch")):  # stable: the same order on all ranks
        for stride in strides:
            factors = (_shard(left, letter, stride) or REPLICATE, _shard(right, letter, stride) or REPLICATE)
            yield *factors, _shard(product, letter, stride) or Partial()
    # a sum or mean over the ranks: no maximum, and no masked sum (a subclass)
    linear = (x for x in current if type(x) is Partial and x.reduce_op in Partial.LINEAR_REDUCE_OPS)
    for partial in dict.fromkeys(linear):
        yield partial, REPLICATE, partial
        yield REPLICATE, partial, partial


def matmul_strategies(left: Sequence[int], right: Sequence[int], current: Sequence[Placement]) -> list[Strategy]:
    """Return the strategies of ``left @ right``, from their shapes and present placements."""
    return [Strategy((a, b), (c,)) for a, b, c in product_placements(*letters(left, right), current)]


def matmul_backward_strategies(
    left: Sequence[int], right: Sequence[int], current: Sequence[Placement], mask: Sequence[bool]
) -> list[Strategy]:
    """Return the strategies for the gradients of ``left`` and ``right`` that ``mask`` selects.

    ``current`` are the placements of grad, left and right. The gradients are two products, ``grad @ right.T`` and
    ``left.T @ grad``. A strategy of each, with the same placement of ``grad``, makes a strategy of the call if each
    gradient is sharded as its operand: one call computes both, and sums each to its operand's local shape. An operand
    that no selected gradient reads contributes only that shape. A gradient that is not selected counts as placed like
    its operand: kernels omit it, but torch_npu's shape functions do not.
    """
    a, b, c = letters(left, right)
    current_grad, current_left, current_right = current
    left_grads = list(product_placements(c, b, a, current)) if mask[0] else []
    right_grads = list(product_placements(c, a, b, current)) if mask[1] else []
    if mask[0] and mask[1]:
        return [
            Strategy((grad, left_at, right_at), (left_grad, right_grad))
            for grad, right_at, left_grad in left_grads
            for same_grad, left_at, right_grad in right_grads
            if grad == same_grad and _sharded_alike(left_at, left_grad) and _sharded_alike(right_at, right_grad)
        ]
    if mask[0]:
        return [Strategy((g, _shape_only(dx, current_left), w), (dx, w)) for g, w, dx in left_grads]
    if mask[1]:
        return [Strategy((g, x, _shape_only(dw, current_right)), (x, dw)) for g, x, dw in right_grads]
    return [Strategy((current_grad, current_left, current_right), (current_left, current_right))]


def is_sharded(placement: Placement) -> bool:
    return isinstance(placement, Shard | StridedShard)


def _shard(tensor: Letters, letter: str, stride: IntLikeType | None) -> Placement | None:
    if letter not in tensor:
        return None
    dim = tensor.index(letter)
    return Shard(dim) if stride is None else StridedShard(dim, split_factor=stride)


def _sharded_alike(one: Placement, other: Placement) -> bool:
    return one == other or not (is_sharded(one) or is_sharded(other))


def _shape_only(gradient: Placement, current: Placement) -> Placement:
    """Return the cheapest placement of an operand that is read for its shape only."""
    if is_sharded(gradient):
        return gradient
    return current if current.is_partial() else REPLICATE
