"""A training step without a device: fake tensors, ranks that exist in name only, and a stated expert load.

On fake tensors on ``npu`` the real torch_npu runs its schemas, shape functions and autograd, and computes no numbers
(docs/explanation/contract-tests.md). Three things are needed besides:

    with fake_ranks(64), fake_device(), StatedLoad(), Calls() as calls:
        ...  # build, forward, backward, optimizer step
    print(calls.count("npu"))

The modules beside this one rehearse a user's job with that, and record what it takes (docs/how-to/plan-a-job.md).
"""

from torchtitan_npu.planner.expert_load import Load, StatedLoad, balanced
from torchtitan_npu.planner.fake_devices import BelowSubclasses, Calls, fake_device, fake_ranks

__all__ = ["BelowSubclasses", "Calls", "Load", "StatedLoad", "balanced", "fake_device", "fake_ranks"]
