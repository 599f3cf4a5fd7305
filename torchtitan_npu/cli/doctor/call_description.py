"""Descriptions of an operator's arguments without their sizes: dtypes, numbers of dimensions, strides and options.

The doctor's file of recorded calls has them as text, such as ``{"x": "bfloat16[2]", "group_type": 2}``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtitan_npu.torch_internals.dispatch import OpOverload, op_schema

SIZES = (
    *("head_num", "head_size", "num_out_tokens", "num_topK", "numels", "permuted_tokens_size_0", "sparse_count"),
    *("tokens_size_0", "world_size"),
)
"""Integers that depend on the sizes of the tensors. Other integers are options, such as ``group_type``."""

INTEGERS = "integers"
"""The description of a list of integers, such as ``cu_seqlens``."""


@dataclass(frozen=True)
class TensorDescription:
    """A tensor without its sizes."""

    dtype: torch.dtype
    dims: int
    memory: str = ""
    """Empty for a contiguous tensor, "transposed" in the last two dimensions, or "strided" in another way."""

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> TensorDescription:
        if tensor.is_contiguous():
            memory = ""
        else:
            memory = "transposed" if tensor.dim() > 1 and tensor.mT.is_contiguous() else "strided"
        return cls(tensor.dtype, tensor.dim(), memory)

    @classmethod
    def parse(cls, text: str) -> TensorDescription | None:
        """Return the description that ``text`` is, or None for another text."""
        found = re.fullmatch(r"(\w+)\[(\d+)\](?: (\w+))?", text)
        return cls(getattr(torch, found[1]), int(found[2]), found[3] or "") if found else None

    def __str__(self) -> str:
        return f"{self.dtype}[{self.dims}] {self.memory}".removeprefix("torch.").rstrip()

    def apply(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with this dtype and these strides."""
        tensor = tensor.to(self.dtype)
        if self.memory == "transposed":
            return tensor.mT.contiguous().mT
        if self.memory == "strided":
            return torch.cat((tensor, tensor), dim=-1)[..., : tensor.shape[-1]]
        return tensor.contiguous()


def describe(op: OpOverload, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a description of each argument that differs from its default, without sizes and floats, as in JSON."""
    defaults = {argument.name: argument.default_value for argument in op_schema(op).arguments}
    described = {
        name: _describe(value)
        for name, value in arguments.items()
        if name not in SIZES and not isinstance(value, float) and value is not None
    }
    return {name: text for name, text in described.items() if defaults[name] is None or text != defaults[name]}


def parse(described: dict[str, Any]) -> dict[str, Any]:
    """Return the description with a :class:`TensorDescription` for each tensor, the inverse of its text."""
    return {name: _parse(value) for name, value in described.items()}


def apply(described: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return ``arguments`` with the options, dtypes and strides of the parsed description."""
    return arguments | {
        name: _apply(value, arguments.get(name)) for name, value in described.items() if value != INTEGERS
    }


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return str(TensorDescription.from_tensor(value))
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value] if any(isinstance(item, Tensor) for item in value) else INTEGERS
    return value


def _apply(described: Any, value: Any) -> Any:
    if isinstance(described, TensorDescription):
        return described.apply(value)
    if isinstance(described, list):
        return [_apply(*pair) for pair in zip(described, value, strict=True)]
    return described


def _parse(value: Any) -> Any:
    if isinstance(value, list):
        return [_parse(item) for item in value]
    if not isinstance(value, str):
        return value
    if value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return TensorDescription.parse(value) or value
