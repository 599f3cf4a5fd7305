"""The corpora in TorchTitan's registry: with its own loaders, from other files, without network or cache."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b'{"text": "fine"}\n{"words": "no"}\n', 'line 2: no string under "text"'),
        (b'{"text": 3}\n', 'line 1: no string under "text"'),
        (b'{"text": "fine"}\n\n{"text": "cut', "line 3: not JSON"),
    ],
)
def test_a_bad_record_is_named_with_its_key(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    key = re.escape("training.dataset_path (or validation.dataset_path)")
    with pytest.raises(UsageError, match=f"^{key} {path}, {complaint}"):
        load_texts(str(path))


events: list[tuple[str, object]] | None = None


def _record(event: str, arguments: tuple) -> None:
    writes = event == "open" and isinstance(arguments[1], str) and set("wax+") & set(arguments[1])
    if events is not None and (writes or event.startswith(("socket.", "os.mkdir"))):
        events.append((event, arguments))


sys.addaudithook(_record)  # cannot be removed; it does nothing unless a test sets ``events``


def test_nothing_is_downloaded_or_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.modules[__name__], "events", [])
    for name in ("tiny_corpus", "tiny_corpus_validation"):
        stream = text_datasets.HuggingFaceTextDataset(name, None, TOKENIZER, seq_len=64, infinite=True)
        assert len(next(iter(stream))[1]) == 64
    assert events == []
    assert load_texts(str(ASSETS / "corpus")).cache_files == []
    (tmp_path / "file").write_text("")
    assert [event for event, _ in events] == ["open"]
