"""The checkpoint wrapper can be recognized and removed; selective checkpointing takes another policy."""

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from torchtitan_npu.torch_internals.activation_checkpoint import (
    CheckpointWrapper,
    checkpoint_wrapper,
    is_checkpointed,
    with_policy,
    without_checkpoint_wrapper,
)


def test_wrapped_modules() -> None:
    inner = nn.Linear(2, 2)
    outer = checkpoint_wrapper(inner)
    assert isinstance(outer, CheckpointWrapper)
    assert without_checkpoint_wrapper(outer) is inner and without_checkpoint_wrapper(inner) is inner
    assert is_checkpointed(outer) and not is_checkpointed(inner)
    assert is_checkpointed(torch.compile(outer))  # the compiled wrapper passes attributes on


def test_a_recomputation_with_another_number_of_profiler_ranges() -> None:
    ranges = [1, 2]

    def forward(x: torch.Tensor) -> torch.Tensor:
        for _ in range(ranges.pop(0)):
            with torch.profiler.record_function("range"):
                pass
        return (x @ x).sin()

    def contexts() -> tuple[object, object]:
        return with_policy(create_selective_checkpoint_contexts([torch.ops.aten.mm.default]), lambda policy: policy)

    x = torch.ones(2, 2, requires_grad=True)
    checkpoint(forward, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert x.grad is not None


def test_a_higher_order_operator_in_a_recomputed_forward() -> None:
    """TorchTitan wraps compiled flex attention in one, so that it can be saved."""
    q, weight = torch.ones(1, 1, 16, 16), torch.ones(16, requires_grad=True)
    flex_attention(q, q, q)  # initializes a GPU, which a recomputed forward must not do

    def contexts() -> tuple[object, object]:
        return with_policy(create_selective_checkpoint_contexts([torch.ops.aten.mm.default]), lambda policy: policy)

    output = checkpoint(
        lambda weight: (flex_attention(q, q, q) * weight).sin(), weight, use_reentrant=False, context_fn=contexts
    )
    output.sum().backward()
    assert weight.grad is not None
