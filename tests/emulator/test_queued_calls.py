"""Calls that are queued: their arguments, their order, their training step, the end of the program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from torchtitan_npu.emulator.environment import process_variables

PROGRAM = """
import time

import torch, torch_npu

from torchtitan_npu.emulator import set_seed

# torch_npu frees the arguments of a call when the launch returns
torch.manual_seed(0)
query, key, value = (torch.randn(1, 2, 16, 16).to(torch.bfloat16) for _ in range(3))
queued = [torch_npu.npu_fusion_attention(query.npu(), key.npu(), value.npu(), 2, "BNSD")[0] for _ in range(8)]
garbage = [bytes(64) for _ in range(1000)]
expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0)
for output in queued:
    torch.testing.assert_close(output.cpu(), expected, atol=2e-2, rtol=2e-2)

# the order of a seed, with and without pauses of the program
streams = [torch.npu.Stream() for _ in range(3)]
tensors = [torch.zeros(4, device="npu") for _ in streams]
for pause in (0.0, 0.03):
    set_seed(3)
    for i in range(12):
        with torch.npu.stream(streams[i % 3]):
            tensors[i % 3].add_(i)
        if i % 4 == 3:
            time.sleep(pause)
    torch.npu.synchronize()

# a training step ends before the call of it has run
parameter = torch.nn.Parameter(torch.ones(4, device="npu"))
parameter.grad = torch.ones(4, device="npu")
torch.npu.synchronize()
torch.erfinv(tensors[0])
torch.optim.SGD([parameter], lr=0.1, foreach=False).step()
torch.npu.synchronize()

# the program ends without waiting
torch.sin(tensors[0])
"""


def test_queued_calls(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        **process_variables(Path(os.environ["ASCEND_HOME_PATH"]), os.environ, seeded=True),
        "NPU_EMULATOR_SEED": "3",
        "NPU_EMULATOR_RECORD": "log",
        "NPU_EMULATOR_RECORD_FOLDER": str(tmp_path),
    }
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    (log,) = tmp_path.glob("calls.*")
    calls = [json.loads(line) for line in log.read_text().splitlines()]

    adds = [(call["arguments"]["other"], call["stream"]) for call in calls if call["operator"] == "aclnnInplaceAdds"]
    first, second = adds[:12], adds[12:]
    assert [value for value, _ in first] != list(range(12)), "the seed reorders the streams"
    assert first == second, "the order depends on the seed, not on time"

    assert [call["step"] for call in calls if call["operator"] == "aclnnErfinv"] == [0]
    assert calls[-1]["operator"] == "aclnnSin", "a call that is queued at the end still runs"


END = """
import ctypes, threading, time, torch, torch_npu
from torchtitan_npu.emulator.kernels.registry import KERNELS

x, started = torch.ones(4, device="npu"), threading.Event()
torch.npu.synchronize()
sin, cos = KERNELS["aclnnSin"], KERNELS["aclnnCos"]

def compute_for_long(*arguments):
    started.set()
    time.sleep(1)
    sin(*arguments)

def compute_and_print(*arguments):
    cos(*arguments)
    print("computed")

KERNELS.update(aclnnSin=compute_for_long, aclnnCos=compute_and_print)
threading.Thread(target=torch.sin, args=(x,), daemon=True).start()
started.wait()
torch.cos(x)  # queued behind the other thread's kernel

hccl, communicators, stream = ctypes.CDLL("libhccl.so"), (ctypes.c_void_p * 2)(), ctypes.c_void_p()
hccl.HcclCommInitAll(2, (ctypes.c_int32 * 2)(0, 1), communicators)
hccl.aclrtCreateStream(ctypes.byref(stream))
hccl.HcclBarrier(ctypes.c_void_p(communicators[0]), stream)  # the other rank never comes
"""


def test_the_end_of_a_program(tmp_path: Path) -> None:
    """A queued call runs even if it has to wait for a long kernel. What waits for another rank is given up."""
    environment = {**os.environ, "HCCL_EXEC_TIMEOUT": "5", "NPU_EMULATOR_FOLDER": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", END], env=environment, capture_output=True, text=True, timeout=120)
    assert ran.stdout == "computed\n", ran.stderr
    assert "tasks that wait for other ranks or threads are given up: 1\n" in ran.stderr
