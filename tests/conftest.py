"""Every test runs in the home that the entry would prepare: here the CPU, one thread a process, no network."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from torchtitan_npu import platform

platform.prepare()
