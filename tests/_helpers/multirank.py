"""Runs a function on N gloo ranks, in worker processes of that world size that serve one call after the other.

    results = run_on_ranks(2, some_module_level_function, argument)    # one result a rank

The function is sent by reference, so it must be importable; arguments and results must pickle (tensors go by value).
The launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) are set as torchrun sets them, and the default process
group is up. Groups stay from call to call (tests/mesh_groups.py), and with them DTensor's cache of how operators are
sharded: to fill it takes half the time of a training job, so that a job is quick after one like it. A failure shows the
traceback of every rank that raised, the first one first.
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
"""Seconds the other ranks get to finish once one has failed: they may be waiting for it in a collective."""


CALLS = 20
"""Calls that workers serve before new ones are forked: groups stay, and each layout adds dozens of threads."""


class RankError(AssertionError):
    """A rank raised, died or did not finish in time."""


def run_on_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 120, process_group: bool = True
) -> list[Any]:
    """Call ``fn(*args)`` on every rank and return the results in rank order.

    ``process_group=False`` leaves ``init_process_group`` to ``fn`` where no call has done it yet, as TorchTitan's
    trainer wants it.
    """
    # workers that failed are not used again: a rank may still hang in a collective
    ranks = _started.pop(world_size, None) or _Ranks([_start(rank) for rank in range(world_size)])
    # the call itself is pickled apart: a worker must have our sys.path before it can import what ``fn`` lives in
    ranks.stores.append(meeting_point())
    task = (sys.path, world_size, ranks.stores[-1].port, process_group, pickle.dumps((fn, args)))
    try:
        replies = _exchange(ranks.workers, pickle.dumps(task), timeout)
    except BaseException:
        ranks.stop()
        raise
    if len(ranks.stores) < CALLS:
        _started[world_size] = ranks
    else:
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
    """One a call: groups need the one they were made with, and a call that ends them leaves its used."""

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


_started: dict[int, _Ranks] = {}


def _start(rank: int) -> _Worker:
    # importing TorchTitan takes seconds of CPU: a server does it once and forks the ranks
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests._helpers.multirank_preload"])
    ours, theirs = context.Pipe()
    # a daemon: it ends with the test session
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
            reason = "did not finish after another rank had failed" if failures else f"ran longer than {timeout:g} s"
            failures |= {worker.rank: reason for worker in waiting.values()}
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
        # in the order they came in: the first is usually the cause of the others
        raise RankError("\n".join(f"rank {rank} of {len(workers)}: {text}" for rank, text in failures.items()))
    return [replies[worker.rank] for worker in workers]


def meeting_point() -> TCPStore:
    """Where the ranks of one process group find each other, as long as the result lives.

    It is here, as with torchrun, and not on rank 0: a port that is free now may be taken when rank 0 opens it.
    """
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _serve(rank: int, connection: Connection) -> None:
    """A worker's life: answer tasks until it is killed, or the session ends."""
    import tests._helpers.multirank_preload  # noqa: F401  (here only where the server could not find it)

    faulthandler.enable()  # a crash in native code shows where it was called from
    while True:
        try:
            task = connection.recv_bytes()
        except EOFError:
            return
        answer: tuple[bool, bytes | str]
        try:
            answer = True, pickle.dumps(_run(rank, task))
        except Exception:  # whatever it is, it is the test's to show
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
        _clean_up()


def _run(rank: int, task: bytes) -> Any:
    import torch.distributed as dist

    from tests._helpers import mesh_groups

    sys.path[:], world_size, port, process_group, call = pickle.loads(task)
    fn, args = pickle.loads(call)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    mesh_groups.keep_groups()
    if process_group and not dist.is_initialized():
        dist.init_process_group("gloo")
    return fn(*args)


def _clean_up() -> None:
    gc.collect()  # trainers are full of cycles
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
