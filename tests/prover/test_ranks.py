"""Ranks that raise, die or hang are reported as such."""

from __future__ import annotations

import os
import time

import pytest

from tests._helpers import multirank
from torchtitan_npu.errors import UsageError
from torchtitan_npu.prover.training import RankError, RankTimeout, run_on_ranks


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Start the fork server of the other tests. There is one per process, with the imports of its first user."""
    multirank.run_on_ranks(1, rank_number, process_group=False)


def rank_number() -> int:
    return int(os.environ["RANK"])


def raise_on_the_last_rank() -> None:
    if os.environ["RANK"] == "1":
        raise UsageError("the remote cause")
    time.sleep(60)


def die() -> None:
    os._exit(3)


def hang() -> None:
    time.sleep(60)


def test_results_are_in_rank_order() -> None:
    assert run_on_ranks(2, 60, rank_number) == [0, 1]


def test_the_traceback_of_a_rank_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchtitan_npu.prover.training.GRACE_S", 0.1)
    with pytest.raises(RankError, match=r"(?s)\Arank 1 of 2: .*raise_on_the_last_rank.*UsageError: the remote cause\Z"):
        run_on_ranks(2, 60, raise_on_the_last_rank)


def test_a_rank_that_dies_without_a_word() -> None:
    with pytest.raises(RankError, match="rank 0 of 1: the process died"):
        run_on_ranks(1, 60, die)


def test_a_rank_that_hangs_is_a_timeout() -> None:
    with pytest.raises(RankTimeout, match=r"1 of 1 ranks ran longer than 1 s"):
        run_on_ranks(1, 1.0, hang)
