"""The vocabulary as a whole: its schemas are torch_npu's, and the stand-ins come only where torch_npu's ops are not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.multirank import run_on_ranks
from torchtitan_npu.errors import UsageError
from torchtitan_npu.ops import OPS, Op, define
from torchtitan_npu.ops.autograd import Autograd
from torchtitan_npu.ops.sharding import has_sharding_rule

TORCH_NPU_2_13 = """\
[NPU,Autograd,Meta] npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=9.9999999999999995e-07) -> (Tensor, Tensor)
[NPU,Meta] npu::npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)
"""  # noqa: E501
"""As torch_npu 2.13.0 prints them, with the dispatch keys it registers."""

CONTRACT = {line.partition("] npu::")[2].partition("(")[0]: line for line in TORCH_NPU_2_13.splitlines()}


def test_every_op_is_in_the_contract() -> None:
    assert set(OPS) == set(CONTRACT)


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_schema_and_autograd_are_torch_npu_s(op: Op) -> None:
    keys, _, schema = CONTRACT[op.name].partition(" ")
    assert op.schema == schema
    assert str(op.overload()._schema) == schema  # as PyTorch parsed it
    assert (op.autograd is not None) == ("Autograd" in keys)
    assert has_sharding_rule(op.overload())


def test_defining_again_defines_nothing() -> None:
    assert define("npu") == []


def test_another_namespace_takes_the_stand_ins_with_their_own_backward() -> None:
    assert define("npu_elsewhere") == list(OPS)
    x, gamma = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    outputs = [torch.ops.npu.npu_rms_norm(x, gamma), torch.ops.npu_elsewhere.npu_rms_norm(x, gamma)]
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    with torch.profiler.profile() as profile:
        outputs[1][0].sum().backward()
    called = {event.name for event in profile.events() if event.name.startswith("npu")}
    assert called >= {"npu_elsewhere::npu_rms_norm_backward"} and "npu::npu_rms_norm_backward" not in called


def test_an_op_that_is_already_there_is_kept() -> None:
    """As when torch_npu is loaded: its op stays, what it lacks is added, and so is a DTensor rule."""
    library = torch.library.Library("npu_taken", "FRAGMENT")
    library.define(OPS["npu_rms_norm"].schema.removeprefix("npu::"))
    library.impl("npu_rms_norm", lambda input, gamma, epsilon=1e-6: (input + 1, gamma + 1), "CPU")
    assert define("npu_taken") == [name for name in OPS if name != "npu_rms_norm"]
    assert torch.ops.npu_taken.npu_rms_norm(torch.zeros(2, 2), torch.zeros(2))[0].sum() == 4
    assert has_sharding_rule(torch.ops.npu_taken.npu_rms_norm.default)


def test_importing_needs_no_torchtitan_and_changes_only_registries() -> None:
    program = (
        "import sys, torch; dtype = torch.get_default_dtype(); import torchtitan_npu.ops; "
        "print(sorted(name for name in sys.modules if name.split('.')[0] == 'torchtitan'), "
        "torch.get_default_dtype() == dtype, hasattr(torch.ops.npu, 'npu_rms_norm'))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[] True True"


# An op with what the ops to come have: a keyword-only tensor with a gradient, a layout string, an optional tensor.


def toy_contract(layout: str, **_: Any) -> Iterator[str]:
    if layout not in ("rows", "columns"):
        yield f"layout must be rows or columns, not {layout!r}"


def toy_kernel(x: Tensor, scale: Tensor | None, layout: str, power: int) -> tuple[Tensor, Tensor]:
    """``(x * scale) ** power``, and its sum over each row (or column)."""
    y = (x if scale is None else x * scale) ** power
    return y.clone(), y.sum(1 if layout == "rows" else 0)


def toy_fake(x: Tensor, layout: str, **_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0 if layout == "rows" else 1])


def toy_sharding(layout: str, **_: Any) -> Iterator[tuple[list[Placement], dict[str, Placement]]]:
    yield [Shard(0 if layout == "rows" else 1), Shard(0)], {"x": Shard(0 if layout == "rows" else 1)}


def toy_save(ctx: Any, output: tuple[Tensor, Tensor], x: Tensor, scale: Tensor | None, power: int, **_: Any) -> None:
    ctx.save_for_backward(x, scale)
    ctx.power = power
    ctx.mark_non_differentiable(output[1])


def toy_backward(npu: Any, ctx: Any, dy: Tensor, _: None) -> dict[str, Tensor]:
    x, scale = ctx.saved_tensors
    gain = torch.ones((), dtype=x.dtype) if scale is None else scale
    inner = dy * ctx.power * (x * gain) ** (ctx.power - 1)
    return {"x": inner * gain} if scale is None else {"x": inner * gain, "scale": (inner * x).sum()}


TOY = Op(
    schema='npu::npu_toy(Tensor x, *, Tensor? scale=None, str layout="rows", int power=2) -> (Tensor, Tensor)',
    reference=toy_kernel,
    fake=toy_fake,
    contract=toy_contract,
    sharding=toy_sharding,
    autograd=Autograd(toy_save, toy_backward),
)
define("npu_toys", [TOY])


def test_defaults_and_names_come_from_the_schema() -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    y, sums = torch.ops.npu_toys.npu_toy(x)
    assert torch.equal(y, x**2) and torch.equal(sums, (x**2).sum(1))
    y, sums = torch.ops.npu_toys.npu_toy(x, power=3, layout="columns")
    assert torch.equal(y, x**3) and torch.equal(sums, (x**3).sum(0))
    with pytest.raises(UsageError, match="npu_toy: layout must be rows or columns, not 'cols'"):
        torch.ops.npu_toys.npu_toy(x, layout="cols")


def test_gradients_reach_keyword_only_tensors() -> None:
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    toy = torch.ops.npu_toys.npu_toy
    assert torch.autograd.gradcheck(lambda x, scale: toy(x, scale=scale, power=3)[0], (x, scale))
    assert torch.autograd.gradcheck(lambda x: toy(x)[0], (x,))
    torch.library.opcheck(toy.default, (x,), {"scale": scale, "layout": "columns"})


def toy_on_a_rank(layouts: list[str]) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
    scale = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
    return [torch.ops.npu_toys.npu_toy(x, scale=scale, layout=layout)[1].full_tensor() for layout in layouts]


def test_a_sharding_rule_sees_every_argument_each_time() -> None:
    """Two calls that differ only in a string: the second must not be answered from the first one's cache entry."""
    expected = (torch.arange(16.0).view(4, 4) * 2) ** 2  # small integers: exact
    for rows, columns in run_on_ranks(2, toy_on_a_rank, ["rows", "columns"]):
        assert torch.equal(rows, expected.sum(1))
        assert torch.equal(columns, expected.sum(0))
