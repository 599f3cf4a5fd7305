"""Matrix products that overlap with a collective, in plain PyTorch over point-to-point transfers.

The ranks form a ring: each sends to the next and receives from the previous one, and multiplies while it waits.
``hcom`` is the name of the process group. On an NPU it is the name of HCCL's communicator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from torchtitan_npu.torch_internals.collectives import process_group


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
    travels around the ring to its own rank. A rank computes its summand while it receives the partial sum.
    """
    group = process_group(hcom)
    rank = group.rank()
    parts = input.view(world_size, -1, input.shape[1])
    total = torch.mm(parts[(rank - 1) % world_size], x2)
    for step in range(1, world_size):
        received = torch.empty_like(total)
        pending = _exchange(group, total, received)
        own = torch.mm(parts[(rank - step - 1) % world_size], x2)
        _wait(pending)
        total = received.add_(own)
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
