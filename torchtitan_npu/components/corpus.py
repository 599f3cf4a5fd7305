"""Load the shipped corpus, or the user's own texts in the same format, from files.

``training.dataset = "tiny_corpus"`` reads ``assets/corpus/corpus.jsonl``; ``tiny_corpus_validation`` is held-out text
of the same kind. With either, ``dataset_path`` may name a file or a folder to read instead. The texts are held in
memory; nothing is downloaded and no cache is written.

Importing this module adds both names to TorchTitan's dataset registry.
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
KEY = "training.dataset_path (or validation.dataset_path)"  # TorchTitan does not pass the section to a loader


def text_files(path: str, key: str = KEY) -> list[Path]:
    """Return the file ``path``, or the ``.jsonl`` and ``.txt`` files in that folder and its subfolders, by name."""
    root = Path(path).expanduser()
    if not root.exists():
        raise UsageError(f"{key} {path}: no such file or folder")
    files = sorted(file for file in root.rglob("*") if file.suffix in READERS) if root.is_dir() else [root]
    for file in files:
        if file.suffix not in READERS:
            raise UsageError(f"{key} {file}: not a folder, and not one of {', '.join(READERS)}")
    return files


def load_texts(path: str) -> Dataset:
    """Load the documents of the :func:`text_files`: one ``{"text": ...}`` a line of ``.jsonl``, one a ``.txt`` file."""
    texts = [text for file in text_files(path) for text in _read(file)]
    if not texts:
        raise UsageError(f"{KEY} {path}: contains no documents (it reads {' and '.join(READERS)} files)")
    return Dataset.from_dict({"text": texts})


def stream_texts(path: str) -> IterableDataset:
    """Load the documents as a stream: TorchTitan's validation loader can read a map-style dataset only once."""
    return load_texts(path).to_iterable_dataset()


def _read(file: Path) -> list[str]:
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

DATASETS["tiny_corpus"] = DatasetConfig(str(ASSETS / "corpus/corpus.jsonl"), load_texts, itemgetter("text"))
DATASETS["tiny_corpus_validation"] = DatasetConfig(
    str(ASSETS / "corpus/validation.jsonl"), stream_texts, itemgetter("text")
)
