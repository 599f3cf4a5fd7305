"""``npu_all_gather_base_mm`` and ``npu_mm_reduce_scatter_base``: matrix products that overlap with a collective.

The ranks form a ring: each sends to the next and receives from the previous one, and multiplies while it waits.
``hcom`` is the name of the process group. On an NPU it is the name of HCCL's communicator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from torchtitan_npu.ops.core.arguments import Call
from torchtitan_npu.ops.core.op import Limit, declare
from torchtitan_npu.ops.core.sharding import Sharding
from torchtitan_npu.torch_internals.distributed import process_group


def npu_all_gather_base_mm(
    input: Tensor, x2: Tensor, hcom: str, world_size: int, gather_output: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    r"""Multiply the gathered rows of all ranks by ``x2``.

    .. math:: gathered = [input_0, \dots, input_{w-1}], \qquad product = gathered \; x_2

    ``input`` (m, k), ``x2`` (k, n). Returns the product (world_size * m, n), and ``gathered`` (world_size * m, k) or,
    without ``gather_output``, an empty tensor. A rank multiplies the rows it has while it receives the next ones.
    """
    group = process_group(hcom)
    rank, rows = group.rank(), input.shape[0]
    gathered = input.new_empty(world_size, rows, input.shape[1])
    product = input.new_empty(world_size, rows, x2.shape[1])
    gathered[rank] = input
    for step in range(world_size):
        here, coming = (rank - step) % world_size, (rank - step - 1) % world_size
        pending = _exchange(group, gathered[here], gathered[coming]) if step + 1 < world_size else []
        torch.mm(gathered[here], x2, out=product[here])
        _wait(pending)
    return product.flatten(0, 1), gathered.flatten(0, 1) if gather_output else input.new_empty(0)


def npu_mm_reduce_scatter_base(input: Tensor, x2: Tensor, hcom: str, world_size: int, **_: Any) -> Tensor:
    r"""Return this rank's rows of the sum over the ranks of ``input @ x2``.

    .. math:: y = \Big( \sum_r input_r \; x_{2,r} \Big)_{rows\ of\ this\ rank}

    ``input`` (m, k), ``x2`` (k, n). Returns (m / world_size, n). The sum of a rank's rows starts at the next rank and
    travels around the ring to its rank. A rank computes its summand while it receives the partial sum.
    """
    group = process_group(hcom)
    rank = group.rank()
    parts = input.view(world_size, -1, input.shape[1])
    total = torch.mm(parts[(rank - 1) % world_size], x2)
    for step in range(1, world_size):
        received = torch.empty_like(total)
        pending = _exchange(group, total, received)
        summand = torch.mm(parts[(rank - step - 1) % world_size], x2)
        _wait(pending)
        total = received.add_(summand)
    return total


def _exchange(group: ProcessGroup, outgoing: Tensor, incoming: Tensor) -> list[Work]:
    """Start to send ``outgoing`` to the next rank and to receive ``incoming`` from the previous one."""
    next_rank = dist.get_global_rank(group, (group.rank() + 1) % group.size())
    previous_rank = dist.get_global_rank(group, (group.rank() - 1) % group.size())
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outgoing, next_rank, group), dist.P2POp(dist.irecv, incoming, previous_rank, group)]
    )


def _wait(pending: list[Work]) -> None:
    for work in pending:
        work.wait()


NO_SHARDING: Sharding = lambda call: ()  # noqa: E731
"""These operators communicate themselves and take local tensors only."""
OPTIONS = "Tensor? bias=None, Tensor? x1_scale=None, Tensor? x2_scale=None"
WORLD_SIZES = (2, 4, 8, 16, 32)


def _checks(call: Call) -> Iterator[str]:
    if call.input.dim() != 2 or call.x2.dim() != 2:
        yield f"input and x2 must be matrices, not of {call.input.dim()} and {call.x2.dim()} dimensions"
    if call.input.shape[1] != call.x2.shape[0]:
        yield f"x2 must have as many rows as input has columns, {call.input.shape[1]}, not {call.x2.shape[0]}"
    if call.input.dtype != call.x2.dtype:
        yield f"input and x2 must have one dtype, not {call.input.dtype} and {call.x2.dtype}"
    for name in ("bias", "x1_scale", "x2_scale", "output_dtype", "comm_mode"):
        if getattr(call, name) is not None:
            yield f"{name} must be None: only torch_npu implements it"


def gather_checks(call: Call) -> Iterator[str]:
    yield from _checks(call)
    if call.gather_index:
        yield f"gather_index must be 0, which gathers input, not {call.gather_index}"


def gather_fake(call: Call) -> tuple[Tensor, Tensor]:
    rows = call.input.shape[0] * call.world_size
    gathered = (rows, call.input.shape[1]) if call.gather_output else 0
    return call.input.new_empty(rows, call.x2.shape[1]), call.input.new_empty(gathered)


def scatter_checks(call: Call) -> Iterator[str]:
    yield from _checks(call)
    if call.reduce_op != "sum":
        yield f'reduce_op must be "sum", not {call.reduce_op!r}'
    if call.input.shape[0] % call.world_size:
        yield f"input must have a number of rows that world_size {call.world_size} divides, not {call.input.shape[0]}"


LIMITS = (
    Limit("input.dtype", lambda call: call.input.dtype, (torch.float16, torch.bfloat16)),
    Limit("the number of rows of x2", lambda call: call.x2.shape[0], range(256, 65535)),
    Limit("world_size", lambda call: call.world_size, WORLD_SIZES),
)

declare(
    schema=f"npu::npu_all_gather_base_mm(Tensor input, Tensor x2, str hcom, int world_size, *, {OPTIONS}, "
    "int gather_index=0, bool gather_output=True, int comm_turn=0, ScalarType? output_dtype=None, "
    "str? comm_mode=None) -> (Tensor, Tensor)",
    reference=npu_all_gather_base_mm,
    fake=gather_fake,
    checks=gather_checks,
    sharding=NO_SHARDING,
    limits=LIMITS,
)
declare(
    schema="npu::npu_mm_reduce_scatter_base(Tensor input, Tensor x2, str hcom, int world_size, *, "
    f'str reduce_op="sum", {OPTIONS}, int comm_turn=0, ScalarType? output_dtype=None, str? comm_mode=None) '
    "-> Tensor",
    reference=npu_mm_reduce_scatter_base,
    fake=lambda call: call.input.new_empty(call.input.shape[0] // call.world_size, call.x2.shape[1]),
    checks=scatter_checks,
    sharding=NO_SHARDING,
    limits=LIMITS,
)
