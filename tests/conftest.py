"""Every test runs in the home that the entry would prepare: here the CPU, one thread a process, no network."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import settings

from torchtitan_npu import platform

platform.prepare()

# the same examples in every run: what passed once passes in a fresh clone
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
