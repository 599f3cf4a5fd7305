"""Gradients of a MoE layer under tensor parallel: with the workaround one rank's, without it not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp

from tests._helpers.moe_layers import build_moe, output_gradient, tokens
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.distributed.moe_tensor_parallel import SPLITTING_BY_SEQUENCE, fix_moe_gradients
from torchtitan_npu.titan_internals.rebind import copy_with_globals

BATCH, SEQUENCE, RANKS = 2, 8, 2


class Block(nn.Module):
    moe_enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.moe = build_moe(score_before_experts=False)[0]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Block()})


def step(ranks: int, split: bool, fixed: bool) -> dict[str, Tensor]:
    """Return the gradients of the input and of the router on this rank; each rank has its part of the sequence."""
    model, x = Model(), tokens(BATCH, SEQUENCE)
    gradient, rank = output_gradient(x), 0
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        experts = {"ep_mesh": mesh if split else None, "etp_mesh": None, "ep_etp_mesh": None}
        parallelize = copy_with_globals(apply_moe_ep_tp, SPLITTING_BY_SEQUENCE) if fixed else apply_moe_ep_tp  # type: ignore[arg-type]
        parallelize(model, tp_mesh=mesh, **experts)
        if fixed:
            fix_moe_gradients(model, mesh, tokens_are_split=split)
        rank = mesh.get_local_rank()
    own = slice(rank * SEQUENCE // ranks, (rank + 1) * SEQUENCE // ranks)
    x = x[:, own].contiguous().requires_grad_()
    moe = model.layers["0"].moe
    moe(x).backward(gradient[:, own].contiguous())
    router = moe.router.gate.weight.grad
    return {"x": x.grad, "router": router.full_tensor() if isinstance(router, DTensor) else router}  # type: ignore[dict-item]


@pytest.mark.parametrize("split", [False, True], ids=["tensor parallel", "expert parallel over the same ranks"])
@pytest.mark.parametrize("fixed", [True, False])
def test_gradients_are_one_ranks(split: bool, fixed: bool) -> None:
    """If the second case fails, TorchTitan has corrected its layer, and the workaround can be deleted."""
    alone = step(1, split, fixed)
    parts = run_on_ranks(RANKS, step, RANKS, split, fixed)
    close = torch.allclose(torch.cat([part["x"] for part in parts], dim=1), alone["x"], atol=1e-5)
    close = close and all(torch.allclose(part["router"], alone["router"], atol=1e-5) for part in parts)
    assert close == fixed
