"""The multi-rank helper shows what went wrong on a rank, ends what hangs, and works again afterwards."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests._helpers import multirank
from tests._helpers.multirank import RankError, run_on_ranks


def sum_of_ranks(offset: int) -> tuple[int, float, str]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.environ["OMP_NUM_THREADS"]


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the remote cause")
    dist.barrier()


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def leave_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def start_own_group() -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return dist.get_world_size() * 10 + int(os.environ["LOCAL_RANK"])


seen: list[dist.ProcessGroup | None] = []


def group_of_process() -> tuple[int, bool]:
    """The process, and whether its group is the one of its first call."""
    seen.append(dist.group.WORLD)
    return os.getpid(), seen[0] is dist.group.WORLD


def groups_of_meshes() -> list[str]:
    meshes = [init_device_mesh("cpu", (2, 1), mesh_dim_names=("both", name)) for name in ("one", "one", "other")]
    return [mesh.get_group(1).group_name for mesh in meshes]


def test_results_come_in_rank_order() -> None:
    assert run_on_ranks(2, sum_of_ranks, 10) == [(0, 21.0, "1"), (1, 21.0, "1")]


@pytest.fixture
def new_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multirank, "_started", {})


@pytest.mark.usefixtures("new_workers")
def test_workers_and_their_group_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multirank, "CALLS", 2)
    first, second, third = (run_on_ranks(2, group_of_process) for _ in range(3))
    assert first == second and all(kept for _, kept in second)
    assert not {*first} & {*third}


@pytest.mark.usefixtures("new_workers")
def test_meshes_of_later_calls_have_the_groups_of_earlier_ones() -> None:
    """And those of one call have groups of their own. After a call that ended them, there are new ones."""
    first, second = (run_on_ranks(2, groups_of_meshes) for _ in range(2))
    assert first == second and all(len({*names}) == 3 for names in first)
    run_on_ranks(2, dist.destroy_process_group)
    assert run_on_ranks(2, groups_of_meshes) == first  # the names, which are counted anew


@pytest.mark.usefixtures("new_workers")
def test_a_function_may_start_its_own_group() -> None:
    assert run_on_ranks(2, start_own_group, process_group=False) == [20, 21]
    assert run_on_ranks(2, sum_of_ranks, 0)[0][1] == 1.0


def test_the_remote_traceback_comes_first() -> None:
    with pytest.raises(RankError, match=r"(?s)\Arank 1 of 2: .*fail_on_rank_1.*KeyError: 'the remote cause'"):
        run_on_ranks(2, fail_on_rank_1)
    assert run_on_ranks(2, sum_of_ranks, 0)[0][1] == 1.0


def test_what_hangs_is_ended() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: ran longer than 3 s"):
        run_on_ranks(2, hang_on_rank_1, timeout=3)


def test_a_rank_that_dies_is_noticed() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: the process ended with exit code 7"):
        run_on_ranks(2, leave_on_rank_1)
