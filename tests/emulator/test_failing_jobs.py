"""A rank that hangs on emulated NPUs: torch_npu's watchdog writes its trace, and the other rank ends the job."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests._helpers.entry_ranks import start_ranks


@pytest.mark.slow  # 40 s: two processes load torch_npu; tests/test_failing_jobs.py has it with gloo
def test_a_stopped_rank_ends_the_job_in_time(tmp_path: Path) -> None:
    with start_ranks(tmp_path, fault="SIGSTOP", comm__trace_buf_size="20", comm__train_timeout_seconds="5") as ranks:
        ranks.wait_for("step:  2", seconds=200)
        codes = ranks.exit_codes(5 + 60)
        assert codes[0] == 1 and codes[1] in (1, -signal.SIGABRT, -signal.SIGKILL), ranks.log(0)
    name = f"rank 1 ({os.uname().nodename}, pid {ranks.pid(1)})"
    assert ranks.last_line(0).startswith(f"torchtitan_npu: first failure: {name} has not responded for ")
    assert "Watchdog caught collective operation timeout" in ranks.log(0)
    assert (tmp_path / "comm_traces" / "rank_0").stat().st_size > 0
