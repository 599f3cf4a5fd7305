"""A kernel of the emulator that checks which of its arguments it writes."""

from __future__ import annotations

import functools
from typing import Any

import torch

from torchtitan_npu.emulator.kernels.registry import Kernel


def checked(name: str, kernel: Kernel, names: list[str], outputs: list[bool]) -> Kernel:
    @functools.wraps(kernel)
    def run(*arguments: Any) -> Any:
        written = [_range(t) for value, out in zip(arguments, outputs, strict=True) if out for t in _tensors(value)]
        read = [
            (argument, tensor, _bytes(tensor))
            for argument, value, out in zip(names, arguments, outputs, strict=True)
            if not out
            for tensor in _tensors(value)
            if not any(_overlap(_range(tensor), other) for other in written)
        ]
        result = kernel(*arguments)
        for argument, tensor, before in read:
            if not torch.equal(before, _bytes(tensor)):
                raise AssertionError(f"{name} writes {argument}, which prototypes.json does not list as an output")
        return result

    return run


def _tensors(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + (length * tensor.itemsize if tensor.numel() else 0)


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
