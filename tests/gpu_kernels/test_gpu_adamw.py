"""AdamW in Triton, against the formula in float64 and torch's own AdamW."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torchtitan.components.optimizer import OptimizersContainer

from tests._helpers.error_budget import assert_within, rounding_budget
from torchtitan_npu.components.nonfinite.checked_steps import create_states
from torchtitan_npu.components.triton_adamw.optimizer import TritonAdamW, clip_in_step
from torchtitan_npu.errors import UsageError
from torchtitan_npu.gpu_kernels import adamw as kernels
from torchtitan_npu.titan_internals.hooks import clip_grad_norm_with

OPTIONS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(7,), (40, 50), (), (3, 0), (512,), (3, 333)]


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the parameters have several chunks of several blocks, and one a part of a chunk."""
    monkeypatch.setattr(kernels, "CHUNK", 512)
    monkeypatch.setattr(kernels, "TILES", {"BLOCK": 128, "num_warps": 1})
    kernels._chunks.cache_clear()


def random_lists(dtype: torch.dtype, device: str, offset: int = 0) -> list[list[Tensor]]:
    """Return parameters, gradients and moments. ``offset`` shifts them in memory by so many elements."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        memory = torch.randn(offset + torch.Size(shape).numel(), generator=generator).to(device, dtype)
        return memory[offset:].view(shape)

    parameters, gradients, first, second = ([random(shape) for shape in SHAPES] for _ in range(4))
    return [parameters, gradients, first, [moment.square() for moment in second]]


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("factor", [None, 0.25], ids=["", "clipped"])
@pytest.mark.parametrize("wide", [True, False], ids=["float32", "half"])
def test_update_agrees_with_float64(
    device: str, half: torch.dtype, wide: bool, factor: float | None, offset: int
) -> None:
    dtype = torch.float32 if wide else half
    lists = random_lists(dtype, device, offset)
    counts = range(len(SHAPES))  # a parameter that got its first gradient later has fewer steps
    steps = [torch.tensor(float(count), device=device) for count in counts]
    exact = [[tensor.double() for tensor in tensors] for tensors in lists]
    scale = None if factor is None else torch.tensor(factor, device=device)
    kernels.update(*lists, steps, **OPTIONS, gradient_factor=scale)
    assert [step.item() for step in steps] == [count + 1 for count in counts]
    for number, (p, g, m, v) in enumerate(zip(*exact, strict=True)):
        t = number + 1
        g = g * (1.0 if factor is None else factor)
        m = 0.9 * m + 0.1 * g
        v = 0.95 * v + 0.05 * g * g
        change = OPTIONS["lr"] * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        p = p * (1 - OPTIONS["lr"] * 0.1) - change
        # a few roundings in float32 of terms of this size, and one of the result
        single = 16 * torch.finfo(torch.float32).eps
        wanted = [(p, p.abs() + change.abs()), (m, m.abs() + g.abs()), (v, v + g * g)]
        for name, got, (value, size) in zip("pmv", (lists[0], lists[2], lists[3]), wanted, strict=True):
            budget = single * size + rounding_budget(value, dtype)
            assert_within(f"{name} of parameter {number}", got[number], value, budget)
    assert all(torch.equal(g, e.to(dtype)) for g, e in zip(lists[1], exact[1], strict=True))


def test_steps_and_states_are_those_of_torch(device: str) -> None:
    lists = random_lists(torch.float32, device)
    ours, torchs = ([nn.Parameter(tensor.clone()) for tensor in lists[0]] for _ in range(2))
    fused = TritonAdamW(ours, lr=1e-2, fused=True)
    other = torch.optim.AdamW(torchs, lr=1e-2, fused=True)
    for round in range(3):
        for a, b, gradient in zip(ours, torchs, lists[1], strict=True):
            a.grad = b.grad = gradient + round
        if round == 2:  # each continues with the state of the other
            one, two = fused.state_dict(), other.state_dict()
            fused.load_state_dict(two)
            other.load_state_dict(one)
        fused.step()
        other.step()
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        state, expected = fused.state[a], other.state[b]
        assert state.keys() == expected.keys() and state["step"] == expected["step"] == 3
        torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state["exp_avg_sq"], expected["exp_avg_sq"], rtol=1e-6, atol=1e-6)


def test_gradient_with_other_strides(device: str) -> None:
    parameter, expected = (nn.Parameter(torch.ones(20, 30, device=device)) for _ in range(2))
    parameter.grad = torch.arange(600.0, device=device).view(30, 20).t()
    expected.grad = parameter.grad.contiguous()
    for one in (parameter, expected):
        TritonAdamW([one], lr=1e-2, fused=True).step()
    assert torch.equal(parameter, expected)


def test_a_parameter_with_gaps_is_an_error(device: str) -> None:
    parameter = nn.Parameter(torch.zeros(4, 6, device=device)[:, :3])
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(UsageError, match="without gaps in memory"):
        TritonAdamW([parameter], lr=1e-2, fused=True).step()


@pytest.mark.parametrize("max_norm", [1.0, 1e6], ids=["clipped", "below the norm"])
def test_clipping_in_the_update_is_that_of_torch(device: str, max_norm: float) -> None:
    lists = random_lists(torch.float32, device)
    ours, torchs = ([nn.Parameter(tensor.clone()) for tensor in lists[0]] for _ in range(2))
    for a, b, gradient in zip(ours, torchs, lists[1], strict=True):
        a.grad, b.grad = gradient.clone(), gradient.clone()
    fused = TritonAdamW(ours, lr=1e-2, eps=1e-2, fused=True)  # a large eps: otherwise a factor has no effect
    other = torch.optim.AdamW(torchs, lr=1e-2, eps=1e-2, fused=True)
    clip = clip_grad_norm_with(lambda parameters, limit, norm, foreach: clip_in_step([fused], limit, norm))
    norm = clip(ours, max_norm, foreach=True)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(torchs, max_norm))
    assert all(torch.equal(a.grad, gradient) for a, gradient in zip(ours, lists[1], strict=True))
    for _ in range(2):  # the factor belongs to one step
        fused.step()
        other.step()
        for b, gradient in zip(torchs, lists[1], strict=True):
            b.grad = gradient.clone()
    for a, b in zip(ours, torchs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_the_factor_of_a_skipped_step_has_no_effect(device: str) -> None:
    """A checkpoint after a first step that was skipped creates the states, by an update with gradients of zero."""
    model = nn.Linear(3, 2, device=device)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizers = OptimizersContainer([model], TritonAdamW, {"lr": 1e-2, "fused": True})
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float("nan"))
    clip_in_step(optimizers, 1.0, torch.tensor(float("nan"), device=device))
    create_states(optimizers)
    assert all(torch.equal(parameter, old) for parameter, old in zip(model.parameters(), before, strict=True))
    for state in optimizers.optimizers[0].state.values():
        assert state["step"] == 0 and not state["exp_avg"].any() and not state["exp_avg_sq"].any()
