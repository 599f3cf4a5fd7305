"""Run a function on N gloo ranks, in worker processes that are reused for calls with the same world size.

    results = run_on_ranks(2, some_module_level_function, argument)    # one result per rank

The function is pickled by reference, so it must be importable; arguments and results must pickle. The variables of
torchrun (RANK, WORLD_SIZE, MASTER_ADDR, ...) are set, and the default process group is initialized. Process groups are
reused by later calls (tests/_helpers/mesh_groups.py), and so is DTensor's sharding cache. Filling that cache takes half
the time of a training job, so a job is quick after a similar one. A failure shows the traceback of every rank that
raised, in the order in which they failed.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import TCPStore

GRACE = 10.0
"""Seconds that other ranks get to finish after one has failed; they may wait for it in a collective."""


CALLS = 100
"""Calls after which workers are replaced, because the groups of each layout add threads."""


class RankError(AssertionError):
    """A rank raised, died or did not finish in time."""


class RankTimeout(RankError):
    """No rank raised or died, and one did not finish in time."""


def run_on_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    process_group: bool = True,
    new_processes: bool = False,
) -> list[Any]:
    """Call ``fn(*args)`` on every rank and return the results in rank order.

    With ``process_group=False``, ``fn`` has to call ``init_process_group`` if no earlier call did, as TorchTitan's
    Trainer does. ``new_processes`` are for a function that leaves its process in another state.
    """
    # workers are not used again after a failure: a rank may still hang in a collective
    started = None if new_processes else _started.pop(world_size, None)
    ranks = started or _Ranks([_start(rank) for rank in range(world_size)])
    # the call is pickled separately: a worker needs our sys.path before it can import the module of ``fn``
    ranks.stores.append(meeting_point())
    task = (sys.path, world_size, ranks.stores[-1].port, process_group, pickle.dumps((fn, args)))
    try:
        replies = _exchange(ranks.workers, pickle.dumps(task), timeout)
    except BaseException:
        ranks.stop()
        raise
    reusable = len(ranks.stores) < CALLS and not new_processes
    # another thread may have returned its ranks
    if not reusable or _started.setdefault(world_size, ranks) is not ranks:
        ranks.stop()
    return [pickle.loads(reply) for reply in replies]


@dataclass
class _Worker:
    rank: int
    process: BaseProcess
    connection: Connection

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


@dataclass
class _Ranks:
    workers: list[_Worker]
    stores: list[TCPStore] = field(default_factory=list)
    """One per call. A group needs the store it was made with."""

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


_started: dict[int, _Ranks] = {}


def _start(rank: int) -> _Worker:
    # importing TorchTitan takes seconds of CPU: the fork server does it once
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests._helpers.multirank_preload"])
    ours, theirs = context.Pipe()
    # daemons end with the test session
    process = context.Process(target=_serve, args=(rank, theirs), daemon=True, name=f"rank {rank}")
    process.start()
    theirs.close()
    return _Worker(rank, process, ours)


def _exchange(workers: list[_Worker], task: bytes, timeout: float) -> list[bytes]:
    for worker in workers:
        worker.connection.send_bytes(task)
    deadline = time.monotonic() + timeout
    replies: dict[int, bytes] = {}
    failures: dict[int, str] = {}
    while waiting := {w.connection: w for w in workers if w.rank not in replies and w.rank not in failures}:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            if not failures:
                raise RankTimeout(f"{len(waiting)} of {len(workers)} ranks ran longer than {timeout:g} s")
            failures |= dict.fromkeys(
                (worker.rank for worker in waiting.values()), "did not finish after another rank had failed"
            )
        for connection in ready:
            worker = waiting[connection]  # type: ignore[index]
            try:
                ok, reply = pickle.loads(worker.connection.recv_bytes())
            except EOFError:
                worker.process.join()
                ok, reply = False, f"the process ended with exit code {worker.process.exitcode}"
            if ok:
                replies[worker.rank] = reply
            else:
                failures[worker.rank] = reply
                deadline = min(deadline, time.monotonic() + GRACE)
    if failures:
        # in order of arrival: the first is usually the cause of the others
        raise RankError("\n".join(f"rank {rank} of {len(workers)}: {text}" for rank, text in failures.items()))
    return [replies[worker.rank] for worker in workers]


def meeting_point() -> TCPStore:
    """Return the store of one process group. It lives as long as the result.

    It is in this process, as with torchrun, and not on rank 0: a free port may be taken before rank 0 opens it.
    """
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets on one node."""
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    ranks |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    return ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _serve(rank: int, connection: Connection) -> None:
    """Answer tasks until the worker is killed or the session ends."""
    import tests._helpers.multirank_preload  # noqa: F401  (if the fork server could not find it)

    faulthandler.enable()  # show the Python stack of a crash in native code
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        answer: tuple[bool, bytes | str]
        try:
            answer = True, pickle.dumps(_run(rank, task))
        except Exception:  # the test shows it
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
        _clean_up()


def _run(rank: int, task: bytes) -> Any:
    import torch.distributed as dist

    from tests._helpers import mesh_groups

    sys.path[:], world_size, port, process_group, call = pickle.loads(task)
    fn, args = pickle.loads(call)
    os.environ |= rank_variables(rank, world_size, port)
    mesh_groups.keep_groups()
    if process_group and not dist.is_initialized():
        dist.init_process_group("gloo")
    return fn(*args)


def _clean_up() -> None:
    gc.collect()  # trainers have reference cycles
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
