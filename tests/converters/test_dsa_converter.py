"""``npu_dsa``: sparse attention on the fused operators has the same results, gradients and indexer loss."""

from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac

from tests._helpers.converted_models import LAYOUT, build_on_meta, convert, job
from tests._helpers.deepseek_v32_models import BATCH, SEQUENCE, build, counted, model_args, start_batch, tokens
from torchtitan_npu.converters import CONVERTERS, dsa
from torchtitan_npu.converters.dsa import NpuSparseAttention
from torchtitan_npu.distributed.activation_checkpoint import CHECKPOINTING
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.ops.core.arguments import by_name
from torchtitan_npu.ops.indexer_kl_loss import op as spans
from torchtitan_npu.planner import BelowSubclasses, Calls
from torchtitan_npu.titan_internals.rebind import copy_with_globals

INDEXER, ATTENTION = "npu_lightning_indexer", "npu_sparse_flash_attention"
GRADIENT, LOSS = "npu_sparse_flash_attention_grad", "npu_sparse_lightning_indexer_grad_kl_loss"
DENSE_ATTENTION = "npu_fusion_attention"
DENSE_STATISTICS, DENSE_LOSS = "npu_dense_lightning_indexer_softmax_lse", "npu_dense_lightning_indexer_grad_kl_loss"
LAYERS = 3
EOS = int(tokens()[0, 5])


class Step(NamedTuple):
    """The results of a training step."""

    loss: float
    indexer_loss: float
    gradients: dict[str, Tensor | None]


def step(model: nn.Module, documents: Documents | None = None) -> Step:
    start_batch(model)
    logits = model(tokens(), attention_masks=documents)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens().roll(-1).flatten())
    loss.backward()
    gradients = {name.replace("_checkpoint_wrapped_module.", ""): p.grad for name, p in model.named_parameters()}
    return Step(loss.item(), counted(model) if learns(model) else 0.0, gradients)


def learns(model: nn.Module) -> bool:
    return any(parameter.requires_grad for name, parameter in model.named_parameters() if ".indexer." in name)


def assert_same(ours: Step, expected: Step) -> None:
    """Compare within 1e-5: ten layers of a few hundred roundings. With one key per query some gradients are 0."""
    largest = max(gradient.norm() for gradient in expected.gradients.values() if gradient is not None)
    assert ours.loss == pytest.approx(expected.loss, rel=1e-5)
    assert ours.indexer_loss == pytest.approx(expected.indexer_loss, rel=1e-5)
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        own = ours.gradients[name]
        assert (own is None) == (gradient is None), name
        if own is not None and gradient is not None:
            assert (own - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * largest, name


@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"index_topk": 1}, {"index_topk": SEQUENCE + 9}, {"indexer_loss": False}, {"warmup": True}],
    ids=str,
)
def test_trains_like_eager_absorbed_or_not(changes: dict[str, Any], packed: bool) -> None:
    documents = Documents.from_tokens(tokens(), EOS) if packed else None
    assert documents is None or len(documents.cu_seqlens_k.integers) > BATCH
    absorbed, plain = (build(model_args(absorb=absorb, **changes)) for absorb in (True, False))
    fused = convert(copy.deepcopy(absorbed), "npu_dsa")
    with Calls() as calls:
        ours = step(fused, documents)
    if "warmup" in changes:
        expected_calls = dict.fromkeys((DENSE_ATTENTION, DENSE_STATISTICS, DENSE_LOSS), LAYERS)
    else:
        expected_calls = {INDEXER: LAYERS, ATTENTION: LAYERS, GRADIENT: LAYERS}
        expected_calls |= {LOSS: LAYERS} if learns(fused) else {}
    assert calls.count("npu") == expected_calls
    expected = step(absorbed, documents)
    assert_same(ours, expected)
    assert_same(step(plain, documents), expected)


class ArgumentsOf(BelowSubclasses):
    """Record the arguments of all calls of some ``npu::`` operators."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names, self.calls = names, list[dict[str, Any]]()

    def call(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op._schema.name.removeprefix("npu::") in self.names:
            self.calls.append(by_name(op, args, kwargs))
        return op(*args, **kwargs)


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
@pytest.mark.parametrize("packed", [False, True], ids=["whole rows", "documents"])
def test_more_queries_and_documents_than_a_call_takes(
    packed: bool, warmup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With limits of 10 queries and 3 documents in a call, instead of 8192 and 256, the step is the same."""
    monkeypatch.setattr(spans, "MAX_QUERIES", 10)
    monkeypatch.setattr(dsa, "MAX_DOCUMENTS", 3)
    documents = Documents.from_tokens(tokens(), EOS) if packed else None
    groups = 1 if documents is None else -(-len(documents.cu_seqlens_k.integers) // 3)
    assert groups > 1 or not packed
    model = build(model_args(warmup=warmup))
    fused = convert(copy.deepcopy(model), "npu_dsa")
    with ArgumentsOf(*((DENSE_LOSS, DENSE_ATTENTION) if warmup else (LOSS, GRADIENT))) as called:
        ours = step(fused, documents)
    assert_same(ours, step(model, documents))
    assert len(called.calls) >= LAYERS * (2 * groups if warmup else groups + (4 if packed else 3))
    for arguments in called.calls:
        ends = arguments.get("actual_seq_qlen")
        assert ends is None or len(ends) <= 3
        if "sparse_indices" in arguments and "query_index" in arguments:
            assert arguments["query"].shape[0 if packed else 1] <= 10


@pytest.mark.parametrize(
    ("mode", "attention"), [("none", LAYERS), ("selective", LAYERS), ("full", 2 * LAYERS)], ids=["none", "op", "full"]
)
def test_checkpointing_computes_and_counts_no_loss_twice(mode: Any, attention: int) -> None:
    model = convert(build(model_args()), "npu_dsa")
    expected = step(copy.deepcopy(model))
    config = JobConfig().activation_checkpoint
    config.mode, config.selective_ac_option = mode, "op"
    if mode != "none":
        copy_with_globals(apply_ac, CHECKPOINTING)(model, config, model_compile_enabled=False, op_sac_save_list=set())
    with Calls() as calls:
        ours = step(model)
    assert calls.count("npu") == {INDEXER: attention, ATTENTION: attention, GRADIENT: LAYERS, LOSS: LAYERS}
    assert ours.loss == expected.loss and ours.indexer_loss == expected.indexer_loss
    for name, gradient in expected.gradients.items():
        own = ours.gradients[name]
        assert own is not None and gradient is not None and torch.equal(own, gradient), name


def test_evaluates_without_the_loss() -> None:
    model = build(model_args())
    fused = convert(copy.deepcopy(model), "npu_dsa")
    with torch.no_grad(), Calls() as calls:
        ours = fused(tokens())
        expected = model(tokens())
    assert calls.count("npu") == {INDEXER: LAYERS, ATTENTION: LAYERS}
    assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_accepts_mixed_dtypes_under_autocast() -> None:
    """Under autocast norms return float32 and products bfloat16, but the operators need one dtype."""
    args = model_args(index_topk=SEQUENCE)  # all keys are selected, so rounding cannot change the selection
    exact, model = build(args), convert(build(args), "npu_dsa")
    start_batch(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens())
    logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        assert (logits - exact(tokens())).abs().max() <= 0.05 * logits.abs().max()  # about ten roundings to bfloat16


def test_keeps_parameters_and_logs_the_conversion(caplog: pytest.LogCaptureFixture) -> None:
    model = build_on_meta("deepseek_v32")
    names = list(model.state_dict())
    with caplog.at_level(logging.INFO):
        convert(model, "npu_dsa")
    assert list(model.state_dict()) == names
    assert all(type(block.attention.inner_attention) is NpuSparseAttention for block in model.layers.values())  # type: ignore[union-attr, operator]
    line = f"npu_dsa: 6 SparseAttention in layers 0-5 -> {INDEXER}, {ATTENTION}"
    assert f"{line}, {LOSS}" in caplog.messages
    with caplog.at_level(logging.INFO):
        build_on_meta("deepseek_v32", "npu_dsa", indexer_loss=False)
    assert line in caplog.messages


def test_keys_per_head_are_an_error() -> None:
    with pytest.raises(
        UsageError, match=r"npu_dsa supports latent keys only; layers\.0\.attention.* needs absorb=True"
    ):
        build_on_meta("deepseek_v32", "npu_dsa", absorb=False)


def limit_errors(
    flavor: str, dtype: Any = "bfloat16", tp: int = 1, shard: int = 1, seq_len: int = 4096, **changes: Any
) -> list[str]:
    """Return the NPU limits that one layer of a flavor exceeds."""
    from torchtitan_npu.models.deepseek_v32 import deepseekv32_args

    config = job(("npu_dsa",))
    config.training.mixed_precision_param = dtype
    config.training.seq_len, config.training.local_batch_size = seq_len, 1
    args = copy.deepcopy(deepseekv32_args[flavor])
    for name, value in {"n_layers": 1, "vocab_size": 8, **changes}.items():
        setattr(args, name, value)
    with torch.device("meta"):
        from torchtitan_npu.models.deepseek_v32 import DeepSeekV32Model

        model = DeepSeekV32Model(args)
    dims = ParallelDims(**{**LAYOUT, "tp": tp, "dp_shard": shard, "world_size": tp * shard})
    converter = CONVERTERS["npu_dsa"](config, dims)
    ((fqn, module),) = converter.targets(model)
    return converter.limit_errors(fqn, module)


@pytest.mark.parametrize("flavor", ["debugmodel_npu", "671B_4layers", "671B_8layers", "671B"])
def test_flavors_for_npus_are_within_the_limits(flavor: str) -> None:
    assert limit_errors(flavor) == []
    assert any("float32" in text for text in limit_errors(flavor, "float32"))


@pytest.mark.parametrize("warmup", [False, True], ids=["sparse", "warmup"])
def test_sequences_of_an_npu(warmup: bool) -> None:
    """DeepSeek trained both stages on 128k tokens."""
    assert limit_errors("671B", seq_len=2**17, warmup=warmup) == []
    longer = limit_errors("671B", seq_len=2**17 + 1, warmup=warmup)
    assert any("the number of keys is 131073; the NPU kernel supports 1 to 131072" in text for text in longer)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"n_heads": 16}, "the number of heads of query is 16; the NPU kernel supports 32, 64, 128"),
        ({"kv_lora_rank": 256}, "the head size of query is 256; the NPU kernel supports 512"),
        ({"index_topk": 2500}, "sparse_count is 2500"),
        ({"index_head_dim": 64}, "the head size of query is 64; the NPU kernel supports 128"),
        ({"warmup": True, "qk_nope_head_dim": 64}, f"{DENSE_LOSS}: the head size of query is 64; the NPU kernel"),
        ({"index_topk": 512, "indexer_loss": False}, "npu_sparse_flash_attention_grad: top-k is 512"),
    ],
    ids=str,
)
def test_reports_exceeded_npu_limits(change: dict[str, Any], text: str) -> None:
    assert any(text in message for message in limit_errors("debugmodel_npu", **change))


def test_tensor_parallel_without_fsdp_has_no_mixed_precision() -> None:
    assert limit_errors("671B", tp=2, shard=2) == []
    assert limit_errors("671B", n_heads=256)
    assert limit_errors("671B", tp=2, shard=2, n_heads=256) == []  # 128 on each rank
    text = "query.dtype is float32 (training.dtype, because without FSDP tensor parallel has no mixed precision); the"
    assert any(text in message for message in limit_errors("671B", tp=2))
