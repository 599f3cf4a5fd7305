"""Compiled models copy no gradient for its strides, unless eager mode does.

The gradients between blocks get other strides by hooks. Those between the regions of a block stay as they are.
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
WITH_EXPERTS = (*FUSED, "npu_permute", "npu_gmm")
STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "unchanged": lambda gradient: gradient,
    "transposed": lambda gradient: gradient.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda gradient: gradient[:, :1].expand_as(gradient),
}


def built(name: str, converters: tuple[str, ...], compiled: bool, mesh: Any) -> nn.Module:
    from torchtitan_npu.compile.block_regions import compile_block
    from torchtitan_npu.models.deepseek_v32.tensor_parallel import apply_non_moe_tp

    model = build(name, *converters, n_layers=2 if mesh is None else 1)  # DeepSeek's second layer has experts
    if mesh is not None:
        apply_non_moe_tp(model, mesh, loss_parallel=False, enable_float8_tensorwise_tp=False, cp_enabled=False)
    if compiled:
        assert all(map(compile_block, model.layers.values()))  # type: ignore[arg-type, operator]
    return model


def copies_in_a_step(model: nn.Module, strides: str) -> tuple[int, Step]:
    """Count the copies of a step in which every block's output has a gradient with these strides."""

    def change_strides(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(STRIDES[strides])

    hooks = [block.register_forward_hook(change_strides) for block in model.layers.values()]  # type: ignore[operator, union-attr]
    start_batch(model)
    model.zero_grad()
    with profile() as profiled:
        result = step(model)
    for hook in hooks:
        hook.remove()
    return sum(event.name == "aten::copy_" for event in profiled.events() or ()), result


def compare(name: str, converters: tuple[str, ...], tensor_parallel: bool = False) -> dict[str, tuple[int, int, int]]:
    """Return by strides the copies in eager mode, the copies compiled, and the number of different gradients."""
    torch.compiler.reset()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)) if tensor_parallel else None
    eager, compiled = (built(name, converters, compiled, mesh) for compiled in (False, True))
    copies_in_a_step(compiled, "unchanged")  # compiles
    found = {}
    for strides in STRIDES:
        (theirs, exact), (ours, result) = (copies_in_a_step(model, strides) for model in (eager, compiled))
        differ = [name for name, gradient in exact.grads.items() if not torch.equal(gradient, result.grads[name])]
        found[strides] = (theirs, ours, len(differ) + (not torch.equal(exact.loss, result.loss)))
    return found


def assert_no_more_copies(found: dict[str, tuple[int, int, int]], **allowed: int) -> None:
    assert found.keys() == STRIDES.keys()
    for strides, (theirs, ours, differ) in found.items():
        assert ours <= theirs + allowed.get(strides, 0) and differ == 0, (strides, theirs, ours, differ)


@pytest.mark.parametrize(
    ("name", "converters"),
    [
        ("llama3", ()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("qwen3", ()),
                ("llama4", ()),
                ("deepseek_v3", ()),
                ("deepseek_v32", ()),
                ("deepseek_v32", FUSED),
            ]
        ),
    ],
)
def test_gradients_are_not_copied_for_their_strides(name: str, converters: tuple[str, ...]) -> None:
    assert_no_more_copies(compare(name, converters))


@pytest.mark.slow
def test_blocks_with_experts() -> None:
    """Two values that eager mode updates in-place are copied: token counts, and zeros for the router's gradient."""
    assert_no_more_copies(compare("deepseek_v32", WITH_EXPERTS), unchanged=2, transposed=2, expanded=2)


def test_tensor_parallel_regions() -> None:
    """AOTAutograd's runtime copies gradients with other strides than in tracing. DTensor in eager mode does so too."""
    (found,) = run_on_ranks(1, compare, "deepseek_v32", (), True)
    assert_no_more_copies(found)
