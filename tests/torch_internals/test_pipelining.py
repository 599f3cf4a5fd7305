"""The backward pass of a pipeline stage takes the arguments that the stage passes on."""

import torch

from torchtitan_npu.torch_internals.pipelining import full_backward


def test_full_backward_returns_the_gradients_of_the_inputs() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    arguments = {"stage_output": (x * weight,), "output_grads": (torch.ones(2),), "input_values": [x]}
    (gradient,) = full_backward(arguments)
    assert gradient.tolist() == [3.0, 3.0]
    assert weight.grad is not None and weight.grad.tolist() == [1.0, 1.0]
