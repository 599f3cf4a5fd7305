"""Models with planted faults, for ``experimental.custom_import``: wrong only if FSDP shards the parameters.

``scaled``: the gradient of the last norm is 0.001 % too large. ``raises``: the second forward pass raises.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

import torchtitan_npu.prover.tiny_models  # noqa: F401
from torchtitan_npu.errors import UsageError

FACTOR = 1 + 1e-5


class ScaledGradient(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach() + FACTOR * (self.weight - self.weight.detach())  # the same value
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def planted(fault: str) -> Any:
    spec = get_train_spec("llama3")

    def parallelize(model: Any, dims: Any, config: Any) -> Any:
        if dims.dp_shard > 1 and fault == "scaled":
            assert type(model.norm) is nn.RMSNorm
            model.norm.__class__ = ScaledGradient
        model = spec.parallelize_fn(model, dims, config)
        calls: list[int] = []

        def raise_in_second_call(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise UsageError("the planted fault of step 2")

        if dims.dp_shard > 1 and fault == "raises":
            model.register_forward_pre_hook(raise_in_second_call)
        return model

    return replace(spec, parallelize_fn=parallelize)


for name in ("scaled", "raises"):
    register_train_spec(name, planted(name))
