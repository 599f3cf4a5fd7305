"""The module inside a checkpoint wrapper can be reached."""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from torchtitan_npu.torch_internals.activation_checkpoint import CheckpointWrapper, without_checkpoint_wrapper


def test_unwrapping() -> None:
    inner = nn.Linear(2, 2)
    outer = checkpoint_wrapper(inner)
    assert isinstance(outer, CheckpointWrapper)
    assert without_checkpoint_wrapper(outer) is inner and without_checkpoint_wrapper(inner) is inner
