"""The corpora in TorchTitan's registry: with its own loaders, from other files, without network or cache."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import text_datasets

from torchtitan_npu.components.corpus import ASSETS, load_texts
from torchtitan_npu.errors import UsageError

TOKENIZER = HuggingFaceTokenizer(str(ASSETS / "tokenizer"))


def test_upstream_training_loader_reads_the_corpus() -> None:
    config = JobConfig()
    config.training.dataset, config.training.seq_len, config.training.local_batch_size = "tiny_corpus", 64, 3
    inputs, labels = next(iter(text_datasets.build_text_dataloader(2, 1, TOKENIZER, config)))
    assert inputs["input"].shape == labels.shape == (3, 64)
    assert inputs["input"][:, 1:].equal(labels[:, :-1])


def test_upstream_validation_loader_reads_the_held_out_text_more_than_once() -> None:
    config = JobConfig()
    config.validation.dataset, config.validation.seq_len = "tiny_corpus_validation", 512
    loader = text_datasets.build_text_validation_dataloader(1, 0, TOKENIZER, config)
    assert sum(1 for _ in loader) == sum(1 for _ in loader) > 0


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n\n{"text": "third", "source": "here"}\n')
    (tmp_path / "a.txt").write_text("first,\n\nof two paragraphs\n")
    (tmp_path / "sub" / "c.txt").write_text("fourth: ünïcödé\n", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not read")
    wanted = ["first,\n\nof two paragraphs\n", "second", "third", "fourth: ünïcödé\n"]
    assert load_texts(str(tmp_path))["text"][:] == wanted
    assert load_texts(str(tmp_path / "b.jsonl"))["text"][:] == ["second", "third"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", b'{"text": "fine"}\n{"words": "no"}\n', 'a.jsonl, line 2: no string under "text"'),
        ("a.jsonl", b'{"text": 3}\n', 'a.jsonl, line 1: no string under "text"'),
        ("a.jsonl", b'["text"]\n', 'a.jsonl, line 1: no string under "text"'),
        ("a.jsonl", b'{"text": "fine"}\n\n{"text": "cut', "a.jsonl, line 3: not JSON"),
        ("a.jsonl", b"", "contains no documents"),
        ("a.txt", b"", "contains no documents"),
        ("a.txt", b"abc\xff", "not UTF-8 at byte 3"),
        ("a.csv", b"text\nfine\n", "not one of .jsonl, .txt"),
    ],
)
def test_a_bad_file_is_named_with_its_key(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        load_texts(str(path))
    assert str(error.value).startswith("training.dataset_path")
    assert str(path) in str(error.value)
    assert complaint in str(error.value)


def test_a_missing_path_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"training\.dataset_path .*/nowhere: no such file or folder"):
        load_texts(str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="contains no documents"):
        load_texts(str(tmp_path))


events: list[tuple[str, object]] | None = None


def _record(event: str, arguments: tuple) -> None:
    writes = event == "open" and isinstance(arguments[1], str) and set("wax+") & set(arguments[1])
    if events is not None and (writes or event.startswith(("socket.", "os.mkdir"))):
        events.append((event, arguments))


sys.addaudithook(_record)  # cannot be removed; it does nothing unless a test sets ``events``


def test_nothing_is_downloaded_or_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "events", [])
    for name in ("tiny_corpus", "tiny_corpus_validation"):
        stream = text_datasets.HuggingFaceTextDataset(name, None, TOKENIZER, seq_len=64, infinite=True)
        assert len(next(iter(stream))[1]) == 64
    assert events == []
    assert load_texts(str(ASSETS / "corpus")).cache_files == []


def test_the_audit_hook_records_a_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules[__name__], "events", [])
    (tmp_path / "file").write_text("")
    assert [event for event, _ in events] == ["open"]
