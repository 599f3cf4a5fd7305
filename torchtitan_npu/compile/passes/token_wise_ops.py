"""Operators that treat each token independently, and how to write them for the tokens of one rank.

A value with T tokens has shape (..., D), where the sizes before D multiply to T. A rank's local value always has shape
(T / ranks, D): the rank's rows of the value flattened to (T, D).
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

import torchtitan_npu.ops  # noqa: F401  (defines npu:: where torch_npu does not)
from torchtitan_npu.compile.passes.graph_utils import RESHAPES, aten, call, chunk_of, static_shape, value
from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema

npu = torch.ops.npu

COPIES = (aten._to_copy.default, aten.alias.default, aten.detach.default)
NORMS = (aten.rms_norm.default, aten._fused_rms_norm.default, npu.npu_rms_norm.default, npu.npu_add_rms_norm.default)
NORM_GRADIENTS = (aten._fused_rms_norm_backward.default, npu.npu_rms_norm_backward.default)
"""Norm gradients. The first output has tokens; the second, gamma's gradient, is a sum over tokens."""
REDUCTIONS = (aten.mean.dim, aten.sum.dim_IntList, aten.amax.default)


@dataclass(frozen=True)
class Tokens:
    """``count`` tokens, split evenly over ``ranks`` ranks. This rank is number ``rank``."""

    count: int
    ranks: int
    rank: int

    @property
    def local(self) -> int:
        """Number of tokens on this rank."""
        return self.count // self.ranks


def token_count(tensor: Any) -> int | None:
    """Return T for a value of shape (..., D), or ``None`` if a size is symbolic."""
    shape = static_shape(tensor)
    return math.prod(shape[:-1]) if shape is not None and len(shape) > 1 else None


def is_norm(node: fx.Node) -> bool:
    """Return whether ``node`` is a norm, its gradient, or a reduction over the last dimension (a decomposed norm)."""
    if node.target in REDUCTIONS:
        return _dims(node) == {value(node.args[0]).dim() - 1}
    return node.target in (*NORMS, *NORM_GRADIENTS)


def is_sum_over_tokens(node: fx.Node, tokens: Tokens) -> bool:
    """Return whether ``node`` sums over tokens, so that the ranks' results add up to it, as in gradients of weights."""
    source: Any = node.args[0] if node.args else None
    if node.target is operator.getitem and source.target in NORM_GRADIENTS:
        return bool(node.args[1] != 0) and is_token_wise(source, tokens)
    if node.target is not aten.sum.dim_IntList or token_count(value(source)) != tokens.count:
        return False
    return _dims(node) == set(range(value(source).dim() - 1))


def is_pointwise(node: fx.Node) -> bool:
    """Return whether ``node`` is pointwise, a copy or a reshape."""
    if not isinstance(node.target, OpOverload) or op_schema(node.target).is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    return node.target in (*RESHAPES, *COPIES, aten.expand.default) or torch.Tag.pointwise in node.target.tags


def is_local_chunk(node: fx.Node, tokens: Tokens) -> bool:
    """Return whether ``node`` selects exactly this rank's tokens from a value with all tokens."""
    chunk = chunk_of(node)
    if chunk is None or token_count(value(chunk.source)) != tokens.count:
        return False
    before = math.prod(value(chunk.source).shape[: chunk.dim])
    is_last = chunk.dim == value(chunk.source).dim() - 1
    return not is_last and before == 1 and (chunk.index, chunk.count) == (tokens.rank, tokens.ranks)


def is_local_split(node: fx.Node, tokens: Tokens) -> bool:
    """Return whether ``node`` is a split of which only this rank's tokens are used."""
    return node.target is aten.split.Tensor and all(is_local_chunk(user, tokens) for user in node.users)


def is_token_wise(node: fx.Node, tokens: Tokens) -> bool:
    """Return whether ``node`` can be computed on one rank's tokens from the same tokens of its inputs."""
    target, result = node.target, value(node)
    if target is operator.getitem:
        outputs: Any = node.args[0]
        return outputs.target in (*NORMS, *NORM_GRADIENTS) and is_token_wise(outputs, tokens)
    if not isinstance(target, OpOverload) or op_schema(target).is_mutable:
        return False
    inputs = [value(argument) for argument in node.all_input_nodes]
    if not all(isinstance(tensor, Tensor) for tensor in inputs):
        return False
    if target in (*NORMS, *NORM_GRADIENTS):
        with_tokens = [tensor for tensor in inputs if token_count(tensor) == tokens.count]
        others = [tensor for tensor in inputs if token_count(tensor) != tokens.count]
        return _normalises_last(node) and bool(with_tokens) and all(tensor.dim() == 1 for tensor in others)
    if token_count(result) != tokens.count:
        return False
    if target in RESHAPES:
        return token_count(inputs[0]) == tokens.count and inputs[0].shape[-1] == result.shape[-1]
    if target in REDUCTIONS:
        return _dims(node) == {inputs[0].dim() - 1} and result.dim() == inputs[0].dim()
    return is_pointwise(node) and all(_is_aligned(tensor, result, tokens) for tensor in inputs)


def write_local(node: fx.Node, tokens: Tokens, local: dict[fx.Node, fx.Node]) -> fx.Node:
    """Write ``node`` for this rank's tokens at the insertion point. ``local`` has the local values of its inputs."""
    if node.target in RESHAPES:
        return local[node.all_input_nodes[0]]

    def local_argument(argument: fx.Node) -> fx.Node:
        if argument in local:
            return local[argument]
        tensor = value(argument)
        if tensor.dim() > 1:  # (1, 1, D) would broadcast (tokens, D) to three dimensions
            return call(aten.view.default, argument, [tensor.shape[-1]], like=node)
        return argument

    args: list[Any] = list(fx.map_arg(node.args, local_argument))
    if node.target is aten.expand.default:
        args[1] = [tokens.local, value(node).shape[-1]]
    elif node.target in REDUCTIONS:
        args[1] = [0] if is_sum_over_tokens(node, tokens) else [-1]
    return call(node.target, *args, like=node, **fx.map_arg(node.kwargs, local_argument))  # type: ignore[arg-type]


def _normalises_last(node: fx.Node) -> bool:
    """Return whether a norm or its gradient is over one dimension, by its ``normalized_shape`` or by gamma."""
    for argument in node.args:
        if isinstance(argument, (list, tuple)) and all(isinstance(size, int) for size in argument):
            return len(argument) == 1
    return any(value(argument).dim() == 1 for argument in node.all_input_nodes)


def _is_aligned(tensor: Tensor, result: Tensor, tokens: Tokens) -> bool:
    """Return whether ``tensor`` has the tokens of ``result`` in the same order, or one value for all tokens."""
    shape = static_shape(tensor)
    if shape is None:
        return False
    if math.prod(shape[:-1]) == 1:
        return True
    leading = [size for size in result.shape[:-1] if size != 1]
    return token_count(tensor) == tokens.count and [size for size in shape[:-1] if size != 1] == leading


def _dims(node: fx.Node) -> set[int]:
    dims: Any = node.args[1] if len(node.args) > 1 else ()
    return {dim % value(node.args[0]).dim() for dim in dims or ()}
