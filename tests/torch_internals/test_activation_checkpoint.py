"""The checkpoint wrapper can be recognized and removed; selective checkpointing takes another policy."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests._helpers.multirank import RankError, run_on_ranks
from torchtitan_npu.torch_internals.activation_checkpoint import (
    CheckpointWrapper,
    checkpoint_wrapper,
    hide_fsdp,
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


def train_two_microbatches(hide: bool) -> bool:
    """Train a block with a sharded layer inside as a pipeline does; return whether its gradients are right.

    The layer is still gathered when the second forward pass begins, and gathered again in its recomputation.
    """
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    weight = block[1].weight.detach().clone()
    inner = fully_shard(block[1], reshard_after_forward=True)
    inner.set_reshard_after_backward(False)

    def contexts() -> tuple[object, object]:
        if hide:
            hide_fsdp(block)
        return with_policy(create_selective_checkpoint_contexts([torch.ops.aten.addmm.default]), lambda policy: policy)

    x = torch.randn(3, 4)
    for _ in range(2):
        checkpoint(lambda x: block(x).sin(), x, use_reentrant=False, context_fn=contexts).sum().backward()
    inner.reshard()
    hidden = block[0](x)
    expected = 2 * (hidden @ weight.T + block[1].bias.full_tensor()).cos().T @ hidden
    return torch.allclose(block[1].weight.grad.full_tensor(), expected, rtol=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_recomputation_that_gathers_parameters(ranks: int) -> None:
    assert run_on_ranks(ranks, train_two_microbatches, True) == [True] * ranks
    # if this does not raise, torch ignores FSDP's operators itself, and hide_fsdp can be deleted
    counts_them = torch.__version__ >= "2.13"
    with pytest.raises(RankError, match="encountered during backward") if counts_them else nullcontext():
        run_on_ranks(ranks, train_two_microbatches, False)
