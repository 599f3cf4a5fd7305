"""Layers of GLM-5 that share an indexer: its loss, and activation checkpointing of the selected keys."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import apply_ac

import torchtitan_npu
from tests._helpers.deepseek_v32_models import BATCH, SEQUENCE, TOP_K, build, counted, model_args, start_batch, tokens
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.converters import CONVERTERS
from torchtitan_npu.distributed.activation_checkpoint import CHECKPOINTING
from torchtitan_npu.layers.sparse_attention import index_scores, select
from torchtitan_npu.models.glm_moe_dsa import GlmMoeDsaModelArgs
from torchtitan_npu.titan_internals.rebind import copy_with_globals
from torchtitan_npu.torch_internals.activation_checkpoint import without_checkpoint_wrapper

torchtitan_npu.register()

PATTERN = "FSSFS"
GROUPS = ((0, 1, 2), (3, 4))
"""Layers that attend to the same keys."""
MODES = {
    "none": ActivationCheckpoint(mode="none"),
    "full": ActivationCheckpoint(mode="full"),
    "selective 2": ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    "selective op": ActivationCheckpoint(mode="selective", selective_ac_option="op"),
}


def glm(mode: str = "none", fused: bool = True, pattern: str = PATTERN, **changes: Any) -> Any:
    """Build the model in float64."""
    sizes = {"n_layers": len(pattern), "v_head_dim": 22, "num_expert_groups": None, "num_limited_groups": None}
    args = model_args(GlmMoeDsaModelArgs, index_topk_pattern=pattern, **sizes, **changes)
    model: Any = build(args).double()
    if fused:
        CONVERTERS["npu_dsa"](JobConfig(), ParallelDims(1, 1, 1, 1, 1, 1, 1, 1)).convert(model)
    if mode != "none":
        copy_with_globals(apply_ac, CHECKPOINTING)(model, MODES[mode], op_sac_save_list={torch.ops.aten.mm.default})
    start_batch(model, dtype=torch.float64)
    return model


def blocks(model: Any) -> list[Any]:
    return [without_checkpoint_wrapper(block) for block in model.layers.values()]


def loss_of(model: Any) -> Tensor:
    return F.cross_entropy(model(tokens()[:, :-1]).flatten(0, 1), tokens()[:, 1:].flatten())


def gradients(model: Any) -> dict[str, Tensor]:
    named = ((name.replace("_checkpoint_wrapped_module.", ""), p.grad) for name, p in model.named_parameters())
    return {name: gradient for name, gradient in named if gradient is not None}


def written_out_losses(model: Any, shared: bool) -> tuple[Tensor, list[Tensor]]:
    """Return the indexers' losses summed over tokens, and the divergence of each layer, by the paper's formulas.

    An indexer's loss is the divergence of its distribution over the selected keys from the mean of the attention
    distributions of its layers, or from that of its own layer.
    """
    of_layers: dict[int, dict[str, Any]] = {}

    def remember(number: int, name: str) -> Any:
        def hook(module: Any, given: Any) -> None:
            of_layers.setdefault(number, {})[name] = [x.detach() for x in given if x is not None]

        return hook

    handles = []
    for number, block in enumerate(blocks(model)):
        handles.append(block.attention.inputs.register_forward_pre_hook(remember(number, "input")))
        handles.append(block.attention.inner_attention.register_forward_pre_hook(remember(number, "projected")))
    model(tokens())
    for handle in handles:
        handle.remove()

    visible = torch.ones(1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    total, divergences = torch.zeros((), dtype=torch.float64), []
    for source, *rest in GROUPS:
        attention = blocks(model)[source].attention
        x = of_layers[source]["input"][0]
        latent = attention.q_norm(attention.wq_a(x)).detach()
        scores = index_scores(*attention.indexer(x, latent, model.freqs_cis, None))
        selected = select(scores.detach(), visible, TOP_K)
        log_indexer = scores.masked_fill(~selected, -torch.inf).log_softmax(-1)
        distributions = []
        for number in (source, *rest):
            q, q_rope, k, k_rope = of_layers[number]["projected"][:4]
            logits = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) + torch.einsum(
                "bqhd,bkd->bhqk", q_rope, k_rope[:, :, 0]
            )
            logits = (logits * attention.softmax_scale).masked_fill(~selected.unsqueeze(1), -torch.inf)
            distributions.append(logits.softmax(-1).mean(1))
        targets = torch.stack(distributions)
        for target in targets:
            divergences.append(torch.where(target > 0, target * (target.log() - log_indexer), 0).sum())
        learned = targets.mean(0) if shared else targets[0]
        total = total + torch.where(learned > 0, learned * (learned.log() - log_indexer), 0).sum()
    return total, [divergence.detach() for divergence in divergences]


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "npu_dsa"])
@pytest.mark.parametrize("shared", [True, False], ids=["of all layers", "of its own layer"])
def test_an_indexer_learns_the_mean_attention_of_its_layers(shared: bool, fused: bool) -> None:
    model = glm(fused=fused, shared_indexer_loss=shared)
    total, divergences = written_out_losses(model, shared)
    indexers = {name: p for name, p in model.named_parameters() if ".indexer." in name}
    expected = torch.autograd.grad(total / (BATCH * SEQUENCE), list(indexers.values()))
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()
    for name, gradient in zip(indexers, expected, strict=True):
        ours = indexers[name].grad
        # sums of some hundred terms in float64; a gradient is the difference of two distributions
        assert ours is not None and (ours - gradient).norm() <= 1e-11 * gradient.norm(), name
    counts = divergences if shared else [divergences[0], divergences[3]]
    assert counted(model) == pytest.approx(sum(map(float, counts)) / len(counts) / (BATCH * SEQUENCE), rel=1e-12)


def test_layers_without_an_indexer_do_not_change_others_gradients() -> None:
    """The loss trains indexers only, whoever takes part in it."""
    models = glm(shared_indexer_loss=True), glm(shared_indexer_loss=False), glm(indexer_loss=False)
    for model in models:
        loss_of(model).backward()
    shared, own, without = map(gradients, models)
    for name, gradient in without.items():
        assert torch.equal(shared[name], gradient) and torch.equal(own[name], gradient), name
    assert {name for name in shared if name not in without} == {name for name in shared if ".indexer." in name}


@pytest.mark.parametrize("pattern", [PATTERN, "FFS"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [False, True], ids=["eager", "npu_dsa"])
def test_a_recomputed_layer_attends_to_the_keys_of_its_forward(fused: bool, mode: str, pattern: str) -> None:
    """Indexers that select other keys after the forward change no gradient, as if a kernel were not deterministic.

    This holds for indexers that are shared. The first of "FFS" is not: its keys would need memory of their own.
    """
    expected, model = (glm(m, fused=fused, pattern=pattern, indexer_loss=False) for m in ("none", mode))
    loss_of(expected).backward()
    loss = loss_of(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for block in blocks(model):
            if block.attention.indexer is not None and block.attention.passed:
                block.attention.indexer.weights_proj.weight.normal_()
    loss.backward()
    ours = gradients(model)
    assert ours.keys() == gradients(expected).keys()
    for name, gradient in gradients(expected).items():
        assert torch.equal(ours[name], gradient), name


@pytest.mark.parametrize(
    ("changes", "passed"),
    [({"shared_indexer_loss": True}, 4), ({"shared_indexer_loss": False}, 1), ({"indexer_loss": False}, 1)],
    ids=str,
)
def test_a_stage_passes_on_one_tensor_of_keys(changes: dict[str, Any], passed: int) -> None:
    """With the shared loss, it also passes on the indexer's three tensors."""
    model = glm(**changes)
    for layer in ("2", "3", "4"):
        del model.layers[layer]
    model.norm = model.output = None
    hidden, keys, *index = model(tokens())
    assert hidden.shape == (BATCH, SEQUENCE, model.model_args.dim) and hidden.dtype == torch.float64
    assert keys.shape == (BATCH, SEQUENCE, 1, TOP_K) and keys.dtype == torch.int32 and not keys.requires_grad
    assert len(index) == passed - 1 and all(x.is_floating_point() and x.requires_grad for x in index)
    del model.layers["1"], model.layers["0"]
    model.tok_embeddings = None
    model.layers["4"] = blocks(glm(**changes))[4]  # the last layer of a group shares nothing
    assert isinstance(model(hidden, keys, *index), Tensor)


@contextmanager
def references(model: Any) -> Iterator[list[weakref.ref[Tensor]]]:
    """Collect references to everything that layers share, in the forward pass and in recomputations."""
    found: list[weakref.ref[Tensor]] = []

    def hook(block: Any, given: Any, output: Any) -> None:
        if isinstance(output, tuple):
            found.extend(map(weakref.ref, output[1:]))

    handles = [block.register_forward_hook(hook) for block in blocks(model)]
    gc.collect()
    gc.disable()  # references must not depend on the collector
    yield found
    gc.enable()
    for handle in handles:
        handle.remove()


def alive(found: list[weakref.ref[Tensor]]) -> int:
    return sum(reference() is not None for reference in found)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_shared_outlives_its_microbatch(mode: str) -> None:
    model = glm(mode)
    with references(model) as found:
        first = loss_of(model)
        of_first = list(found)
        second = loss_of(model)
        assert len(of_first) == 3 * 4  # three layers pass on the selected keys and three tensors of the indexer
        first.backward()
        del first
        assert alive(of_first) == 0
        assert alive(found[len(of_first) :]) > 0  # the second microbatch has its own
        second.backward()
        del second
        assert alive(found) == 0
        unused = loss_of(model)
        del unused
        assert alive(found) == 0
