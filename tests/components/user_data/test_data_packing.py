"""Rows of texts and conversations: TorchTitan's rows, the same on every layout, resumed anywhere, and errors."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.hf_datasets import text_datasets

from torchtitan_npu.components.corpus import ASSETS
from torchtitan_npu.components.dataloader import build_text_dataloader, build_text_validation_dataloader
from torchtitan_npu.components.user_data.documents import ChatEncoder, load_chat_template
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import DOCUMENT_ENDS, positions_in_documents

TOKENIZER = HuggingFaceTokenizer(str(ASSETS / "tokenizer"))
TEMPLATE = str(ASSETS / "chat/template.jinja")
GLOBAL_BATCH = 12
LAYOUTS = [(1, 1), (1, 12), (2, 3), (3, 2), (4, 3), (6, 1)]
"""Data-parallel degree and local batch size; the remaining part of the global batch is accumulated."""


def job(dataset: str, path: str | list[str], **options: Any) -> JobConfig:
    """Return a job on ``dataset``. Options are keys of ``[data]``, or ``section__key``."""
    config = JobConfig()
    config.training.dataset, config.training.seq_len, config.training.local_batch_size = dataset, 64, 1
    if isinstance(path, list):
        config.data.paths = path
    else:
        config.training.dataset_path = path
    if dataset == "chat":
        config.model.hf_assets_path, config.data.chat_template = str(ASSETS / "tokenizer"), TEMPLATE
        config.training.seq_len = 128
    for name, value in options.items():
        section, _, key = name.rpartition("__")
        target: Any = config.training.dataloader if section == "dataloader" else getattr(config, section or "data")
        assert hasattr(target, key), name
        setattr(target, key, value)
    return config


def loaders(config: JobConfig, dp: int, local: int, infinite: bool = True) -> list[Any]:
    config.training.local_batch_size = local
    return [build_text_dataloader(dp, rank, TOKENIZER, config, infinite) for rank in range(dp)]


def rows(loader: Any, count: int | None = None) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Return the rows of a loader, each as a batch of one."""
    found: list[Any] = []
    for inputs, labels in loader:
        found += [({name: t[None] for name, t in zip(inputs, row[:-1], strict=True)}, row[-1][None])
                  for row in zip(*inputs.values(), labels, strict=True)]  # fmt: skip
        if count is not None and len(found) >= count:
            return found[:count]
    return found


def stacked(batches: list[tuple[dict[str, Tensor], Tensor]]) -> Tensor:
    """Return everything in batches, (rows, entries of a row)."""
    return torch.cat([torch.cat([*inputs.values(), labels], dim=1) for inputs, labels in batches])


def step(iterators: list[Iterator[Any]]) -> Tensor:
    """Return the rows of one optimizer step over all ranks."""
    batches = []
    while sum(len(labels) for _, labels in batches) < GLOBAL_BATCH:
        batches += [next(iterator) for iterator in iterators]
    return stacked(batches)


CORPUS = str(ASSETS / "corpus/corpus.jsonl")
JOBS: dict[str, Any] = {
    "text": ("text", CORPUS, {}),
    "text in order": ("text", CORPUS, {"shuffle": False}),
    "mixture": ("text", [CORPUS, str(ASSETS / "corpus/validation.jsonl")], {"weights": [1.0, 2.0]}),
    "chat": ("chat", str(ASSETS / "chat/chat.jsonl"), {}),
}


def named_job(name: str, **options: Any) -> JobConfig:
    dataset, path, own = JOBS[name]
    return job(dataset, path, **own, **options)


@pytest.mark.parametrize("seq_len", [64, 1000])
def test_texts_in_order_are_torchtitans_rows(seq_len: int) -> None:
    independent = loaders(job("text", CORPUS, shuffle=False, training__seq_len=seq_len), 1, 1, infinite=False)[0]
    titan = text_datasets.HuggingFaceTextDataset("tiny_corpus", None, TOKENIZER, seq_len)
    expected = [({"input": inputs["input"][None]}, labels[None]) for inputs, labels in titan]
    assert stacked(rows(independent)).equal(stacked(expected))


@pytest.mark.parametrize("name", JOBS)
@settings(deadline=None, max_examples=6)
@given(before=st.sampled_from(LAYOUTS), after=st.sampled_from(LAYOUTS), steps=st.integers(0, 4), workers=st.booleans())
def test_a_job_resumes_on_another_layout(
    name: str, before: tuple[int, int], after: tuple[int, int], steps: int, workers: bool
) -> None:
    expected = stacked(rows(*loaders(named_job(name), 1, 1), count=(steps + 3) * GLOBAL_BATCH))
    saved = loaders(named_job(name), *before)
    iterators = [iter(loader) for loader in saved]
    seen = [step(iterators) for _ in range(steps)]
    states = [loader.state_dict() for loader in saved]
    assert all(state == states[0] for state in states)
    step(iterators)  # further training must not change the saved state
    resumed = loaders(named_job(name, dataloader__num_workers=2), 1, 2) if workers else loaders(named_job(name), *after)
    for loader in resumed:
        loader.load_state_dict(states[-1])
    iterators = [iter(loader) for loader in resumed]
    assert torch.cat([*seen, *(step(iterators) for _ in range(3))]).equal(expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_all_rows_once_without_repetition(workers: int) -> None:
    config = named_job("chat", dataloader__num_workers=workers)
    once = rows(*loaders(config, 1, 1, infinite=False))
    labels = sum(int((labels != IGNORE_INDEX).sum()) for _, labels in once)
    encoder = ChatEncoder(TOKENIZER, "messages", load_chat_template(str(ASSETS / "tokenizer"), TEMPLATE))
    lines = (ASSETS / "chat/chat.jsonl").read_text().splitlines()
    assert labels == sum(int(encoder.encode(json.loads(line)).is_learned.sum()) for line in lines)  # type: ignore[union-attr]
    (loader,) = loaders(config, 1, 1, infinite=False)
    assert len(rows(loader)) == len(rows(loader)) == len(once)  # after the end it restarts


def test_rows_of_conversations() -> None:
    """A row has complete conversations of the file, in order, each with the labels of its answers, and padding."""
    encoder = ChatEncoder(TOKENIZER, "messages", load_chat_template(str(ASSETS / "tokenizer"), TEMPLATE))
    lines = (ASSETS / "chat/chat.jsonl").read_text().splitlines()
    waiting = iter([encoder.encode(json.loads(line)) for line in lines])
    following = next(waiting, None)
    for inputs, labels in rows(*loaders(named_job("chat", shuffle=False), 1, 1, infinite=False)):
        first = 0
        while following is not None and first + len(following.tokens) - 1 <= 128:
            tokens, is_learned = torch.from_numpy(following.tokens).long(), torch.from_numpy(following.is_learned)
            part = slice(first, first + len(tokens) - 1)
            assert inputs["input"][0, part].equal(tokens[:-1])
            assert labels[0, part].equal(tokens[1:].where(is_learned[1:], torch.tensor(IGNORE_INDEX)))
            positions = positions_in_documents(inputs[DOCUMENT_ENDS])[0, part]
            assert positions.equal(torch.arange(len(tokens) - 1))
            first, following = part.stop, next(waiting, None)
        assert first > 0
        assert (labels[0, first:] == IGNORE_INDEX).all() and (inputs["input"][0, first:] == TOKENIZER.eos_id).all()
        assert inputs[DOCUMENT_ENDS][0, first:].sum() == (first < 128)
    assert following is None


def test_validation_data_is_not_shuffled_and_the_same_every_time() -> None:
    config = named_job("text")
    config.validation.dataset, config.validation.dataset_path, config.validation.seq_len = "text", CORPUS, 64
    config.validation.local_batch_size = 2
    loader = build_text_validation_dataloader(1, 0, TOKENIZER, config, True)
    expected = stacked(rows(*loaders(named_job("text in order"), 1, 1), count=6))
    for _ in range(2):
        assert stacked([*islice(loader, 3)]).equal(expected)


def test_a_position_in_other_data_is_an_error(tmp_path: Path) -> None:
    state = loaders(named_job("text"), 1, 1)[0].state_dict()
    for config in (named_job("text", seed=1), named_job("text in order"), named_job("mixture"), named_job("chat")):
        with pytest.raises(
            UsageError,
            match=r"a position in text, field 'text', \d+ bytes in 1 files, .*, the job reads .*exclude_from",
        ):
            loaders(config, 1, 1)[0].load_state_dict(state)


BAD = '{"text": "fine"}\n{"text": 3}\n{"text": "fine too"}\n{"te\n'


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_record_is_named_or_skipped(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(BAD)
    options = {"shuffle": False, "training__seq_len": 2, "dataloader__num_workers": workers}
    with pytest.raises(UsageError, match=r'a\.jsonl, line 2: no string under "text" \(data\.bad_records = "skip"'):
        rows(*loaders(job("text", str(path), **options), 1, 1, infinite=False))
    with caplog.at_level(logging.INFO):
        skipping = rows(*loaders(job("text", str(path), bad_records="skip", **options), 1, 1, infinite=False))
    messages = [record.message for record in caplog.records if "Skipped" in record.message]
    assert len(messages) == 2 and "line 2: no string" in messages[0] and "line 4: not JSON" in messages[1]
    path.write_text('{"text": "fine"}\n{"text": "fine too"}\n')
    expected = rows(*loaders(job("text", str(path), **options), 1, 1, infinite=False))
    assert stacked(skipping).equal(stacked(expected))


def test_data_without_a_record_to_use_is_an_error_and_not_endless(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "x"}\n' * 3)
    with pytest.raises(UsageError, match=r"a\.jsonl: not one record can be used; 6 were skipped"):
        rows(*loaders(job("text", str(path), bad_records="skip"), 1, 1), count=1)
    long = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "word " * 40}]
    path.write_text(json.dumps({"messages": long}))
    with pytest.raises(UsageError, match=r"a\.jsonl: not one record can be used; 2 were skipped"):
        rows(*loaders(job("chat", str(path), too_long="skip", training__seq_len=24), 1, 1), count=1)


def test_a_bad_first_record_is_found_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"body": "x"}\n{"text": "fine"}\n')
    with pytest.raises(UsageError, match=r'a\.jsonl, line 2: no string under "text"'):
        loaders(job("text", str(path)), 1, 1)
    loaders(job("text", str(path), bad_records="skip"), 1, 1)
    path.write_text("\n\n")
    with pytest.raises(UsageError, match=r"a\.jsonl: contains no documents"):
        loaders(job("text", str(path)), 1, 1)


def test_conversations_that_are_longer_than_a_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    answers = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "word " * 40}]
    questions = [{"role": "user", "content": "word " * 40}, {"role": "assistant", "content": "end"}]
    short = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "end"}]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (short, answers, questions, short)))
    options = {"shuffle": False, "training__seq_len": 24}
    with pytest.raises(UsageError, match=r"a\.jsonl, line 2: \d+ tokens, and a row has room for 25: raise seq_len"):
        rows(*loaders(job("chat", str(path), **options), 1, 1, infinite=False))
    skipped, cut = (
        rows(*loaders(job("chat", str(path), too_long=how, **options), 1, 1, infinite=False))
        for how in ("skip", "truncate")
    )
    assert len(skipped) == 2 and len(cut) == 3  # only the conversation with a label in its first tokens is cut
    assert (cut[1][1] != IGNORE_INDEX).sum() > 12


def test_memory_of_a_position_does_not_grow() -> None:
    (loader,) = loaders(named_job("mixture"), 1, 1)
    sizes = []
    for number, _ in enumerate(loader):
        sizes.append(len(loader.state_dict()["layout_independent_data"]))
        if number == 200:
            break
    assert max(sizes) < 500
