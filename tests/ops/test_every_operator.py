"""Every operator, on the doctor's sample in float64: opcheck, the strides of the fake kernel, and DTensor's rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.cli.doctor import operator_samples
from torchtitan_npu.cli.doctor.call_description import TensorDescription
from torchtitan_npu.cli.doctor.operators import to_float64
from torchtitan_npu.ops import OPS
from torchtitan_npu.ops.core.arguments import Call, args_and_kwargs
from torchtitan_npu.ops.core.autograd import Autograd, Through
from torchtitan_npu.pytree import tree_leaves, tree_map

SMALL = {"TOKENS": 8, "HIDDEN": 16, "HEADS": 4, "HEAD_SIZE": 8, "GROUP_SIZES": (2, 0, 5, 1), "QUERIES": 4, "KEYS": 16}
"""Sizes of the samples."""
BF16_3D, PROBS = TensorDescription(torch.bfloat16, 3), {"probs": operator_samples.MATRIX}
OPTIONS: dict[str, dict[str, Any]] = {
    "_npu_moe_token_unpermute": PROBS,
    "npu_moe_token_unpermute": PROBS,
    "npu_moe_token_unpermute_grad_v2": PROBS,
    "npu_grouped_matmul": {"group_list_type": 1},
    **{f"npu_{of}{backward}": {"input": BF16_3D} for of in ("rms_norm", "swiglu") for backward in ("", "_backward")},
}
"""Options of the samples."""
CHANGES: dict[str, dict[str, Any]] = {
    "npu_add_rms_norm": {"x1": torch.ones(2, 4, 16).double(), "x2": torch.ones(2, 4, 16).double()},
    "npu_lightning_indexer": {"return_value": True},
}
"""Arguments that replace those of the samples."""
NOT_TRACED = {
    "npu_grouped_matmul_add_": "the output aliases the input, which PyTorch's tracer allows only for PyTorch's",
    "npu_lightning_indexer": "opcheck adds integer and floating outputs; test_lightning_indexer.py compiles it",
}
"""Operators without opcheck's test of a compiled graph, and why."""
NO_GRADIENT = ("npu_add_rms_norm",)
"""Autograd is registered, and the backward pass raises."""


def arguments(name: str, convert: Callable[[Any], Any] = to_float64, **changes: Any) -> dict[str, Any]:
    """Return all arguments of a small call by name. A batch of one sequence becomes two."""
    with pytest.MonkeyPatch.context() as patch:
        for size, value in SMALL.items():
            patch.setattr(operator_samples, size, value)
        torch.manual_seed(0)
        options = {key: value for key, value in changes.items() if "layout" in key}
        sample = operator_samples.SAMPLES[name](**OPTIONS.get(name, {}), **options)
    if ("sparse" in name or "indexer" in name) and not options:
        sample = {key: _doubled(value) if isinstance(value, Tensor) else value for key, value in sample.items()}
    return tree_map(convert, OPS[name].complete(**{**sample, **CHANGES.get(name, {}), **changes}))


def _doubled(x: Tensor) -> Tensor:
    """Append a second sequence: other numbers, the same selected keys."""
    return torch.cat([x, x.flip(1) if x.is_floating_point() else x])


def call(name: str, values: dict[str, Any]) -> list[Tensor]:
    args, kwargs = args_and_kwargs(OPS[name].overload(), values)
    return [x for x in tree_leaves(OPS[name].overload()(*args, **kwargs)) if isinstance(x, Tensor)]


def is_differentiable(name: str) -> bool:
    return isinstance(OPS[name].autograd, Autograd | Through) and name not in NO_GRADIENT


each_operator = pytest.mark.parametrize("name", operator_samples.SAMPLES)


@each_operator
def test_opcheck(name: str) -> None:
    values = arguments(name)
    if is_differentiable(name):
        for tensor in (values[key] for key in ("input", "x", "query", "tokens", "permuted_tokens") if key in values):
            tensor.requires_grad_()
    args, kwargs = args_and_kwargs(OPS[name].overload(), values)
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    checks += [] if name in NOT_TRACED else ["test_aot_dispatch_dynamic"]
    torch.library.opcheck(OPS[name].overload(), tuple(args), kwargs, test_utils=checks)


@each_operator
@pytest.mark.parametrize("strided", [False, True])
def test_shapes_and_strides_are_what_the_fake_kernel_says(name: str, strided: bool) -> None:
    values = arguments(name)
    if strided and "grouped" not in name:  # an NPU's products take contiguous matrices
        values = tree_map(lambda x: x.mT.contiguous().mT if isinstance(x, Tensor) and x.dim() > 1 else x, values)
    real = call(name, values)
    with FakeTensorMode() as mode:
        fake = call(name, tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, values))
    assert [(x.shape, x.dtype, x.stride()) for x in fake] == [(x.shape, x.dtype, x.stride()) for x in real]


@pytest.mark.parametrize("name", list(filter(is_differentiable, operator_samples.SAMPLES)))
def test_gradients_are_derivatives(name: str) -> None:
    """Along a random direction, against central differences."""
    values = arguments(name)
    leaves = [x for x in values.values() if isinstance(x, Tensor) and x.is_floating_point()]
    directions = [torch.randn_like(x) for x in leaves]
    weights: list[Tensor] = []

    def total() -> Tensor:
        outputs = [x for x in call(name, values) if x.is_floating_point() and x.requires_grad]
        if name == "npu_fusion_attention":  # as in torch_npu, the statistics require a gradient and have none
            outputs = outputs[:1]
        weights.extend(torch.randn_like(x) for x in outputs[len(weights) :])
        return torch.stack([(x * w).sum() for x, w in zip(outputs, weights, strict=True)]).sum()

    for leaf in leaves:
        leaf.requires_grad_()
    grads = torch.autograd.grad(total(), leaves, allow_unused=True)
    slope = sum((grad * v).sum() for grad, v in zip(grads, directions, strict=True) if grad is not None)
    ends = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            for leaf, v in zip(leaves, directions, strict=True):
                leaf += step * v
        ends.append(total().detach())
    torch.testing.assert_close(slope, (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-6)


Strategy = tuple[list[Placement | None], dict[str, Placement]]


def text(strategy: Strategy) -> str:
    """Write a strategy as ``"query S0, key P -> S0 R"``."""

    def short(placement: Placement | None) -> str:
        return "-" if placement is None else f"S{placement.dim}" if isinstance(placement, Shard) else str(placement)[0]

    outputs, inputs = strategy
    return f"{', '.join(f'{n} {short(p)}' for n, p in inputs.items())} -> {' '.join(map(short, outputs))}"


def sharded_calls(name: str, changes: dict[str, Any]) -> dict[str, bool]:
    """Return, for each strategy that the rule offers, whether it has the results and gradients of one rank.

    A collective in the forward pass, or outputs with other placements, are wrong, too.
    """
    mesh = init_device_mesh("cpu", (2,))

    def distribute(placement: Placement, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        if isinstance(placement, Partial):  # every rank holds half of the sum
            return DTensor.from_local(x / 2, mesh, [placement])
        return distribute_tensor(x.clone(), mesh, [placement])

    def placed(inputs: dict[str, Placement]) -> dict[str, Any]:
        values = arguments(name, **changes)
        return {key: tree_map(partial(distribute, inputs.get(key, Replicate())), x) for key, x in values.items()}

    def run(values: dict[str, Any]) -> tuple[list[Tensor], int]:
        """Return the outputs and gradients, and the number of collectives of the forward pass."""
        leaves = [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.is_floating_point()]
        if not is_differentiable(name):
            leaves = []
        for leaf in leaves:
            leaf.requires_grad_()
        with CommDebugMode() as comm:
            outputs = call(name, values)
        grads: tuple[Tensor | None, ...] = ()
        if leaves:
            total = sum(x.square().sum() for x in outputs if x.requires_grad)
            grads = torch.autograd.grad(total, leaves, allow_unused=True)  # type: ignore[arg-type]
        return [*outputs, *(grad for grad in grads if grad is not None)], comm.get_total_counts()

    specs = tree_map(lambda x: x._spec if isinstance(x, DTensor) else x, placed({}))
    expected, _ = run(arguments(name, **changes))
    found = {}
    for outputs, inputs in OPS[name].sharding(Call(**specs)):
        values = placed(inputs)
        tensors = {key for key, x in values.items() if any(isinstance(y, Tensor) for y in tree_leaves(x))}
        inputs = {key: placement for key, placement in inputs.items() if key in tensors}
        results, collectives = run(values)
        placements = [x.placements[0] for x in results if isinstance(x, DTensor)]
        expected_placements = [placement for placement in outputs if placement is not None]
        full = [x.full_tensor() if isinstance(x, DTensor) else x for x in results]
        same = all(torch.allclose(a, b, rtol=1e-9, atol=1e-9) for a, b in zip(full, expected, strict=True))
        found[text((list(outputs), inputs))] = (
            same and not collectives and placements[: len(expected_placements)] == expected_placements
        )
    return found


PAIRS = [torch.arange(24.0).view(2, 3, 4), torch.arange(80.0).view(2, 5, 8)], [torch.eye(4, 6), torch.eye(8, 2)]
UNGROUPED = {"x": PAIRS[0], "weight": PAIRS[1], "group_type": -1, "split_item": 0, "group_list": None}
HIDDEN = torch.rand(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.3
BATCH = "query S0, query_rope S0, {}sparse_indices S0, key S0, key_rope S0, value S0{} -> {}"
LOSS_BATCH = (
    "query S0, key S0, query_index S0, key_index S0, weights S0, {}softmax_max S0, softmax_sum S0{}, query_rope S0, "
    "key_rope S0 -> S0 S0 S0 P"
)
SHARDINGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("npu_rms_norm", {}, ["input S0 -> S0 S0", "input S1 -> S1 S1"]),
    (
        "npu_rms_norm_backward",
        {},
        ["dy S0, input S0, gamma R, rstd S0 -> S0 P", "dy S1, input S1, gamma R, rstd S1 -> S1 P"],
    ),
    ("npu_add_rms_norm", {}, ["x1 S0, x2 S0 -> S0 S0 S0", "x1 S1, x2 S1 -> S1 S1 S1"]),
    ("npu_swiglu", {}, ["input S0 -> S0", "input S1 -> S1"]),
    ("npu_swiglu_backward", {}, ["grad_output S0, input S0 -> S0", "grad_output S1, input S1 -> S1"]),
    ("npu_rotary_mul", {}, ["input S0 -> S0", "input S1, r1 S1, r2 S1 -> S1", "input S2 -> S2"]),
    (
        "npu_rotary_mul_backward",
        {},
        ["grad S0, input S0 -> S0 P P", "grad S1, input S1, r1 S1, r2 S1 -> S1 S1 S1", "grad S2, input S2 -> S2 P P"],
    ),
    ("npu_mrope", {}, ["positions S1, query S0, key S0 -> S0 S0", "query S1, key S1 -> S1 S1"]),
    ("npu_moe_gating_top_k", {}, ["x S0 -> S0 S0 S0"]),
    ("npu_moe_gating_top_k_backward", {}, ["x_norm S0, grad_y S0, expertIdx S0 -> S0"]),
    ("npu_moe_token_permute", {}, ["tokens S1 -> S1 R"]),
    ("npu_moe_token_permute_grad_v2", {}, ["grad_permuted_tokens S1 -> S1"]),
    ("npu_moe_token_unpermute", {}, ["permuted_tokens S1 -> S1"]),
    ("_npu_moe_token_unpermute", {}, ["permuted_tokens S1 -> S1 S1"]),
    (
        "npu_moe_token_unpermute_grad_v2",
        {},
        ["grad_unpermuted_tokens S1, sorted_indices R, permuted_tokens S1 -> S1 P"],
    ),
    ("npu_grouped_matmul", {}, ["weight S2 -> S1", "x S1, weight S1 -> P", "weight P -> P", "x P -> P"]),
    ("npu_grouped_matmul", {"bias": [torch.ones(4, 128).double()]}, ["weight S2, bias S1 -> S1"]),
    (
        "npu_grouped_matmul",
        UNGROUPED,
        [
            *("x S0 -> S0 S0", "x S1 -> S1 S1", "weight S1 -> S2 S2", "x S2, weight S0 -> P P"),
            *("weight P -> P P", "x P -> P P"),
        ],
    ),
    ("npu_grouped_matmul_add_", {}, ["input S2, weight S1 -> S2"]),
    (
        "npu_fusion_attention",
        {},
        ["query S0, key S0, value S0 -> S0 S0 S0 R - - -", "query S2, key S2, value S2 -> S2 S1 S1 R - - -"],
    ),
    *(
        (
            "npu_fusion_attention",
            {"atten_mask": HIDDEN[:, :heads]},
            [
                "query S0, key S0, value S0, atten_mask S0 -> S0 S0 S0 R - - -",
                f"query S2, key S2, value S2, atten_mask {placement} -> S2 S1 S1 R - - -",
            ],
        )
        for heads, placement in ((1, "R"), (4, "S1"))
    ),
    (
        "npu_fusion_attention_grad",
        {},
        [
            " -> R R R - R",
            *(
                f"query {t}, key {t}, value {t}, dy {t}, attention_in {t}, softmax_max {s}, softmax_sum {s} "
                f"-> {t} {t} {t} - R"
                for t, s in (("S0", "S0"), ("S2", "S1"))
            ),
        ],
    ),
    (
        "npu_sparse_flash_attention",
        {"sparse_mode": 0},
        [
            BATCH.format("", "", "S0 S0 S0"),
            "query S1, query_rope S1, sparse_indices S1 -> S1 S2 S2",
            "query S2, query_rope S2 -> S2 S3 S3",
        ],
    ),
    # the causal boundary depends on the position of a row
    (
        "npu_sparse_flash_attention",
        {},
        [BATCH.format("", "", "S0 S0 S0"), "query S2, query_rope S2 -> S2 S3 S3"],
    ),
    (
        "npu_sparse_flash_attention",
        {"layout_query": "TND"},
        ["query S1, query_rope S1 -> S1 S2 S2"],
    ),
    (
        "npu_sparse_flash_attention_grad",
        {"sparse_mode": 0},
        [
            BATCH.format("d_out S0, out S0, ", ", softmax_max S0, softmax_sum S0", "S0 S0 S0 S0 S0"),
            "query S1, query_rope S1, d_out S1, out S1, sparse_indices S1, softmax_max S2, softmax_sum S2 "
            "-> S1 P P S1 P",
            "query S2, query_rope S2, d_out S2, out S2, softmax_max S3, softmax_sum S3 -> S2 P P S2 P",
        ],
    ),
    (
        "npu_lightning_indexer",
        {"sparse_mode": 0},
        ["query S0, weights S0, key S0 -> S0 S0", "query S1, weights S1 -> S1 S1"],
    ),
    ("npu_lightning_indexer", {}, ["query S0, weights S0, key S0 -> S0 S0"]),
    (
        "npu_lightning_indexer_grad",
        {"sparse_mode": 0},
        [
            "query S0, dy S0, sparse_indices S0, weights S0, key S0 -> S0 S0 S0",
            "query S1, dy S1, sparse_indices S1, weights S1 -> S1 P S1",
        ],
    ),
    ("npu_sparse_lightning_indexer_grad_kl_loss", {}, [LOSS_BATCH.format("sparse_indices S0, ", "")]),
    ("npu_dense_lightning_indexer_softmax_lse", {}, ["query_index S0, key_index S0, weights S0 -> S0 S0"]),
    (
        "npu_dense_lightning_indexer_grad_kl_loss",
        {},
        [LOSS_BATCH.format("", ", softmax_max_index S0, softmax_sum_index S0")],
    ),
]
"""The strategies that each rule offers besides replicating everything."""


def strategies_on_a_rank() -> list[dict[str, bool]]:
    return [sharded_calls(name, changes) for name, changes, _ in SHARDINGS]


def test_each_strategy_equals_one_rank() -> None:
    assert {name for name, _, _ in SHARDINGS} == set(operator_samples.SAMPLES)
    for results in run_on_ranks(2, strategies_on_a_rank):
        for (name, changes, expected), found in zip(SHARDINGS, results, strict=True):
            assert found == dict.fromkeys(expected, True), (name, list(changes))
