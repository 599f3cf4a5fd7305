"""The order of tokens that context parallel assumes is the one that torch's load balancer uses."""

from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

from torchtitan_npu.dist_utils import head_tail_order, in_sequence_order


def test_head_tail_order_is_torchs() -> None:
    assert head_tail_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    for ranks in (2, 3, 4):
        assert head_tail_order(24, ranks).equal(_HeadTailLoadBalancer(24, ranks, "cpu")._generate_indices()[0])
        assert in_sequence_order(head_tail_order(24, ranks), ranks, 0).tolist() == list(range(24))
