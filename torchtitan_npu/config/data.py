"""Section ``[data]``: the user's own texts and conversations, the datasets ``text`` and ``chat``."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Literal

from torchtitan_npu.config.allowed import LINE, PATH, Allowed, FilePath, ListOf, Number

DATA_SECTION: dict[str, Allowed] = {
    "paths": ListOf(PATH),
    "weights": ListOf(Number(0, 10**6, above=True)),
    "field": LINE,
    "seed": Number(0, 2**63 - 1),
    "shuffle_window_mib": Number(1, 2**20),
    "chat_template": FilePath(or_empty=True),
}
USER_DATASETS = ("text", "chat")
"""The values of ``training.dataset`` and ``validation.dataset`` that this section is for."""


@dataclass
class Data:
    """The user's own texts (`training.dataset = "text"`) and conversations (`"chat"`)."""

    paths: list[str] = dataclass_field(default_factory=list)
    """Files and folders of training data, in place of `training.dataset_path`. See [Train on your
    data](../how-to/data.md)."""

    weights: list[float] = dataclass_field(default_factory=list)
    """Shares of the paths in the characters that training reads, of any sum. Every path starts again after its end.
    Empty: the paths are one set, each record of which is read once per epoch."""

    field: str = ""
    """Field of a JSON object, or column, with the data. Empty: `text`, or for conversations `messages`."""

    txt_documents: Literal["file", "paragraph", "line"] = "file"
    """What is a document in a `.txt` file: the file, of at most 64 MiB; a paragraph, up to a blank line; or a line."""

    shuffle: bool = True
    """Shuffle the training data, in another order in every epoch. If false, it is read in the order of the files."""

    seed: int = 0
    """Seed of the shuffled order. It does not depend on `debug.seed`."""

    shuffle_window_mib: int = 64
    """Blocks of 1 MiB are shuffled, and then the records in as many blocks as this. Every worker process of every rank
    has a window of each path with a weight in memory."""

    bad_records: Literal["error", "skip"] = "error"
    """For a line or row that cannot be used: an error with its file and number, or a count of skipped records."""

    chat_template: str = ""
    """File with the Jinja template of conversations. Empty: the template of the tokenizer."""

    too_long: Literal["error", "skip", "truncate"] = "error"
    """For a conversation with more tokens than a row: an error with its file and number, or skip it, or cut its end
    off."""
