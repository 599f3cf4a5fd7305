"""Multi-token prediction of DeepSeek-V3.2: the report's formulas, the loss's share in the gradients, every layout."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import tempfile
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss

from tests import layouts
from tests.models.deepseek_v32_models import BATCH, SEQUENCE, VOCABULARY, build, model_args
from tests.multirank import run_on_ranks
from torchtitan_npu.auxiliary_loss import auxiliary_losses, step_means
from torchtitan_npu.config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.deepseek_v32 import DeepSeekV32Model
from torchtitan_npu.models.deepseek_v32.documents import Documents
from torchtitan_npu.train_specs import LossPerToken

WEIGHT = 0.3
FLOAT32 = torch.finfo(torch.float32).eps


def mtp_model(depths: int, **changes: Any) -> DeepSeekV32Model:
    """In float64, without the indexer's loss, which has gradients of its own."""
    args = model_args(**changes)
    args.n_mtp_layers, args.mtp_loss_weight, args.indexer_loss = depths, WEIGHT, False
    return build(args).double()


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and labels, some of which do not count."""
    stream = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(3))
    labels = stream[:, 1:].clone()
    labels[0, 4] = labels[1, -1] = IGNORE_INDEX
    return stream[:, :-1], labels


def rms_norm(x: Tensor, norm: Any) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def written_out(model: Any, tokens: Tensor) -> list[Tensor]:
    """Logits of all depths as DeepSeek-V3's report has them: at depth k of the first T - k tokens."""
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
    """By depth, the sum over the batch of -log p, of the labels that count."""
    losses = []
    for depth, of_depth in enumerate(logits):
        targets = labels[:, depth:]
        log_p = of_depth.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        losses.append(-log_p[targets != IGNORE_INDEX].sum())
    return losses


def gradients(model: DeepSeekV32Model) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("depths", [1, 2])
def test_computes_what_the_report_says(depths: int) -> None:
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

    # routing is computed in float32, of numbers that differ in the last place of float64; cross entropy too
    tolerance = 16 * FLOAT32
    assert loss.item() == pytest.approx(main.item(), rel=tolerance)
    for ours, theirs in zip([prediction.logits, *prediction.further], expected, strict=True):
        assert (ours[:, : theirs.shape[1]] - theirs).norm() <= tolerance * theirs.norm()
    assert gradients(model).keys() == trainable
    for name, grad in gradients(model).items():
        difference = (grad - expected_gradients[name]).norm() / expected_gradients[name].norm()
        assert difference <= tolerance, f"{name}: {difference:.1e}"

    (account,) = losses
    assert account.total is not None and account.name == "mtp_loss"
    assert (account.total / valid).item() == pytest.approx((sum(further) / depths / valid).item(), rel=tolerance)


def test_evaluation_does_not_run_the_further_layers() -> None:
    without, model = mtp_model(0), mtp_model(1)
    assert not model.load_state_dict(without.state_dict(), strict=False).unexpected_keys
    with torch.no_grad():
        for parameter in model.layers["3"].parameters():
            parameter.fill_(torch.nan)
        assert torch.equal(model.eval()(batch()[0]), without.eval()(batch()[0]))


def test_off_is_the_model_without_it() -> None:
    model, with_one = mtp_model(0), mtp_model(1)
    assert isinstance(model.train()(batch()[0]), Tensor)
    assert list(model.layers) == ["0", "1", "2"] and auxiliary_losses([model]) == []
    added = with_one.state_dict().keys() - model.state_dict().keys()
    assert model.state_dict().keys() <= with_one.state_dict().keys()
    assert added and all(name.startswith("layers.3.") for name in added)


def test_a_further_token_is_predicted_from_its_document() -> None:
    model = mtp_model(1)
    tokens = batch()[0].clamp(min=2)
    tokens[:, 11] = 1  # which ends the first document
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] - 1) % VOCABULARY
    with torch.no_grad():
        for documents, seen in ((Documents.of(tokens, eos_id=1), False), (None, True)):
            before, after = (model(x, attention_masks=documents).further[0][:, 12:] for x in (tokens, changed))
            difference = (before - after).norm() / before.norm()
            assert difference > 1e-3 if seen else difference <= 16 * FLOAT32


def test_every_weight_gets_a_value() -> None:
    model = mtp_model(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
        model.init_weights(torch.device("cpu"))
    assert [name for name, parameter in model.named_parameters() if parameter.isnan().any()] == []


@pytest.mark.parametrize("key", ["pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"])
def test_says_which_layout_does_not_take_it(key: str) -> None:
    config = JobConfig()
    config.mtp.layers = 1
    setattr(config.parallelism, key, 2)
    with pytest.raises(UsageError, match=f"parallelism.{key}") as error:
        model_args().update_from_config(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "names"),
    [({"layers": -1}, "mtp.layers"), ({"loss_weight": -0.5}, "mtp.loss_weight"), ({"layers": 64}, "training.seq_len")],
    ids=["layers", "loss_weight", "more layers than tokens"],
)
def test_says_which_option_is_wrong(changes: dict[str, Any], names: str) -> None:
    config = JobConfig()
    config.training.seq_len = 64
    config.mtp = dataclasses.replace(config.mtp, **changes)
    with pytest.raises(UsageError, match=names):
        model_args().update_from_config(config)


SMALLER = {
    "n_layers": 2,
    "dim": 64,
    "inter_dim": 128,
    "moe_inter_dim": 32,
    "n_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 16,
    "index_topk": 8,
}
STEPS = 3


class Record(NamedTuple):
    """What one rank saw: by step what was reported, the first step's gradients, a validation after the second step."""

    losses: list[float]
    mtp_losses: list[float]
    gradients: dict[str, Tensor]
    validation: list[float]


def train(layout: dict[str, int], options: dict[str, Any]) -> Record:
    """Train on this rank with two further tokens."""
    from torchtitan.protocols.train_spec import get_train_spec

    import torchtitan_npu.train as entry
    from torchtitan_npu.preflight import check_job

    flavors: Any = get_train_spec("deepseek_v32").model_args
    flavors["tiny"] = dataclasses.replace(copy.deepcopy(flavors["debugmodel"]), **SMALLER)
    ours = {"model.name": "deepseek_v32", "model.flavor": "tiny", "training.seq_len": 32, "mtp.layers": 2}
    config = layouts.job_config(
        "deepseek_v3", layout, {**ours, "validation.enable": True, "validation.seq_len": 32, **options}
    )
    check_job(config, int(os.environ["WORLD_SIZE"]))
    record = Record([], [], {}, [])
    with tempfile.TemporaryDirectory() as config.job.dump_folder:
        trainer = entry.Trainer(config)

        def log(step: int, loss: float, *args: Any, **kwargs: Any) -> None:
            record.losses.append(loss)
            record.mtp_losses.append(step_means(trainer.auxiliary_losses, trainer.parallel_dims)["mtp_loss"])

        def keep_gradients(*args: Any) -> None:
            if not record.gradients:
                record.gradients.update(layouts.gradients(trainer.model_parts))

        trainer.metrics_processor.log = log  # type: ignore[method-assign]
        trainer.metrics_processor.log_validation = lambda loss, step: record.validation.append(loss)
        trainer.optimizers.register_step_pre_hook(keep_gradients)
        batches = trainer.batch_generator(trainer.dataloader)
        for _ in range(STEPS):
            trainer.step += 1
            trainer.train_step(batches)
            if trainer.step == 2:  # which leaves the further layers out, and the next step must not notice
                trainer.validator.validate(trainer.model_parts, trainer.step)
        trainer.close()
    return record


def train_on(ranks: int, layout: dict[str, int], options: dict[str, Any]) -> Record:
    return run_on_ranks(ranks, train, layout, options, process_group=False)[0]


@functools.cache
def one_rank() -> Record:
    return train_on(1, {}, {})


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"shard": 2}, {"activation_checkpoint.mode": "full"}),
        ({"replicate": 2, "shard": 1}, {}),
        ({"ep": 2}, {"model.converters": ["npu_rms_norm", "npu_rope", "npu_permute", "npu_gmm"]}),
    ],
    ids=["fsdp2 and full AC", "ddp2", "ep2 and converters"],
)
def test_any_layout_gives_one_ranks_loss_and_gradients(layout: dict[str, int], options: dict[str, Any]) -> None:
    expected, actual = one_rank(), train_on(2, layout, options)
    # a model that knows nothing yet predicts a further token as badly as the next
    assert expected.mtp_losses[0] == pytest.approx(expected.losses[0], rel=0.1)
    # layouts add the same float32 numbers in another order
    tolerance = 16 * FLOAT32
    assert actual.losses == pytest.approx(expected.losses, rel=tolerance)
    assert actual.mtp_losses == pytest.approx(expected.mtp_losses, rel=tolerance)
    assert actual.validation == pytest.approx(expected.validation, rel=tolerance)
    assert actual.gradients.keys() == expected.gradients.keys()
    for name, grad in actual.gradients.items():
        difference = (grad.double() - expected.gradients[name].double()).norm() / expected.gradients[name].norm()
        # the indexer's is made of how two distributions differ that are nearly the same
        assert difference <= (4 if ".indexer." in name else 1) * tolerance, f"{name}: {difference:.1e}"
