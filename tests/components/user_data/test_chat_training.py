"""Training on conversations: the labels of answers on every model and layout, and attention within a conversation."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchtitan.components.loss import IGNORE_INDEX

from tests._helpers import layouts
from tests._helpers.multirank import run_on_ranks
from tests._helpers.training import TOLERANCE, Record, assert_same_gradients, recording, together, train_until
from torchtitan_npu.components.corpus import ASSETS
from torchtitan_npu.layers.documents import DOCUMENT_ENDS, Documents
from torchtitan_npu.prover import tiny_models
from torchtitan_npu.prover.tiny_models import TINY

CHAT = {
    "training.dataset": "chat",
    "training.dataset_path": str(ASSETS / "chat/chat.jsonl"),
    "validation.enable": True,
    "validation.dataset": "chat",
    "validation.dataset_path": str(ASSETS / "chat/validation.jsonl"),
    "data.chat_template": str(ASSETS / "chat/template.jinja"),
    "data.too_long": "truncate",
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "llama3": {"model.flavor": "llama3_documents", "model.converters": ["npu_attention"]},
    "qwen3": {"model.flavor": "qwen3_documents", "model.converters": ["npu_attention"]},
    "deepseek_v3": {"model.flavor": "deepseek_v3_documents", "model.converters": ["npu_attention"]},
    "deepseek_v32": {"dsa.document_mask": True, "dsa.indexer_loss": False},
    "qwen3_vl": {},
}
"""Models that attend within documents, and the options for it."""
LAYOUTS = [
    *(("llama3", layout) for layout in ("tp", "cp", "pp", "replicate")),
    *(("deepseek_v32", layout) for layout in ("cp", "pp")),
    ("qwen3_vl", "shard"),
]
SLOW_LAYOUTS = [("llama3", "shard"), ("deepseek_v3", "shard"), ("deepseek_v32", "tp"), ("qwen3", "tp")]
LOOSE = {"qwen3_vl": 1e-5}
"""Tolerances other than that of the layouts' tests; see tests/models/test_qwen3_vl_training.py."""


def job(model: str, layout: dict[str, int], documents: bool, options: dict[str, Any] | None = None) -> Any:
    tiny_models.add_flavors()
    named = {"model.name": TINY[model][0], "model.flavor": model}
    of_model = DOCUMENTS[model] if documents else {}
    return layouts.job_config("llama3", layout, {**named, **CHAT, **of_model, **(options or {})})


def train(
    model: str, layout: dict[str, int], documents: bool, options: dict[str, Any] | None = None, stop: int = 2
) -> Record:
    """Train on this rank up to step ``stop``, from the last checkpoint if ``options`` enable checkpoints."""
    with recording(job(model, layout, documents, options)) as (trainer, record):
        train_until(trainer, stop)
    return record


@functools.cache
def one_rank(model: str, documents: bool) -> Record:
    return run_on_ranks(1, train, model, {}, documents, process_group=False)[0]


@pytest.mark.parametrize(
    ("model", "layout"), [*LAYOUTS, *(pytest.param(*job, marks=pytest.mark.slow) for job in SLOW_LAYOUTS)]
)
def test_losses_and_gradients_of_answers_are_those_of_one_rank(model: str, layout: str) -> None:
    documents = layout != "cp" or model == "deepseek_v32"  # TorchTitan's context parallel takes no document masks
    degrees = {layout: 2} | ({"shard": 1} if layout == "replicate" else {})
    records = run_on_ranks(2, train, model, degrees, documents, process_group=False)
    record, alone = together(records), one_rank(model, documents)
    tolerance = LOOSE.get(model, TOLERANCE)
    assert record.losses == pytest.approx(alone.losses, rel=tolerance)
    assert record.validation == pytest.approx(alone.validation, rel=tolerance)
    assert len(alone.validation) == 1
    assert_same_gradients(of_text(record), of_text(alone), tolerance)


def of_text(record: Record) -> Record:
    """Return the record without the gradients of a vision tower, which are 0: conversations have no pictures."""
    vision = {name: grad for name, grad in record.gradients.items() if name.startswith("vision.")}
    assert not any(grad.any() for grad in vision.values())
    return replace(record, gradients={name: grad for name, grad in record.gradients.items() if name not in vision})


def losses_of_conversations(model: str) -> list[tuple[float, float]]:
    """Return the loss of each conversation of a batch, in its row and alone."""
    found = []
    with recording(job(model, {}, True, {"training.seq_len": 160})) as (trainer, _):  # several conversations a row
        inputs, labels = next(iter(trainer.dataloader))
        part = trainer.model_parts[0]

        def losses(batch: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
            tokens, labels, extra_inputs, extra_kwargs = trainer.post_dataloading_process(batch, labels)
            logits = part(tokens, **extra_inputs, **extra_kwargs)
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)

        with torch.no_grad():
            packed = losses(dict(inputs), labels)
            for row, (ends,) in enumerate(inputs[DOCUMENT_ENDS].split(1)):
                first = 0
                for end in Documents.from_last_tokens(ends[None]).cu_seqlens_k.integers:
                    span = (slice(row, row + 1), slice(first, end))
                    if (labels[span] != IGNORE_INDEX).any():
                        alone = losses({name: value[span] for name, value in inputs.items()}, labels[span])
                        found.append((packed[span].sum().item(), alone.sum().item()))
                    first = end
    return found


@pytest.mark.parametrize("model", DOCUMENTS)
def test_a_conversation_in_a_row_has_the_loss_that_it_has_alone(model: str) -> None:
    """Its messages end with eos tokens, and see each other. Other conversations of the row do not matter."""
    (found,) = run_on_ranks(1, losses_of_conversations, model, process_group=False)
    assert len(found) > 4  # of four rows
    for packed, alone in found:
        assert packed == pytest.approx(alone, rel=1e-5)  # angles of later positions are rounded otherwise
