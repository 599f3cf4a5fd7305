"""Compiled models copy no gradient for its layout: where eager mode copies one they do, and nowhere else.

Gradients between blocks are given other layouts than they come in; those between a block's regions are left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile

from tests._helpers.converted_models import Step, build, step
from tests._helpers.deepseek_v32_models import start_batch
from tests._helpers.multirank import run_on_ranks

FUSED = ("npu_rms_norm", "npu_rope", "npu_dsa")
OF_EXPERTS = ("npu_permute", "npu_gmm")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it comes": lambda gradient: gradient,
    "turned": lambda gradient: gradient.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda gradient: gradient[:, :1].expand_as(gradient),
}


def built(name: str, converters: tuple[str, ...], compiled: bool, mesh: Any) -> nn.Module:
    from torchtitan_npu.compile.regions import compile_block
    from torchtitan_npu.models.deepseek_v32.tensor_parallel import apply_non_moe_tp

    model = build(name, *converters, n_layers=2 if mesh is None else 1)  # DeepSeek's second has experts
    if mesh is not None:
        apply_non_moe_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False, cp_enabled=False)
    if compiled:
        assert all(map(compile_block, model.layers.values()))  # type: ignore[arg-type, operator]
    return model


def copies_in_a_step(model: nn.Module, layout: str) -> tuple[int, Step]:
    """In which every block's output has a gradient of this layout."""

    def lay_out(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(LAYOUTS[layout])

    hooks = [block.register_forward_hook(lay_out) for block in model.layers.values()]  # type: ignore[operator, union-attr]
    start_batch(model)
    model.zero_grad()
    with profile() as profiled:
        result = step(model)
    for hook in hooks:
        hook.remove()
    return sum(event.name == "aten::copy_" for event in profiled.events() or ()), result


def compare(name: str, converters: tuple[str, ...], tensor_parallel: bool = False) -> dict[str, tuple[int, int, int]]:
    """By layout, copies that eager mode makes and that the compiled model makes, and how many gradients differ."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)) if tensor_parallel else None
    eager, compiled = (built(name, converters, compiled, mesh) for compiled in (False, True))
    copies_in_a_step(compiled, "as it comes")  # which compiles
    found = {}
    for layout in LAYOUTS:
        (theirs, exact), (ours, result) = (copies_in_a_step(model, layout) for model in (eager, compiled))
        differ = [name for name, gradient in exact.grads.items() if not torch.equal(gradient, result.grads[name])]
        found[layout] = (theirs, ours, len(differ) + (not torch.equal(exact.loss, result.loss)))
    return found


def assert_as_eager(found: dict[str, tuple[int, int, int]], besides: int = 0) -> None:
    assert found.keys() == LAYOUTS.keys()
    for layout, (theirs, ours, differ) in found.items():
        assert ours <= theirs + besides and differ == 0, layout


@pytest.mark.parametrize(
    ("name", "converters"),
    [("llama3", ()), ("qwen3", ()), ("llama4", ()), ("deepseek_v3", ()), ("deepseek_v32", ()), ("deepseek_v32", FUSED)],
)
def test_gradients_are_taken_as_they_lie(name: str, converters: tuple[str, ...]) -> None:
    assert_as_eager(compare(name, converters))


def test_those_of_blocks_with_experts() -> None:
    """Two things that eager mode adds to in place are copied besides, and neither for its layout: the tokens' counts,
    and zeros for the gradient of the router's scores."""
    assert_as_eager(compare("deepseek_v32", (*FUSED, *OF_EXPERTS)), besides=2)


def test_those_of_dtensors_too() -> None:
    """In AOTAutograd's runtime, which would copy them; on one rank, so that only layouts move anything."""
    (found,) = run_on_ranks(1, compare, "deepseek_v32", (), True)
    assert_as_eager(found)
