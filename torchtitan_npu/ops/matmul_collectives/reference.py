"""Matrix products that overlap with the communication around them: one rank's rows go round while another's multiply.

Ranks form a ring, in which each sends to the next and receives from the one before. ``hcom`` is the name of their
process group; on an NPU, of HCCL's communicator.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Work, _resolve_process_group


def npu_all_gather_base_mm(
    input: Tensor, x2: Tensor, hcom: str, world_size: int, gather_output: bool, **_: Any
) -> tuple[Tensor, Tensor]:
    """``gathered @ x2`` (world_size * m, n) and ``gathered`` (world_size * m, k), the rows of ``input`` of every rank.

    While a rank multiplies the rows that it has, those of the rank before are on their way to it.
    """
    group = _resolve_process_group(hcom)  # type: ignore[arg-type]
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
    """This rank's rows of the sum over the ranks of ``input @ x2``, (m / world_size, n).

    The sum of a rank's rows starts with the next rank, goes round, and ends where it belongs. While it is on its way, a
    rank multiplies its own summand of it.
    """
    group = _resolve_process_group(hcom)  # type: ignore[arg-type]
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
    """Start to send ``outgoing`` to the next rank, and to receive ``incoming`` from the one before."""
    after = dist.get_global_rank(group, (group.rank() + 1) % group.size())
    before = dist.get_global_rank(group, (group.rank() - 1) % group.size())
    return dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, outgoing, after, group), dist.P2POp(dist.irecv, incoming, before, group)]
    )


def _wait(pending: list[Work]) -> None:
    for work in pending:
        work.wait()
