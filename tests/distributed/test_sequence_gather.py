"""The chunks of a sequence that context parallel gives to the ranks."""

import pytest
import torch
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

from torchtitan_npu.dist_utils import SequenceSplit


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("head_tail", [False, True])
def test_the_order_of_the_ranks(head_tail: bool, ranks: int) -> None:
    """With head and tail it is torch's."""
    split = SequenceSplit(ranks, head_tail)
    order = torch.cat([split.token_indices(rank, 24) for rank in range(ranks)])
    expected = _HeadTailLoadBalancer(24, ranks, "cpu")._generate_indices()[0] if head_tail else torch.arange(24)
    assert order.equal(expected) and split.in_sequence_order(order, 0).tolist() == list(range(24))
