"""The shipped corpus in TorchTitan's dataset registry.

``training.dataset = "tiny_corpus"`` reads ``assets/corpus/corpus.jsonl``; ``tiny_corpus_validation`` is held-out text
of the same kind. With either, ``dataset_path`` may name a file or a folder of the user to read instead. The texts are
held in memory; nothing is downloaded and no cache is written.
"""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

from datasets import Dataset, IterableDataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_npu.components.user_data.files import BadRecord, RecordFile, open_files
from torchtitan_npu.errors import UsageError

ASSETS = Path(__file__).resolve().parent.parent / "assets"
KEY = "training.dataset_path (or validation.dataset_path)"  # TorchTitan does not pass the section to a loader


def text_files(path: str, key: str = KEY) -> list[RecordFile]:
    """Return the files of ``path``, in which a ``.txt`` file is one document. Raise :class:`UsageError` if none."""
    return open_files(path, ["text"], "file", key)


def load_texts(path: str) -> Dataset:
    """Load the documents of the :func:`text_files`."""
    texts = []
    for file in text_files(path):
        for block in range(len(file.sizes)):
            for number, raw in enumerate(file.read(block)):
                try:
                    text = file.decode(raw).get("text")
                    if not isinstance(text, str):
                        raise BadRecord('no string under "text"')
                except BadRecord as error:
                    raise UsageError(f"{KEY} {file.location(block, number)}: {error}") from error
                texts.append(text)
    return Dataset.from_dict({"text": texts})


def stream_texts(path: str) -> IterableDataset:
    """Load the documents as a stream: TorchTitan's validation loader can read a map-style dataset only once."""
    return load_texts(path).to_iterable_dataset()


DATASETS["tiny_corpus"] = DatasetConfig(str(ASSETS / "corpus/corpus.jsonl"), load_texts, itemgetter("text"))
DATASETS["tiny_corpus_validation"] = DatasetConfig(
    str(ASSETS / "corpus/validation.jsonl"), stream_texts, itemgetter("text")
)
