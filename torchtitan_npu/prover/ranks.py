"""Run a function on gloo ranks, each a process forked from one that has imported TorchTitan."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from torch.distributed import TCPStore

from torchtitan_npu.errors import UsageError

GRACE_S = 5.0
"""Other ranks get this long to report after one has failed. They may wait for it in a collective."""


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time."""


class _Answer(NamedTuple):
    value: Any = None
    usage_error: str = ""
    failure: str = ""


def run_on_ranks(world_size: int, timeout_s: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(*args)`` on every rank with torchrun's variables, and return the results in rank order.

    Raise :class:`UsageError` if a rank does, and :class:`RankError` for any other failure.
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
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            own = variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(context.Process(target=_run, args=(theirs, own, function, args), daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        return _collect(ends, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(ends: list[Connection], timeout_s: float) -> list[Any]:
    answers: dict[int, _Answer] = {}
    deadline = time.monotonic() + timeout_s
    while waiting := {end: rank for rank, end in enumerate(ends) if rank not in answers}:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for end in ready:
            try:
                answer = pickle.loads(end.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                answer = _Answer(failure="the process died")
            answers[waiting[end]] = answer  # type: ignore[index]
            if answer.failure or answer.usage_error:
                deadline = min(deadline, time.monotonic() + GRACE_S)
    # in order of arrival: the first failure is usually the cause of the others
    for rank, answer in answers.items():
        if answer.failure:
            raise RankError(f"rank {rank} of {len(ends)}: {answer.failure}")
    for answer in answers.values():
        if answer.usage_error:
            raise UsageError(answer.usage_error)
    if len(answers) < len(ends):
        raise RankError(f"{len(ends) - len(answers)} of {len(ends)} ranks ran longer than {timeout_s:g} s")
    return [answers[rank].value for rank in range(len(ends))]


def _run(end: Connection, variables: dict[str, str], function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ |= variables
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        answer = _Answer(function(*args))
    except UsageError as error:
        answer = _Answer(usage_error=str(error))
    except Exception:  # the caller reports it
        answer = _Answer(failure=traceback.format_exc())
    end.send_bytes(pickle.dumps(answer))  # send() would pass tensors through files of this process, which ends
