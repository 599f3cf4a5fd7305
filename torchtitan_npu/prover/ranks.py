"""Run a function on gloo ranks, each a process forked from one that has imported TorchTitan."""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

GRACE_S = 5.0
"""Other ranks get this long to finish after one has failed. They may wait for it in a collective."""
LONGEST_REPORT = 8000
"""Characters of a rank's standard error that are reported, from its end."""


class RankError(RuntimeError):
    """A rank raised or died."""


class RankTimeout(RankError):
    """No rank raised, and one did not finish in time."""


def run_on_ranks(world_size: int, timeout_s: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on every rank with torchrun's variables, and return the results in rank order.

    Raise :class:`RankError` with the standard error of the first rank that raises or dies.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the machine's cores
    # Importing TorchTitan takes seconds: the fork server does it once for all ranks.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchtitan_npu.prover.preload"])
    # As with torchrun, the parent opens the store: a free port could be taken before rank 0 opens it.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1"}
    variables |= {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes, ends = [], []
    with tempfile.TemporaryDirectory() as folder:
        errors = [Path(folder) / f"rank{rank}" for rank in range(world_size)]
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                call = (theirs, str(errors[rank]), own, function, args)
                processes.append(context.Process(target=_run, args=call, daemon=True))
                processes[-1].start()
                theirs.close()
                ends.append(ours)
            return _collect(ends, errors, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(ends: list[Connection], errors: list[Path], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    failure = ""
    deadline = time.monotonic() + timeout_s
    waiting = {end: rank for rank, end in enumerate(ends)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for end in ready:
            rank = waiting.pop(end)  # type: ignore[call-overload]
            try:
                results[rank] = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                # the first failure is usually the cause of the others
                failure = failure or f"rank {rank} of {len(ends)}: {_standard_error(errors[rank])}"
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failure:
        raise RankError(failure)
    if waiting:
        raise RankTimeout(f"{len(waiting)} of {len(ends)} ranks ran longer than {timeout_s:g} s")
    return [results[rank] for rank in range(len(ends))]


def _standard_error(file: Path) -> str:
    text = file.read_text(errors="replace").strip() if file.exists() else ""
    return text[-LONGEST_REPORT:] or "the process died"


def _run(
    end: Connection, errors: str, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)  # an exception ends the process, and its traceback is there
    faulthandler.enable()  # show the Python stack of a crash in native code
    os.environ |= variables
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    result = function(*args)
    end.send_bytes(pickle.dumps(result))  # send() would pass tensors through files of this process, which ends
