"""Small MoE layers, plain and converted; the results of one call, and the same by the formula in float64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.gpt_oss.model.args import GptOssModelArgs
from torchtitan.models.gpt_oss.model.moe import GptOssMoE
from torchtitan.models.moe.moe import MoE, MoEArgs

DIM, HIDDEN = 12, 20

ROUNDINGS = 12
"""One for each step from x to the output: gate, score, its norm, its scale, product, w1, w3, silu, product, w2, sum
over the experts, shared experts."""


def build_moe(biased: bool = False, **args: Any) -> nn.Sequential:
    """Return a model of one MoE layer whose activations are about 1. With ``biased``, it is gpt_oss's layer."""
    options = MoEArgs(**{"num_experts": 8, "num_shared_experts": 0, "top_k": 2, "use_grouped_mm": False} | args)
    if biased:
        # a limit that some activations reach
        layer = GptOssMoE(GptOssModelArgs(moe_args=options, swiglu_limit=1.0), DIM, HIDDEN)
    else:
        layer = MoE(options, DIM, HIDDEN)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        if layer.expert_bias is not None:
            layer.expert_bias.uniform_(-0.1, 0.1, generator=generator)
    return nn.Sequential(layer)


class ModelOfOneMoE(nn.Module):
    """The part of a transformer that TorchTitan's parallel plans for MoE layers need."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        block = nn.Module()
        block.moe, block.moe_enabled = moe, True  # type: ignore[assignment]
        self.layers = nn.ModuleDict({"0": block})

    @property
    def moe(self) -> Any:
        return self.layers["0"].moe

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)


def tokens(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with parameters in ``dtype``, as under FSDP's mixed precision. Buffers stay float32."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def output_gradient(output: Tensor) -> Tensor:
    """Return small integers, which every dtype represents exactly."""
    return torch.randint(-4, 5, output.shape, generator=torch.Generator().manual_seed(2)).to(output.dtype)


def call(model: nn.Module, x: Tensor, *inputs: Tensor) -> dict[str, Tensor]:
    """Return the output for ``x`` and more inputs, and the gradients of ``x`` and of every parameter."""
    x = x.detach().clone().requires_grad_()
    parameters = dict(model.named_parameters())
    output = model(x, *inputs)
    grads = torch.autograd.grad(output, [x, *parameters.values()], output_gradient(output))
    return {"output": output.detach()} | dict(zip(["x", *parameters], grads, strict=True))


def call_exact(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return :func:`call` by the formula in float64, with the experts that the model's router selects."""
    with torch.no_grad():
        _, selected, _ = model[0].router(x.flatten(0, 1), model[0].expert_bias)

    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", in_dtype(model[0], torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return moe_formula(self.get_submodule("0"), x.flatten(0, 1), selected).view(x.shape)

    return call(Exact(), x.double())


def moe_formula(moe: Any, x: Tensor, selected: Tensor) -> Tensor:
    """Return the layer's output for ``x`` (tokens, dim), whose experts are ``selected`` (tokens, top_k)."""
    logits = F.linear(x, moe.router.gate.weight, moe.router.gate.bias)
    scores = (logits.sigmoid() if moe.router.score_func == "sigmoid" else logits.softmax(1)).gather(1, selected)
    if moe.router.route_norm:
        scores = scores / scores.sum(1, keepdim=True)
    scores = scores * moe.router.route_scale
    output = torch.zeros_like(x) if moe.shared_experts is None else moe.shared_experts(x)
    for expert in range(moe.router.num_experts):
        is_selected = selected == expert
        score = (scores * is_selected).sum(1, keepdim=True)  # (tokens, 1)
        if moe.score_before_experts:
            output = output + expert_formula(moe.experts, expert, x * score) * is_selected.any(1, keepdim=True)
        else:
            output = output + expert_formula(moe.experts, expert, x) * score
    return output


def expert_formula(experts: Any, expert: int, x: Tensor) -> Tensor:
    """Return the output of one expert's feed-forward network for ``x`` (rows, dim)."""
    if not hasattr(experts, "mlp1_weight"):
        gate, up = x @ experts.w1[expert].T, x @ experts.w3[expert].T
        return (gate * gate.sigmoid() * up) @ experts.w2[expert].T
    hidden = x @ experts.mlp1_weight[expert].T + experts.mlp1_bias[expert]
    limit = experts.swiglu_limit
    gate, up = hidden[:, ::2].clamp(max=limit), hidden[:, 1::2].clamp(-limit, limit)
    return (gate * (1.702 * gate).sigmoid() * (up + 1)) @ experts.mlp2_weight[expert].T + experts.mlp2_bias[expert]


def rows(counts: list[int], dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return tokens sorted by expert, and the number of tokens per expert."""
    x = torch.randn(sum(counts), DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return x, torch.tensor(counts)


def call_experts(experts: nn.Module, x: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Return the experts' output, and the gradients of ``x`` and of every parameter."""
    return call(experts, x, counts)


def call_experts_exact(experts: nn.Module, x: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """Return :func:`call_experts` by the formula, in float64, expert by expert."""
    exact = in_dtype(experts, torch.float64)

    def forward(x: Tensor, counts: Tensor) -> Tensor:
        parts = [expert_formula(exact, expert, part) for expert, part in enumerate(x.split(counts.tolist()))]
        # an expert without rows has zero gradients
        return torch.cat(parts) + sum(0 * parameter.sum() for parameter in exact.parameters())

    exact.forward = forward  # type: ignore[method-assign,assignment]
    return call_experts(exact, x.double(), counts)
