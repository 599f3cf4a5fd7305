"""Dry runs and plans: memory, traffic and time of a job, computed without its devices.

A *dry run* executes the real training code of one rank on fake tensors, over a fake process group of any size. A *plan*
searches over layouts and dry-runs the best ones (docs/how-to/plan-a-job.md). On fake ``npu`` tensors the real torch_npu
runs its schemas, meta kernels and autograd (docs/explanation/contract-tests.md).

Tests use the same pieces:

    with fake_ranks(64), fake_device(), AssumedLoad(), Calls() as calls:
        ...  # build, forward, backward, optimizer step
    print(calls.count("npu"))
"""

from torchtitan_npu.planner.fake_devices import (
    AssumedLoad,
    BelowSubclasses,
    Calls,
    Load,
    balanced,
    fake_device,
    fake_ranks,
)

__all__ = ["AssumedLoad", "BelowSubclasses", "Calls", "Load", "balanced", "fake_device", "fake_ranks"]
