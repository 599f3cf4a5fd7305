"""DeepSeek-V3.2's attention: absorbed or not, its gradients, the selected keys, causality and documents."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchtitan.models.deepseek_v3.model.model import precompute_freqs_cis

import torchtitan_npu
from tests._helpers.deepseek_v32_models import (
    BATCH,
    POSITIONS,
    SEQUENCE,
    TOP_K,
    VOCABULARY,
    build,
    counted,
    model_args,
    start_batch,
    tokens,
)
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.layers.sparse_attention import divergence, index_scores, select
from torchtitan_npu.models.deepseek_v32 import deepseekv32_args
from torchtitan_npu.models.deepseek_v32.args import INDEX_ROPES
from torchtitan_npu.models.deepseek_v32.attention import DeepSeekV32Attention
from torchtitan_npu.models.deepseek_v32.indexer import INDEXERS, Indexer
from torchtitan_npu.preflight.job import check_job

TOP_KS = (1, TOP_K, SEQUENCE + 9)


def attention_step(absorb: bool, top_k: int) -> dict[str, Tensor]:
    """Return output and gradients of one layer's attention in float64."""
    args = model_args(absorb=absorb, index_topk=top_k)
    torch.manual_seed(0)
    attention = DeepSeekV32Attention(args).double()
    start_batch(attention, dtype=torch.float64)
    x = torch.randn(BATCH, SEQUENCE, args.dim, dtype=torch.float64, requires_grad=True)
    output = attention(x, precompute_freqs_cis(args), None)
    output.backward(torch.randn(output.shape, dtype=output.dtype))
    gradients = {name: p.grad for name, p in attention.named_parameters()}
    indexer_loss = torch.tensor(counted(attention))
    return {"output": output.detach(), "indexer loss": indexer_loss, "x": x.grad, **gradients}  # type: ignore[dict-item]


@pytest.mark.parametrize("top_k", TOP_KS)
def test_absorbed_and_not_absorbed_agree(top_k: int) -> None:
    absorbed, plain = (attention_step(absorb, top_k) for absorb in (True, False))
    assert absorbed.keys() == plain.keys()
    for name, expected in plain.items():
        # each is a few hundred terms and a dozen sums deep in float64; only the rotation is float32, and of the same
        # numbers in both
        assert (absorbed[name] - expected).norm() <= 1e-12 * expected.norm(), name


def test_a_block_frees_attentions_inputs() -> None:
    """They are freed before the experts run. In the largest model the queries alone are a GiB per rank."""
    args = model_args()
    block: Any = build(args).layers[str(args.n_layers - 1)]
    held: dict[str, weakref.ref[Tensor]] = {}
    alive: list[str] = []

    def before_attention(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        held["query"], held["key"] = (weakref.ref(given[place]) for place in (0, 2))

    def after_attention(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        held["attended"] = weakref.ref(output)

    def before_experts(module: nn.Module, given: tuple[Tensor, ...]) -> None:
        alive.extend(name for name, tensor in held.items() if tensor() is not None)

    block.attention.inner_attention.register_forward_pre_hook(before_attention)
    block.attention.inner_attention.register_forward_hook(after_attention)
    block.moe.register_forward_pre_hook(before_experts)
    with torch.no_grad():  # nothing is saved for a backward pass
        block(torch.randn(BATCH, SEQUENCE, args.dim), precompute_freqs_cis(args), None)
    assert len(held) == 3
    assert not alive


def model_step(**changes: Any) -> tuple[float, dict[str, Tensor | None]]:
    model = build(model_args(**changes))
    start_batch(model)
    logits = model(tokens()[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten())
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def test_the_main_loss_gives_the_indexer_no_gradients() -> None:
    """With a loss weight of 0 the indexer's own loss gives it none either, and other gradients do not change."""
    (_, gradients), (_, expected) = model_step(indexer_loss_weight=0.0), model_step(indexer_loss=False)
    for name, gradient in gradients.items():
        other = expected[name]
        assert gradient is not None
        assert torch.equal(gradient, torch.zeros_like(gradient) if other is None else other), name


def test_the_indexers_loss_is_its_divergence_from_attention() -> None:
    """Compare with a loop over queries and torch's divergence, in float64."""
    torch.manual_seed(0)
    queries = 9
    scores = torch.randn(1, queries, queries, dtype=torch.float64)
    selected = select(scores, torch.ones(1, queries, queries, dtype=torch.bool).tril(), 4)
    logits = torch.randn(1, 3, queries, queries, dtype=torch.float64).masked_fill(~selected.unsqueeze(1), -torch.inf)
    expected = 0.0
    for query in range(queries):
        keys = selected[0, query].nonzero().squeeze(1)
        attention = F.normalize(logits[0, :, query, keys].softmax(-1).sum(0), p=1, dim=0)
        expected += F.kl_div(scores[0, query, keys].log_softmax(0), attention, reduction="sum").item()
    assert divergence(scores, selected, logits.softmax(-1)).item() == pytest.approx(expected, rel=1e-13)


def test_without_a_trainer_the_loss_raises_for_its_missing_scale() -> None:
    model = build(model_args())
    with pytest.raises(UsageError, match=r"indexer_loss needs `-m torchtitan_npu\.train`"):
        model(tokens()).sum().backward()


def test_the_warm_up_attends_to_all_visible_keys_and_trains_only_the_indexer() -> None:
    dense, warm = build(model_args(index_topk=POSITIONS, absorb=False)), build(model_args(warmup=True))
    with torch.no_grad():
        assert torch.equal(dense(tokens()), warm(tokens()))
    learning = {name for name, parameter in warm.named_parameters() if parameter.requires_grad}
    assert learning == {name for name, _ in warm.named_parameters() if ".indexer." in name}


def test_a_document_in_a_row_gives_the_result_of_the_document_alone() -> None:
    model = build(model_args()).eval()
    rows = tokens() % (VOCABULARY - 1)
    eos, last_tokens = (
        VOCABULARY - 1,
        [(4, 5, 15), (20,)],
    )  # one has one token; rows end inside a document
    for row, places in zip(rows, last_tokens, strict=True):
        row[list(places)] = eos
    documents = Documents.from_tokens(rows, eos)
    ends = documents.cu_seqlens_k.integers
    assert ends == (5, 6, 16, 24, 45, 48) == tuple(documents.cu_seqlens_q.tensor.tolist())
    of_query, _ = documents.numbers(BATCH)
    assert of_query.flatten().unique_consecutive(return_counts=True)[1].tolist() == [5, 1, 10, 8, 21, 3]
    with torch.no_grad():
        packed = model(rows, attention_masks=documents).flatten(0, 1)
        for start, end in zip((0, *ends), ends, strict=False):
            alone = model(rows.flatten()[start:end].unsqueeze(0))[0]
            # float32 rotations by other angles with the same differences
            assert (packed[start:end] - alone).abs().max() <= 1e-4 * alone.abs().max()


def test_the_indexers_loss_gives_gradients_only_to_the_indexer() -> None:
    args = model_args()
    indexer = Indexer(args)
    x = torch.randn(BATCH, SEQUENCE, args.dim, requires_grad=True)
    q_latent = torch.randn(BATCH, SEQUENCE, args.q_lora_rank, requires_grad=True)
    index_scores(*indexer(x, q_latent, precompute_freqs_cis(args), None)).square().sum().backward()
    assert x.grad is None and q_latent.grad is None
    for name, parameter in indexer.named_parameters():
        assert parameter.grad is not None and parameter.grad.norm() > 0, name


@given(sequence=st.integers(1, 12), heads=st.integers(1, 3), top_k=st.integers(1, 15), seed=st.integers(0, 2**32 - 1))
def test_selects_the_same_keys_as_the_operator(sequence: int, heads: int, top_k: int, seed: int) -> None:
    """With small integers many scores are equal and none is rounded."""
    generator = torch.Generator().manual_seed(seed)
    q, k, weights = (
        torch.randint(-2, 3, size, generator=generator).float()
        for size in ((BATCH, sequence, heads, 4), (BATCH, sequence, 4), (BATCH, sequence, heads))
    )
    visible = torch.ones(1, sequence, sequence, dtype=torch.bool).tril()
    selected = select(index_scores(q, k, weights), visible, top_k)
    indices, _ = torch.ops.npu.npu_lightning_indexer(q, k.unsqueeze(2), weights, sparse_count=top_k, sparse_mode=3)
    expected = torch.zeros(BATCH, sequence, sequence + 1, dtype=torch.bool)
    expected.scatter_(-1, indices.squeeze(2).long() + 1, True)  # -1 is padding, in column 0
    assert torch.equal(selected, expected[..., 1:])


def test_only_differences_of_positions_matter() -> None:
    model = build(model_args())
    positions = torch.arange(SEQUENCE) + torch.tensor([[5], [300]])
    with torch.no_grad():
        expected, shifted = model(tokens()), model(tokens(), positions=positions)
        stretched = model(tokens(), positions=2 * positions)
    assert (shifted - expected).abs().max() <= 1e-4 * expected.abs().max()  # angles with other float32 roundings
    assert (stretched - expected).abs().max() > 1e-3 * expected.abs().max()


def test_a_token_does_not_see_later_ones() -> None:
    model = build(model_args())
    changed = tokens()
    changed[:, 10] = (changed[:, 10] + 1) % model.model_args.vocab_size
    with torch.no_grad():
        before, after = model(tokens()), model(changed)
    difference = (before - after).abs().amax((0, 2)) / before.abs().max()
    assert difference[:10].max() <= 1e-5  # not 0: experts multiply a different number of tokens
    assert difference[10:].max() > 1e-2


def test_a_job_does_not_affect_the_next_one() -> None:
    args, config = model_args(), JobConfig()
    args.update_from_config(config)
    before = dataclasses.asdict(args)
    config.dsa.document_mask, config.parallelism.pipeline_parallel_degree = True, 2
    args.update_from_config(config)
    assert dataclasses.asdict(args) != before
    args.update_from_config(JobConfig())
    assert dataclasses.asdict(args) == before


def test_a_trainer_that_passes_no_documents_is_an_error() -> None:
    model = build(args := model_args())
    args.takes_attention_masks = True
    with pytest.raises(ValueError, match="attention_masks is None, but the model attends within documents"):
        model(tokens())


@pytest.mark.parametrize("key", ["tensor_parallel_degree", "context_parallel_degree"])
def test_layouts_that_are_not_supported_are_an_error(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torchtitan_npu.register()
    not_absorbed = dataclasses.replace(deepseekv32_args["debugmodel"], absorb=False)
    monkeypatch.setitem(deepseekv32_args, "not_absorbed", not_absorbed)
    config = JobConfig()
    config.model.name, config.training.dataset = "deepseek_v32", "tiny_corpus"
    setattr(config.parallelism, key, 2)
    check_job(config, 2)
    config.model.flavor = "not_absorbed"
    with pytest.raises(UsageError, match=f"parallelism.{key} must be 1 for a flavor with absorb=False"):
        check_job(config, 2)
    config.dsa.stage = "warmup"  # which never absorbs
    check_job(config, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1"),
        ({"index_head_dim": 8}, "index_head_dim is 8; it must be at least qk_rope_head_dim"),
        ({"attn_type": "flex"}, "attn_type must be 'sdpa', not 'flex'"),
        ({"index_rope": "halves"}, "index_rope is 'halves'; it must be one of half, interleave"),
        *(
            ({"index_topk_pattern": text}, "index_topk_pattern is .* must start with F")
            for text in ("SF", "FX", "full")
        ),
        ({"index_topk_pattern": "FSSF"}, "index_topk_pattern has 4 letters; .* n_layers, 3"),
    ],
    ids=str,
)
def test_wrong_sizes_are_an_error(change: dict[str, Any], message: str) -> None:
    assert set(INDEX_ROPES) == set(INDEXERS)
    with pytest.raises(UsageError, match=message):
        model_args(**change)
