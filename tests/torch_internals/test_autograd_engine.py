"""The state of the autograd engine that this package reads."""

import torch
from torch.utils.checkpoint import checkpoint

from torchtitan_npu.torch_internals.autograd_engine import in_backward_pass


def test_the_recomputation_of_a_checkpoint_is_in_the_backward_pass() -> None:
    seen: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_backward_pass())
        return x.sin()

    checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [False, True]
    assert not in_backward_pass()
