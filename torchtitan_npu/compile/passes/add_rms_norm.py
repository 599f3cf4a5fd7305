"""Fuse an addition and the RMS norm of its sum into ``npu_add_rms_norm``, in graphs without gradients."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import torchtitan_npu.ops  # noqa: F401  (defines npu:: where torch_npu does not)
from torchtitan_npu.compile.passes.graph_utils import aten, call, has_backward, static_shape, value
from torchtitan_npu.compile.passes.kernel_limits import KernelLimits
from torchtitan_npu.compile.passes.no_ops import no_ops
from torchtitan_npu.ops.core.arguments import by_name

npu = torch.ops.npu


def add_rms_norm(graph: fx.Graph, limits: KernelLimits | None = None) -> int:
    """Fuse additions with the norms after them, and return the number of fused norms.

    Training graphs stay as they are, because torch_npu has no gradient for the fused operator. A norm whose ``rstd`` is
    used belongs to training too: its backward pass may be in another graph.
    """
    if has_backward(graph):
        return 0
    limits = limits or KernelLimits()
    no_ops(graph)  # under tensor parallel, DTensor puts views between the sum and its norm
    return sum(_fuse(node, limits) for node in list(graph.nodes))


def _fuse(norm: fx.Node, limits: KernelLimits) -> bool:
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
    given = by_name(target, node.args, node.kwargs)
    is_npu = target is npu.npu_rms_norm.default
    names = ("input", "gamma", "epsilon") if is_npu else ("input", "weight", "eps")
    source, gamma, epsilon = (given[name] for name in names)
    shape = static_shape(value(gamma))
    if epsilon is None or shape is None or len(shape) != 1:
        return None
    return source, gamma, epsilon
