"""Passes that change one operator at a time: no-ops, chunks of this rank, fused norms, folded views."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

import torchtitan_npu.ops  # noqa: F401  (defines npu:: where torch_npu does not)
from torchtitan_npu.compile.passes.graph_utils import (
    RESHAPES,
    KernelLimits,
    aten,
    call,
    chunk_of,
    collectives,
    erase_unused,
    gathered,
    has_backward,
    is_returned,
    static_shape,
    value,
)
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.torch_internals.dispatch import OpOverload
from torchtitan_npu.torch_internals.distributed import process_group
from torchtitan_npu.torch_internals.inductor import lower_as_view

npu = torch.ops.npu
SAME_VALUES = (
    *RESHAPES,
    aten.expand.default,
    aten.slice.Tensor,
    aten.permute.default,
    aten.squeeze.dims,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
)
"""Operators that change only shape, strides, dtype or device. ``detach`` changes nothing below autograd."""
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int, aten.chunk.default)
"""Operators that return several views of their first argument."""
MAY_COPY = (aten.reshape.default, aten.contiguous.default, aten._unsafe_view.default)
"""Operators whose result may or may not share its memory with the argument."""


def no_ops(graph: fx.Graph) -> int:
    """Remove operators that return their input unchanged, such as a view to the same shape or a full slice.

    Each costs the host the time of a launch, and they separate the operators that other passes look for. Return the
    number removed.

    Outputs of the graph stay, because AOTAutograd has recorded which outputs are views.
    """
    removed = 0
    for node in list(graph.nodes):
        if node.target not in SAME_VALUES or not _is_same(value(node.args[0]), value(node)):
            continue
        if node.target is aten._to_copy.default and is_returned(node):  # the caller expects a copy
            continue
        node.replace_all_uses_with(node.args[0], delete_user_cb=lambda user: user.op != "output", propagate_meta=False)
        if not node.users:
            graph.erase_node(node)
            removed += 1
    return removed


def _is_same(before: Any, after: Any) -> bool:
    """Return whether two example values have equal layouts. Sizes are compared by their text, which adds no guards."""
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    here, there = (
        (repr((tensor.shape, tensor.stride(), tensor.storage_offset())), tensor.dtype, tensor.device, tensor.layout)
        for tensor in (before, after)
    )
    return here == there


def all_gather_chunk(graph: fx.Graph) -> int:
    """Replace each chunk of an all-gather that selects this rank's shard by the gather's input; return their number.

    The all-gather is removed too if it has no other users. A chunk that the graph returns stays: the gather's input may
    be an input of the graph, and the output would become its alias.
    """
    removed = 0
    for node in reversed(list(graph.nodes)):  # visits a chunk of a gather before the chunks that the gather consists of
        chunk = chunk_of(node) if node.users else None
        gather = gathered(chunk.source) if chunk else None
        if chunk is None or gather is None or any(gathered(user) for user in node.users):
            continue
        started, dim = gather
        shard: Any = started.args[0]
        group = process_group(started.args[2])  # type: ignore[arg-type]
        is_local = chunk.dim == dim and chunk.count == group.size() and chunk.index == group.rank()
        if is_local and static_shape(value(shard)) == static_shape(value(node)) and not is_returned(node):
            node.replace_all_uses_with(shard, propagate_meta=False)
            removed += 1
            erase_unused(node)
    return removed


def add_rms_norm(graph: fx.Graph, limits: KernelLimits | None = None) -> int:
    """Fuse additions and the RMS norms of their sums into ``npu_add_rms_norm``; return the number of fused norms.

    Training graphs stay as they are, because torch_npu has no gradient for the fused operator. A norm whose ``rstd`` is
    used belongs to training too: its backward pass may be in another graph.
    """
    if has_backward(graph):
        return 0
    limits = limits or KernelLimits()
    no_ops(graph)  # under tensor parallel, DTensor puts views between the sum and its norm
    return sum(_fuse_norm(node, limits) for node in list(graph.nodes))


def _fuse_norm(norm: fx.Node, limits: KernelLimits) -> bool:
    """Fuse ``norm`` with the addition before it if both exist and the operator supports them."""
    arguments = _norm_arguments(norm)
    if arguments is None:
        return False
    total, gamma, epsilon = arguments
    if not isinstance(total, fx.Node) or total.target is not aten.add.Tensor or total.kwargs:
        return False
    x1, x2 = total.args
    if not isinstance(x1, fx.Node) or not isinstance(x2, fx.Node) or not isinstance(gamma, fx.Node):
        return False
    if value(x1).shape != value(x2).shape or len({value(x).dtype for x in (x1, x2, gamma)}) > 1:
        return False  # the fused operator neither broadcasts nor promotes
    outputs = [norm] if norm.target is aten.rms_norm.default else list(norm.users)
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in outputs if user is not norm):
        return False
    # the fused operator goes where both the sum and gamma exist; no user of the sum may come before
    after = max(total, gamma)
    if any(user < after for user in total.users):
        return False
    if not limits.allow("npu_add_rms_norm", value(x1).device, x1=value(x1)):
        return False
    with norm.graph.inserting_after(after):
        fused = call(npu.npu_add_rms_norm.default, x1, x2, gamma, epsilon, like=norm)
    with norm.graph.inserting_after(fused):
        normalised = call(operator.getitem, fused, 0, like=norm)
        summed = call(operator.getitem, fused, 2, like=total)
    for output in outputs:
        output.replace_all_uses_with(normalised)
    total.replace_all_uses_with(summed, delete_user_cb=lambda user: user is not fused)
    for dead in (*(output for output in outputs if output is not norm), norm, total):
        norm.graph.erase_node(dead)
    return True


def _norm_arguments(node: fx.Node) -> tuple[Any, Any, float] | None:
    """Return input, gamma and epsilon if ``node`` is an RMS norm over the last dimension."""
    target: Any = node.target
    if target not in (npu.npu_rms_norm.default, aten.rms_norm.default, aten._fused_rms_norm.default):
        return None
    arguments = by_name(target, node.args, node.kwargs)
    is_npu = target is npu.npu_rms_norm.default
    names = ("input", "gamma", "epsilon") if is_npu else ("input", "weight", "eps")
    source, gamma, epsilon = (arguments[name] for name in names)
    shape = static_shape(value(gamma))
    if epsilon is None or shape is None or len(shape) != 1:
        return None
    return source, gamma, epsilon


def fold_views(graph: fx.Graph) -> None:
    """Replace chains of views of static shape by one ``as_strided`` of their base that Inductor lowers as a view.

    Autograd's graphs contain many views. A linear layer is traced as view, transpose, matmul and view, and its gradient
    transposes the weight twice more. A view launches no kernel, but its call costs the host more than half of a launch.
    A strided view becomes an expression in the arguments of the operators that use it.

    Also remove nodes without users, and collectives of which only the wait is left.
    """
    base_of: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        viewed = _viewed(node)
        if viewed is None:
            continue
        base = base_of.get(viewed, viewed)
        result, source = node.meta.get("val"), base.meta.get("val")
        if not _is_strided_view(result, source):
            continue
        layout = list(result.shape), list(result.stride()), result.storage_offset()
        is_output = any(user.op == "output" for user in node.users)  # AOTAutograd has recorded which are aliases
        if layout == (list(source.shape), list(source.stride()), 0) and not is_output:
            view = base
        else:
            with graph.inserting_before(node):
                view = graph.call_function(aten.as_strided.default, (base, *layout))
            view.meta = dict(node.meta)
            lower_as_view(view)
            base_of[view] = base
        node.replace_all_uses_with(view)
        graph.erase_node(node)
    graph.eliminate_dead_code()
    # If a forward pass ends with a collective, the partitioner copies it and the matmul before it into the backward
    # graph, where nothing uses them. A wait is not dead code for torch, even without users.
    for node in graph.find_nodes(op="call_function", target=collectives.wait_tensor.default):
        if not node.users and node.args[0].op == "call_function":
            graph.erase_node(node)
    graph.eliminate_dead_code()


def _viewed(node: fx.Node) -> Any:
    """Return the node that ``node`` may be a view of, or None."""
    target: Any = node.target
    if target is operator.getitem:
        split: Any = node.args[0]
        return split.args[0] if split.target in SPLITS else None
    if not isinstance(target, OpOverload) or target is aten.as_strided.default:
        return None
    return node.args[0] if (target.is_view or target in MAY_COPY) and isinstance(node.args[0], fx.Node) else None


def _is_strided_view(result: Any, base: Any) -> bool:
    """Return whether ``result`` is a view of ``base`` of the same dtype, and both have static sizes."""
    for tensor in (result, base):
        if not isinstance(tensor, Tensor) or tensor.is_conj() or tensor.is_neg():
            return False
        if not all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride(), tensor.storage_offset())):
            return False
    if result.dtype != base.dtype or base.storage_offset() != 0:
        return False
    return StorageWeakRef(result.untyped_storage()) == StorageWeakRef(base.untyped_storage())


def copy_before_all_reduce(graph: fx.Graph) -> None:
    """Copy arguments of all-reduces that are not contiguous, as the operator itself does in eager mode.

    Inductor reduces in place where it can. The result then has the strides of the argument, for example of a transposed
    weight gradient, and Inductor would generate a kernel to make an output contiguous.
    """
    for node in graph.find_nodes(op="call_function", target=collectives.all_reduce.default):
        argument = node.args[0]
        if argument.meta["val"].is_contiguous():
            continue
        with graph.inserting_before(node):
            copy = graph.call_function(aten.clone.default, (argument,), {"memory_format": torch.contiguous_format})
        copy.meta["val"] = node.meta["val"].clone()
        node.update_arg(0, copy)
