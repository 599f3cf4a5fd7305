"""Multi-token prediction of DeepSeek-V3.2: the report's formulas, the loss weight, every layout."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss

from tests._helpers.deepseek_v32_models import BATCH, SEQUENCE, VOCABULARY, build, model_args
from tests._helpers.deepseek_v32_training import CONVERTERS, train_on
from tests._helpers.training import TOLERANCE, Record, assert_same_gradients
from torchtitan_npu.components.loss import LossPerToken
from torchtitan_npu.layers.auxiliary_loss import auxiliary_losses
from torchtitan_npu.layers.documents import Documents
from torchtitan_npu.models.deepseek_v32 import DeepSeekV32Model

WEIGHT = 0.3


def mtp_model(depths: int, **changes: Any) -> DeepSeekV32Model:
    """Build the model in float64, without the indexer's loss, which has other gradients."""
    args = model_args(**changes)
    args.n_mtp_layers, args.mtp_loss_weight, args.indexer_loss = depths, WEIGHT, False
    return build(args).double()


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and labels, some of which are ignored."""
    stream = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))
    labels = stream[:, 1:].clone()
    labels[0, 4] = labels[1, -1] = IGNORE_INDEX
    return stream[:, :-1], labels


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def written_out(model: Any, tokens: Tensor) -> list[Tensor]:
    """Return the logits of all depths by the formulas of DeepSeek-V3's report: depth k has the first T - k tokens."""
    embeddings = F.embedding(tokens, model.tok_embeddings.weight)
    h = embeddings
    for layer in range(model.model_args.n_layers):
        h = model.layers[str(layer)](h, model.freqs_cis, None, None)
    logits = [rms_norm(h, model.norm) @ model.output.weight.T]
    for depth in range(1, model.model_args.n_mtp_layers + 1):
        block = model.layers[str(model.model_args.n_layers + depth - 1)]
        of_token, of_state = rms_norm(embeddings[:, depth:], block.enorm), rms_norm(h[:, :-1], block.hnorm)
        x = torch.cat([of_token, of_state], dim=-1) @ block.eh_proj.weight.T
        x = x + block.attention(rms_norm(x, block.attention_norm), model.freqs_cis, None, None)
        h = x + block.moe(rms_norm(x, block.ffn_norm))
        logits.append(rms_norm(h, block.final_norm) @ model.output.weight.T)
    return logits


def written_out_losses(logits: list[Tensor], labels: Tensor) -> list[Tensor]:
    """Return for each depth the sum of -log p over the labels that are not ignored."""
    losses = []
    for depth, of_depth in enumerate(logits):
        targets = labels[:, depth:]
        log_p = of_depth.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        losses.append(-log_p[targets != IGNORE_INDEX].sum())
    return losses


def gradients(model: DeepSeekV32Model) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("depths", [1, 2])
def test_computes_the_formulas_of_the_report(depths: int) -> None:
    model = mtp_model(depths)
    tokens, labels = batch()
    valid = (labels != IGNORE_INDEX).sum()

    expected = written_out(model, tokens)
    main, *further = written_out_losses(expected, labels)
    ((main + WEIGHT / depths * sum(further)) / valid).backward()
    expected_gradients = {name: grad.clone() for name, grad in gradients(model).items()}
    trainable = {name for name, _ in model.named_parameters() if ".indexer." not in name}
    assert expected_gradients.keys() == trainable

    model.zero_grad()
    losses = auxiliary_losses([model])
    for loss in losses:
        loss.start_step()
        loss.start_batch(valid.double())
    prediction: Any = model(tokens)
    loss = LossPerToken(cross_entropy_loss)(prediction, labels)
    (loss / valid).backward()

    # routing and cross entropy are float32, on inputs that differ in the last place of float64
    assert loss.item() == pytest.approx(main.item(), rel=TOLERANCE)
    for ours, theirs in zip([prediction.logits, *prediction.mtp_logits], expected, strict=True):
        assert (ours[:, : theirs.shape[1]] - theirs).norm() <= TOLERANCE * theirs.norm()
    assert gradients(model).keys() == trainable
    for name, grad in gradients(model).items():
        difference = (grad - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert difference <= TOLERANCE, f"{name}: {difference:.1e}"

    (aux_loss,) = losses
    assert aux_loss.total is not None and aux_loss.name == "mtp_loss"
    assert (aux_loss.total / valid).item() == pytest.approx((sum(further) / depths / valid).item(), rel=TOLERANCE)


def test_evaluation_does_not_run_the_further_layers() -> None:
    without, model = mtp_model(0), mtp_model(1)
    assert not model.load_state_dict(without.state_dict(), strict=False).unexpected_keys
    with torch.no_grad():
        for parameter in model.layers["3"].parameters():
            parameter.fill_(torch.nan)
        assert torch.equal(model.eval()(batch()[0]), without.eval()(batch()[0]))


def test_no_layers_is_the_model_without_it() -> None:
    model, with_one = mtp_model(0), mtp_model(1)
    assert isinstance(model.train()(batch()[0]), Tensor)
    assert list(model.layers) == ["0", "1", "2"] and auxiliary_losses([model]) == []
    added = with_one.state_dict().keys() - model.state_dict().keys()
    assert model.state_dict().keys() <= with_one.state_dict().keys()
    assert added and all(name.startswith("layers.3.") for name in added)


def test_a_further_token_is_predicted_from_its_document() -> None:
    model = mtp_model(1)
    tokens = batch()[0].clamp(min=2)
    tokens[:, 11] = 1  # the end of the first document
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] - 1) % VOCABULARY
    with torch.no_grad():
        for documents, seen in ((Documents.from_tokens(tokens, eos_id=1), False), (None, True)):
            before, after = (model(x, attention_masks=documents).mtp_logits[0][:, 12:] for x in (tokens, changed))
            difference = (before - after).norm() / before.norm()
            assert difference > 1e-3 if seen else difference <= TOLERANCE


def test_every_weight_gets_a_value() -> None:
    model = mtp_model(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.init_weights(torch.device("cpu"))
    assert [name for name, parameter in model.named_parameters() if parameter.isnan().any()] == []


STEPS = 3
MTP = {"mtp.layers": 2, "validation.enable": True, "optimizer.lr": 8e-4}
"""The validation after the first step skips the further layers, and must not affect the next steps."""


@functools.cache
def one_rank() -> Record:
    return train_on(1, {}, MTP, STEPS)[0]


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        pytest.param({"shard": 2}, {"activation_checkpoint.mode": "full"}, marks=pytest.mark.slow),
        ({"replicate": 2, "shard": 1}, {}),
        pytest.param({"ep": 2}, {"model.converters": CONVERTERS}, marks=pytest.mark.slow),
    ],
    ids=["fsdp2 and full AC", "ddp2", "ep2 and converters"],
)
def test_any_layout_gives_one_ranks_loss_and_gradients(layout: dict[str, int], options: dict[str, Any]) -> None:
    expected, actual = one_rank(), train_on(2, layout, {**MTP, **options}, STEPS)[0]
    # an untrained model predicts further tokens as badly as the next one
    assert expected.mtp_losses[0] == pytest.approx(expected.losses[0], rel=0.1)
    assert actual.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert actual.mtp_losses == pytest.approx(expected.mtp_losses, rel=TOLERANCE)
    assert len(expected.validation) == 1 and actual.validation == pytest.approx(expected.validation, rel=TOLERANCE)
    # the indexer's gradient is a difference of two distributions, 4 to 6 times longer than the difference itself: one
    # unit in their last place is as many in its own, of the 16 that are allowed (up to 6 over 8 seeds)
    assert_same_gradients(actual, expected)
