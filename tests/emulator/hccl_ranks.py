"""Ranks of the tests of HCCL: ``hccl_ranks.py FOLDER SCENARIO RANKS`` forks the ranks and runs the scenario on each.

A rank writes ``FOLDER/RANK.json``: the traceback of each check of the scenario, or null if it passed.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

Check = Callable[[int, int], None]

SCENARIOS: dict[str, dict[str, Check]] = {"healthy": {}, "failing": {}}
CASTS = {
    torch.float32: 1000,
    torch.bfloat16: 4,
    torch.float16: 100,
    torch.int32: 1000,
    torch.int64: 1000,
    torch.int8: 10,
}
"""Dtypes that HCCL reduces, and a number below which sums over 4 ranks are exact."""


def check(scenario: str) -> Callable[[Check], Check]:
    def register(function: Check) -> Check:
        SCENARIOS[scenario][function.__name__] = function
        return function

    return register


def values(rank: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return integers that depend on the rank and the index, small enough that sums of them are exact."""
    limit = CASTS.get(dtype, 100)
    return (torch.arange(count) * (rank + 3) + 7 * rank).remainder(limit).to(dtype)


def expect(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


@check("healthy")
def all_reduce(rank: int, size: int) -> None:
    for dtype in CASTS:
        all_values = torch.stack([values(r, 33, dtype) for r in range(size)])
        for op, combine in (
            (dist.ReduceOp.SUM, torch.sum),
            (dist.ReduceOp.MAX, torch.amax),
            (dist.ReduceOp.MIN, torch.amin),
        ):
            tensor = values(rank, 33, dtype).npu()
            dist.all_reduce(tensor, op)
            expect(tensor, combine(all_values, 0).to(dtype))
    tensor = torch.tensor([rank + 1.0, 2.0]).npu()
    dist.all_reduce(tensor, dist.ReduceOp.PRODUCT)
    expect(tensor, torch.tensor([float(torch.arange(1, size + 1).prod()), 2.0**size]))


@check("healthy")
def all_reduce_rounds_once(rank: int, size: int) -> None:
    # With a rounding after each rank, 256 + 1 is 256 in bfloat16, and 2048 + 1 is 2048 in float16.
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        tensor = torch.tensor([large if rank == 0 else 1.0], dtype=dtype).npu()
        dist.all_reduce(tensor)
        expect(tensor, torch.tensor([large + size - 1], dtype=dtype))


@check("healthy")
def all_reduce_in_parts(rank: int, size: int) -> None:
    for count in (100_003, 40_000):  # the second is in the larger file of the first
        tensor = values(rank, count).npu()
        dist.all_reduce(tensor)
        expect(tensor, sum(values(r, count) for r in range(size)))


@check("healthy")
def all_reduce_bool(rank: int, size: int) -> None:
    tensor = torch.tensor([rank == 0, False, True]).npu()
    dist.all_reduce(tensor)
    expect(tensor, torch.tensor([True, False, True]))


@check("healthy")
def average(rank: int, size: int) -> None:
    total = sum(values(r, 2 * size) for r in range(size))
    tensor = values(rank, 2 * size).npu()
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    expect(tensor, total / size)
    part = torch.empty(2).npu()
    dist.reduce_scatter_tensor(part, values(rank, 2 * size).npu(), dist.ReduceOp.AVG)
    expect(part, (total / size)[2 * rank : 2 * rank + 2])


@check("healthy")
def premultiplied_sum(rank: int, size: int) -> None:
    tensor = values(rank, 5).npu()
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    expect(tensor, sum(values(r, 5) * 0.5 for r in range(size)))


@check("healthy")
def reduce_to_root(rank: int, size: int) -> None:
    tensor = values(rank, 6).npu()
    dist.reduce(tensor, dst=1)
    expect(tensor, sum(values(r, 6) for r in range(size)) if rank == 1 else values(rank, 6))


@check("healthy")
def reduce_scatter(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        part = torch.empty(4, dtype=dtype).npu()
        dist.reduce_scatter_tensor(part, values(rank, 4 * size, dtype).npu())
        expect(part, sum(values(r, 4 * size, dtype) for r in range(size))[4 * rank : 4 * rank + 4])


@check("healthy")
def reduce_scatter_uneven(rank: int, size: int) -> None:
    part = torch.empty(rank + 1).npu()
    dist.reduce_scatter(part, [values(rank, r + 1).npu() for r in range(size)])
    expect(part, sum(values(r, rank + 1) for r in range(size)))


@check("healthy")
def all_gather(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        gathered = torch.empty(3 * size, dtype=dtype).npu()
        dist.all_gather_into_tensor(gathered, values(rank, 3, dtype).npu())
        expect(gathered, torch.cat([values(r, 3, dtype) for r in range(size)]))


@check("healthy")
def all_gather_uneven(rank: int, size: int) -> None:
    gathered = [torch.empty(r + 1).npu() for r in range(size)]
    dist.all_gather(gathered, values(rank, rank + 1).npu())
    for r, tensor in enumerate(gathered):
        expect(tensor, values(r, r + 1))


@check("healthy")
def all_gather_object(rank: int, size: int) -> None:
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]


@check("healthy")
def broadcast(rank: int, size: int) -> None:
    for root in range(size):
        tensor = values(rank, 5, torch.int64).npu()
        dist.broadcast(tensor, root)
        expect(tensor, values(root, 5, torch.int64))


@check("healthy")
def scatter(rank: int, size: int) -> None:
    part = torch.empty(3).npu()
    dist.scatter(part, [values(r, 3).npu() for r in range(size)] if rank == 1 else None, src=1)
    expect(part, values(rank, 3))


@check("healthy")
def all_to_all(rank: int, size: int) -> None:
    even = torch.empty(2 * size).npu()
    dist.all_to_all_single(even, values(rank, 2 * size).npu())
    expect(even, torch.cat([values(r, 2 * size)[2 * rank : 2 * rank + 2] for r in range(size)]))


@check("healthy")
def all_to_all_uneven(rank: int, size: int) -> None:
    # Rank r sends (r + 2 s) % 3 rows to rank s; some are empty.
    counts = [[(r + 2 * s) % 3 for s in range(size)] for r in range(size)]
    rows = [values(r, 2 * sum(counts[r])).view(-1, 2) for r in range(size)]
    received = torch.empty(sum(counts[r][rank] for r in range(size)), 2).npu()
    dist.all_to_all_single(received, rows[rank].npu(), [counts[r][rank] for r in range(size)], counts[rank])
    expect(received, torch.cat([rows[r].split(counts[r])[rank] for r in range(size)]))
    outputs = [torch.empty(r + rank + 1).npu() for r in range(size)]
    dist.all_to_all(outputs, [values(rank, r + rank + 1).npu() for r in range(size)])
    for r, tensor in enumerate(outputs):
        expect(tensor, values(r, r + rank + 1))


@check("healthy")
def send_and_receive(rank: int, size: int) -> None:
    for dtype in (torch.float32, torch.int64):  # around the ring; sends are synchronous, so rank 0 receives first
        received = torch.empty(4, dtype=dtype).npu()
        if rank == 0:
            dist.recv(received, size - 1)
        dist.send(values(rank, 4, dtype).npu(), (rank + 1) % size)
        if rank > 0:
            dist.recv(received, rank - 1)
        expect(received, values((rank - 1) % size, 4, dtype))


@check("healthy")
def batch_in_odd_orders(rank: int, size: int) -> None:
    # Two messages of different size between each pair. The order differs by rank; the messages of a pair keep theirs.
    received = {(r, size_of): torch.empty(size_of).npu() for r in range(size) if r != rank for size_of in (3, 70_000)}
    calls = [dist.P2POp(dist.irecv, tensor, r) for (r, _), tensor in received.items()]
    calls += [
        dist.P2POp(dist.isend, values(rank, size_of).npu(), r)
        for r in range(size)
        if r != rank
        for size_of in (3, 70_000)
    ]
    half = len(calls) // 2
    for _ in range(2):
        orders = (calls, calls[half:] + calls[:half], [*itertools.chain(*zip(calls[:half], calls[half:], strict=True))])
        for work in dist.batch_isend_irecv(orders[rank % 3]):
            work.wait()
        for (r, size_of), tensor in received.items():
            expect(tensor, values(r, size_of))
            tensor.zero_()


@check("healthy")
def groups(rank: int, size: int) -> None:
    pairs = {(a, b): dist.new_group([a, b]) for a in range(size) for b in range(a + 1, size)}
    mine = [pair for pair in pairs if rank in pair]
    tensors = {pair: values(rank, 9).npu() for pair in mine}
    works = [dist.all_reduce(tensors[pair], group=pairs[pair], async_op=True) for pair in mine]
    for work in works:
        work.wait()
    for (a, b), tensor in tensors.items():
        expect(tensor, values(a, 9) + values(b, 9))
    if "ROOTINFO_SUBCOMM_ENABLE" in os.environ:  # the name of a sub-communicator is its parent's and a number
        assert list(Path(os.environ["NPU_EMULATOR_FOLDER"]).glob("comm-*-*-*-*"))


@check("healthy")
def buffers_are_charged(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    tensor = torch.ones(1).npu()
    before, _ = torch.npu.mem_get_info()
    dist.all_reduce(tensor, group=group)
    charged, _ = torch.npu.mem_get_info()
    assert before - charged == 2 * 200 * 2**20, before - charged
    dist.destroy_process_group(group)
    after, _ = torch.npu.mem_get_info()
    assert after == before


@check("healthy")
def barrier(rank: int, size: int) -> None:
    path = Path(sys.argv[1], "barrier")
    if rank == 0:
        time.sleep(0.2)
        path.touch()
    dist.barrier()
    assert path.exists()


@check("healthy")
def unsupported_reduction(rank: int, size: int) -> None:
    tensor = torch.ones(2, dtype=torch.bfloat16).npu()
    error = error_of(lambda: dist.all_reduce(tensor, dist.ReduceOp.PRODUCT))
    assert "error code is 5" in error and "does not support HcclDataType 11 with the reduction prod" in error, error


@check("healthy")
def a_forked_child_leaves_the_communicator_alone(rank: int, size: int) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    all_gather_object(rank, size)


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


@check("failing")
def ranks_disagree(rank: int, size: int) -> None:
    group = dist.new_group([0, 1])
    if rank > 1:
        return
    tensor = torch.ones(rank + 1).npu()

    def disagree() -> None:
        dist.all_reduce(tensor, group=group)
        torch.npu.synchronize()

    error = error_of(disagree)
    assert f"is HcclAllReduce of {rank + 1} elements" in error, error
    assert f"but HcclAllReduce of {2 - rank} elements" in error, error


@check("failing")
def a_rank_never_comes(rank: int, size: int) -> None:
    group = dist.new_group([2, 3])
    if rank == 2:
        error = error_of(lambda: dist.all_reduce(torch.ones(1).npu(), group=group))
        assert "error code is 9" in error, error
        assert "(HCCL_CONNECT_TIMEOUT) in vain for rank 1 to join" in error, error


@check("failing")
def a_rank_is_killed(rank: int, size: int) -> None:
    group = dist.new_group([2, 3, 4])
    if rank < 2:
        return
    total = torch.ones(1).npu()
    dist.all_reduce(total, group=group)
    expect(total, torch.full((1,), 3.0))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 4:  # torch_npu's watchdog ends this process
        dist.all_reduce(total, group=group)
        time.sleep(20)

    dist.all_reduce(total, group=group)
    # The default stream waits for that of the collective, so both have the error.
    assert "error code:507048" in error_of(total.cpu)
    error = error_of(torch.npu.synchronize)
    assert "error code is 507048" in error, error
    assert "HcclAllReduce 2 of rank 0 has waited 2 s (HCCL_EXEC_TIMEOUT) in vain for rank 1 (process" in error, error
    assert "has ended" in error, error


def run(rank: int, size: int, folder: Path, scenario: str) -> None:
    if scenario == "failing" and rank != 4:
        os.environ["TORCH_HCCL_ASYNC_ERROR_HANDLING"] = "0"
    torch.npu.set_device(rank)
    dist.init_process_group("hccl", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    results = {}
    for name, function in SCENARIOS[scenario].items():
        try:
            function(rank, size)
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(results))
    if scenario == "healthy":
        dist.destroy_process_group()


def main() -> None:
    folder, scenario, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            run(rank, size, folder, scenario)
            sys.stdout.flush()
            os._exit(0) if scenario == "failing" else sys.exit()
        children.append(child)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))


if __name__ == "__main__":
    main()
