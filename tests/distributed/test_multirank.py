"""The multi-rank helper shows the failure of a rank, and works again afterwards."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests._helpers.multirank import RankError, run_on_ranks


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the remote cause")


def test_a_failure_shows_the_remote_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)\Arank 1 of 2: .*fail_on_rank_1.*KeyError: 'the remote cause'"):
        run_on_ranks(2, fail_on_rank_1)
    assert run_on_ranks(2, dist.get_rank) == [0, 1]
