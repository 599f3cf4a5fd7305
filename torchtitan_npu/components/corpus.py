"""The shipped corpus, or texts of the user's own in the same form, under names in TorchTitan's dataset registry.

``training.dataset = "tiny_corpus"`` reads ``assets/corpus/corpus.jsonl``; ``tiny_corpus_validation`` is held-out text
of the same kind. With either, ``dataset_path`` may name a file or a folder to read instead. The texts are held in
memory; nothing is fetched and no cache is written.
"""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path

from datasets import Dataset, IterableDataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_npu.errors import UsageError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
KEY = "training.dataset_path (or validation.dataset_path)"  # a loader is not told for which of them it was called


def register_datasets() -> None:
    """Make the two corpora known to TorchTitan's loaders."""
    corpus, validation = (str(ASSETS / "corpus" / name) for name in ("corpus.jsonl", "validation.jsonl"))
    DATASETS["tiny_corpus"] = DatasetConfig(corpus, load_texts, itemgetter("text"))
    DATASETS["tiny_corpus_validation"] = DatasetConfig(validation, stream_texts, itemgetter("text"))


def load_texts(path: str) -> Dataset:
    """The documents of a ``.jsonl`` file (one ``{"text": ...}`` a line), a ``.txt`` file (one) or a folder of such.

    A folder's files, those in subfolders included, come in the order of their names.
    """
    root = Path(path).expanduser()
    if not root.exists():
        raise UsageError(f"{KEY} {path}: no such file or folder")
    files = sorted(file for file in root.rglob("*") if file.suffix in READERS) if root.is_dir() else [root]
    texts = [text for file in files for text in _read(file)]
    if not texts:
        raise UsageError(f"{KEY} {path}: no documents in it (it takes {' and '.join(READERS)} files)")
    return Dataset.from_dict({"text": texts})


def stream_texts(path: str) -> IterableDataset:
    """The same as a stream: of a map-style set, TorchTitan's own validation loader has no data left the second time."""
    return load_texts(path).to_iterable_dataset()


def _read(file: Path) -> list[str]:
    if file.suffix not in READERS:
        raise UsageError(f"{KEY} {file}: not a folder, and not one of {', '.join(READERS)}")
    try:
        return READERS[file.suffix](file)
    except UnicodeDecodeError as error:
        raise UsageError(f"{KEY} {file}: not UTF-8 at byte {error.start}") from error


def _read_jsonl(file: Path) -> list[str]:
    texts = []
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                document = json.loads(line)
            except json.JSONDecodeError as error:
                raise UsageError(f"{KEY} {file}, line {number}: not JSON: {error}") from error
            text = document.get("text") if isinstance(document, dict) else None
            if not isinstance(text, str):
                raise UsageError(f'{KEY} {file}, line {number}: no string under "text"')
            texts.append(text)
    return texts


def _read_txt(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    return [text] if text else []


READERS = {".jsonl": _read_jsonl, ".txt": _read_txt}
