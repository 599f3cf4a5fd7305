"""The chunked loss: a float64 oracle, the gradients of every model, its memory, and jobs that it rejects."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.profiler import ProfilerActivity, profile
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.protocols.train_spec import get_train_spec

from tests._helpers import deepseek_v32_training, layouts
from tests._helpers.error_budget import assert_within, unit_roundoff
from tests._helpers.linear_cross_entropy import (
    CHUNK,
    DIM,
    ROWS,
    TOKENS,
    VOCABULARY,
    chunked,
    eager,
    inputs,
    oracle,
    squared_errors,
)
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import TOLERANCE, Record, assert_same_gradients
from tests.models.test_qwen3_vl_training import SIZES
from torchtitan_npu.components import chunked_loss
from torchtitan_npu.components.chunked_loss import (
    ChunkedLossPerToken,
    LinearCrossEntropy,
    VocabularyShard,
    defer_output,
)
from torchtitan_npu.components.loss import LossPerToken
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.planner import fake_ranks


def test_loss_and_gradients_are_within_the_rounding_of_float32() -> None:
    hidden, weight, labels = inputs(torch.float32)
    h, w, u = hidden.detach().double(), weight.detach().double(), unit_roundoff(torch.float32)
    logits, counts = h @ w.T, labels != IGNORE_INDEX
    # the error of a logit: DIM products and sums; a difference of two logits has twice that, and one rounding
    difference = 2 * (h.abs() @ w.abs().T).amax(1, keepdim=True) * (DIM + 1) * u
    difference = difference + (logits.amax(1, keepdim=True) - logits) * u
    # a probability: its exponent, the sum of the exponentials, and a few single operations
    p = logits.softmax(1)
    p_error = p * (2 * difference.amax(1, keepdim=True) + (VOCABULARY + 8) * u)
    grad_error = (p_error + 3 * u) * counts[:, None] / TOKENS
    magnitude = (p + F.one_hot(labels.clamp(min=0), VOCABULARY)) * counts[:, None] / TOKENS
    loss, grad_hidden, grad_weight = oracle(hidden, weight, labels)
    per_row = -logits.log_softmax(1).amin(1)
    budgets = (
        ((2 * difference.amax(1) + (VOCABULARY + 8) * u + (ROWS + 2) * u * per_row) * counts).sum() / TOKENS,
        (grad_error + (VOCABULARY + 1) * u * magnitude) @ w.abs(),
        (grad_error + (ROWS + 1) * u * magnitude).T @ h.abs(),
    )
    names = ("loss", "gradient of the hidden states", "gradient of the weight")
    actual = chunked(hidden, weight, labels)
    for name, result, expected, budget in zip(names, actual, (loss, grad_hidden, grad_weight), budgets, strict=True):
        assert_within(name, result, expected, budget)
    assert (actual[1][~counts] == 0).all()


def test_bfloat16_is_as_accurate_as_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both round the logits, their gradient and the results to bfloat16. Sums over chunks are float32."""
    monkeypatch.setattr(chunked_loss, "VOCABULARY_STEP", 16)  # as many calls as a large vocabulary needs
    ours, theirs = (squared_errors(function, torch.bfloat16) for function in (chunked, eager))
    assert (ours[1:] <= 1.01 * theirs[1:]).all(), (ours, theirs)
    # the rounding of the logits is the error of both losses
    assert ours[0].item() == pytest.approx(theirs[0].item(), rel=1e-3)


def test_autocast_is_as_accurate_as_eager() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (squared_errors(function, torch.float32) for function in (chunked, eager))
    assert (ours <= 1.01 * theirs).all(), (ours, theirs)
    assert ours[0] > 1e-6  # autocast has rounded


def build(name: str) -> Any:
    """Return a small model of each family on the CPU, with the same weights in every call."""
    config = JobConfig()
    config.training.seq_len = 32
    if name == "deepseek_v32":
        args = layouts.add_flavor(name, "tiny", deepseek_v32_training.SMALLER)
        config.mtp.layers = 2
    elif name == "qwen3_vl":
        args = layouts.add_flavor(name, "tiny", {**SIZES, "enable_weight_tying": True})
    else:
        layouts.add_flavors()
        args = get_train_spec(layouts.TINY[name][0]).model_args[name]
    args = copy.deepcopy(args)
    args.update_from_config(config)
    torch.manual_seed(0)
    model: Any = get_train_spec(layouts.TINY[name][0] if name in layouts.TINY else name).model_cls(args)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = False
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def train(model: nn.Module, loss_fn: LossPerToken) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return the loss, the gradients and the loss of validation of a batch."""
    tokens = torch.randint(500, (2, 32), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[:, -3:] = IGNORE_INDEX
    for auxiliary_loss in auxiliary_losses([model]):
        auxiliary_loss.start_batch(torch.tensor(TOKENS))
    loss_fn.tokens = TOKENS
    loss = loss_fn(model(tokens), labels)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        return loss.detach(), gradients, loss_fn(model(tokens), labels)


@pytest.mark.parametrize("name", [*layouts.FUSED, "deepseek_v32", "qwen3_vl"])
def test_every_model_has_the_gradients_of_the_loss_of_all_logits(name: str) -> None:
    loss_fn = ChunkedLossPerToken(24)
    model = build(name)
    defer_output(model)
    loss_fn.use_output([model])
    loss, gradients, validation = train(model, loss_fn)
    expected_loss, expected, expected_validation = train(build(name), LossPerToken(cross_entropy_loss))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=TOLERANCE)
    assert validation.item() == pytest.approx(expected_validation.item(), rel=TOLERANCE)
    assert gradients.keys() == expected.keys() and "norm.weight" in gradients
    for parameter, grad in expected.items():
        difference = (gradients[parameter] - grad).norm()
        assert difference <= TOLERANCE * grad.norm(), f"{parameter}: {difference / grad.norm():.1e}"


def peak(hidden: Tensor, weight: Tensor, labels: Tensor, function: Any) -> int:
    """Return the largest number of bytes that the loss and its backward pass allocate."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function(hidden, weight, labels)
    events: Any = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    total = most = 0
    for _, change in sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]"):
        total += change
        most = max(most, total)
    return most


def test_memory_is_that_of_one_chunk() -> None:
    rows, dim, vocabulary, chunk = 512, 16, 4096, 32
    hidden, weight = torch.randn(rows, dim, requires_grad=True), torch.randn(vocabulary, dim, requires_grad=True)
    labels = torch.randint(vocabulary, (rows,))

    def in_chunks(*tensors: Tensor) -> None:
        LinearCrossEntropy.apply(*tensors, 1.0, chunk, None).backward()

    def at_once(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum").backward()

    logits = rows * vocabulary * 4
    assert peak(hidden, weight, labels, at_once) > 2 * logits
    # one chunk of logits; the gradient of the weight before and after it is multiplied; some vectors
    allowed = chunk * vocabulary * 4 + 2 * weight.nbytes + 4 * hidden.nbytes
    assert logits / 20 < peak(hidden, weight, labels, in_chunks) <= allowed < logits / 5


def test_frozen_inputs_have_no_gradient() -> None:
    for frozen in (0, 1):
        tensors = inputs(torch.float32)
        expected = chunked(*tensors)[2 - frozen]
        tensors[frozen].requires_grad_(False)
        LinearCrossEntropy.apply(*tensors, TOKENS, CHUNK, None).backward()
        assert tensors[frozen].grad is None and torch.equal(tensors[1 - frozen].grad, expected)


@pytest.mark.parametrize("output", [nn.Linear(4, 8), type("Scaled", (nn.Linear,), {"forward": None})(4, 8, bias=False)])
def test_other_output_layers_are_rejected(output: nn.Module) -> None:
    model = nn.Module()
    model.output = output
    with pytest.raises(UsageError, match=r"npu\.loss_chunk_tokens must be 0: the model's output is "):
        defer_output(model)


def test_an_output_that_is_not_sharded_by_rows_is_rejected() -> None:
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        weight = DTensor.from_local(torch.ones(8, 4), mesh, [Replicate()], run_check=False)
        with pytest.raises(
            UsageError, match=r"npu\.loss_chunk_tokens must be 0: the parallel plan places the output's "
        ):
            VocabularyShard.from_weight(weight)


CHUNKED = {"npu.loss_chunk_tokens": 24}  # the last chunk is smaller
MTP = {"mtp.layers": 2, "dsa.document_mask": True, "validation.enable": True}
BFLOAT16 = {"training.mixed_precision_param": "bfloat16"}


def train_on_rank(model: str, layout: dict[str, int], options: dict[str, Any]) -> Record:
    if model == "deepseek_v32":
        return deepseek_v32_training.train(layout, options)
    options = {"training.mixed_precision_param": "float32", **options}
    return layouts.train(model, layout, options)


def on_two_ranks(model: str, layout: dict[str, int], options: dict[str, Any]) -> Record:
    return run_on_ranks(2, train_on_rank, model, layout, options, process_group=False)[0]


@pytest.mark.parametrize(
    ("model", "layout", "options"),
    [
        ("qwen3", {"shard": 2}, deepseek_v32_training.COMPILED),
        ("qwen3", {"tp": 2}, {}),
        ("deepseek_v32", {"shard": 2}, MTP),
    ],
    ids=["tied weights and compile", "tied weights and TP", "multi-token prediction and packed documents"],
)
def test_loss_and_gradients_are_those_of_all_logits(
    model: str, layout: dict[str, int], options: dict[str, Any]
) -> None:
    expected, actual = on_two_ranks(model, layout, options), on_two_ranks(model, layout, {**options, **CHUNKED})
    assert ("output.weight" in expected.gradients) == (model != "qwen3")  # qwen3's is the embedding's
    for name in ("losses", "mtp_losses", "validation"):
        assert getattr(actual, name) == pytest.approx(getattr(expected, name), rel=TOLERANCE), name
    assert_same_gradients(actual, expected)


@functools.cache
def in_float32() -> Record:
    return on_two_ranks("llama3", {"shard": 2}, {})


def errors(record: Record) -> torch.Tensor:
    """Return each gradient's distance to that of a job in float32, relative to its norm."""
    exact = in_float32().gradients
    return torch.stack([(record.gradients[name] - grad).norm() / grad.norm() for name, grad in exact.items()])


def test_mixed_precision_is_as_accurate_as_without_chunks() -> None:
    """FSDP gathers the output's weight in bfloat16. Both losses round the logits, their gradients and the results."""
    at_once, in_chunks = (on_two_ranks("llama3", {"shard": 2}, {**BFLOAT16, **options}) for options in ({}, CHUNKED))
    plain, chunked_errors = errors(at_once), errors(in_chunks)
    assert plain.min() > torch.finfo(torch.bfloat16).eps / 8  # bfloat16 has rounded every gradient
    assert chunked_errors.norm() <= 1.05 * plain.norm(), (chunked_errors, plain)
    # the chunks change less than bfloat16 does
    for name, grad in at_once.gradients.items():
        difference = (in_chunks.gradients[name] - grad).norm()
        assert difference <= (grad - in_float32().gradients[name]).norm(), name
    u = torch.finfo(torch.bfloat16).eps / 2
    assert in_chunks.losses[0] == pytest.approx(at_once.losses[0], rel=u)
