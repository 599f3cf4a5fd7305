"""All valid placements of the operands of matmul and matmul_backward on a mesh, by brute force.

This uses nothing of the code under test. It splits the inputs for every rank, computes the local products and assembles
the results. Placements are valid if that gives the dense result.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Shard

from tests._helpers.matmul_calls import Call
from tests._helpers.shards import Placements, assemble, every_placement, split

Targets = tuple[Placements, ...]
"""The placements of the inputs after redistribution."""
Valid = dict[Targets, list[Placements | None]]
"""Valid placements of the inputs, and the placements of the outputs that they give."""


def is_valid(call: Call, mesh: tuple[int, ...], targets: Targets, results: tuple[Any, ...]) -> bool:
    """Return whether inputs with placements ``targets`` give outputs with placements ``results``."""
    locals_ = _local_results(call, [split(x, mesh, here) for x, here in zip(call.inputs, targets, strict=True)])
    return locals_ is not None and all(
        (parts[0] is None) if whole is None else _is(assemble(parts, mesh, placements), whole)
        for parts, placements, whole in zip(locals_, results, call.outputs, strict=True)
    )


def every_valid(call: Call, mesh: tuple[int, ...]) -> Valid:
    return valid_for_all(every_output(call, mesh))


def valid_for_all(outputs: list[dict[Targets, Placements]], mask: tuple[bool, ...] = (True, True)) -> Valid:
    """Return the placements that are valid for all outputs that ``mask`` selects, from those valid for each."""
    wanted = [output for output, want in zip(outputs, mask, strict=False) if want]
    return {
        targets: [output[targets] if want else None for output, want in zip(outputs, mask, strict=False)]
        for targets in wanted[0]
        if all(targets in output for output in wanted)
    }


def every_output(call: Call, mesh: tuple[int, ...]) -> list[dict[Targets, Placements]]:
    """Return, for each output, the valid placements of the inputs with the placements of the output.

    All placements over all mesh dimensions are tried. A gradient has to be sharded as its operand, because one call
    computes both.
    """
    if not call.mask:
        return [_output(call, mesh, 0)]
    return [_output(call._replace(mask=([i == 0, i == 1],)), mesh, i) for i in range(2)]


def _output(call: Call, mesh: tuple[int, ...], index: int) -> dict[Targets, Placements]:
    whole = call.outputs[index]
    assert whole is not None
    parts = [{here: split(x, mesh, here) for here in every_placement(x.ndim, len(mesh))} for x in call.inputs]
    found = {}
    for targets in itertools.product(*parts):
        locals_ = _local_results(call, [some[here] for some, here in zip(parts, targets, strict=True)])
        if locals_ is None:
            continue
        for result in every_placement(whole.ndim, len(mesh)):
            like_operand = not call.mask or _cuts(result) == _cuts(targets[index + 1])
            if like_operand and _is(assemble(locals_[index], mesh, result), whole):
                found[targets] = result
                break
    return found


def _cuts(placements: Placements) -> tuple[Placement | None, ...]:
    return tuple(x if isinstance(x, Shard) else None for x in placements)


def _local_results(call: Call, parts: list[list[Tensor]]) -> list[Any] | None:
    try:
        return list(zip(*(call.local(inputs) for inputs in zip(*parts, strict=True)), strict=True))
    except RuntimeError:  # incompatible shapes
        return None


def _is(tensor: Tensor | None, whole: Tensor) -> bool:
    return tensor is not None and tensor.shape == whole.shape and torch.equal(tensor, whole)
