"""Section ``[data]``: the user's own texts and conversations, the datasets ``text`` and ``chat``."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, Literal

from torchtitan_npu.config.allowed import LINE, PATH, Allowed, FilePath, ListOf, Number
from torchtitan_npu.config.check_helpers import check_adapted
from torchtitan_npu.errors import UsageError

if TYPE_CHECKING:
    from torchtitan_npu.config.preflight import JobContext

ALLOWED: dict[str, Allowed] = {
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
    """
    Files and folders of training data, in place of `training.dataset_path`. See
    [Train on your data](../how-to/data.md).
    """

    weights: list[float] = dataclass_field(default_factory=list)
    """
    Shares of the paths in the characters that training reads, of any sum. Every path starts again after its end.
    Empty: the paths are one set, each record of which is read once per epoch.
    """

    field: str = ""
    """
    Field of a JSON object, or column, with the data. Empty: `text`, or for conversations `messages`.
    """

    txt_documents: Literal["file", "paragraph", "line"] = "file"
    """
    What is a document in a `.txt` file: the file, of at most 64 MiB; a paragraph, up to a blank line; or a line.
    """

    shuffle: bool = True
    """
    Shuffle the training data, in another order in every epoch. If false, it is read in the order of the files.
    """

    seed: int = 0
    """
    Seed of the shuffled order. It does not depend on `debug.seed`.
    """

    shuffle_window_mib: int = 64
    """
    Blocks of 1 MiB are shuffled, and then the records in as many blocks as this. Every worker process of every rank
    has a window of each path with a weight in memory.
    """

    bad_records: Literal["error", "skip"] = "error"
    """
    For a line or row that cannot be used: an error with its file and number, or a count of skipped records.
    """

    chat_template: str = ""
    """
    File with the Jinja template of conversations. Empty: the template of the tokenizer.
    """

    too_long: Literal["error", "skip", "truncate"] = "error"
    """
    For a conversation with more tokens than a row: an error with its file and number, or skip it, or cut its end off.
    """


def check_data(job: "JobContext") -> None:
    """Check the section against the datasets that the job reads."""
    data, config = job.config.data, job.config
    sections: dict[str, Any] = {"training": config.training}
    if config.validation.enable:
        sections["validation"] = config.validation
    datasets = {name: section.dataset.lower() for name, section in sections.items()}
    used = {name: dataset for name, dataset in datasets.items() if dataset in USER_DATASETS}
    if not used:
        if data != Data():
            raise UsageError(
                f'[data] is for training.dataset "text" or "chat", not {config.training.dataset!r}: remove the section'
            )
        return
    for name, dataset in used.items():
        check_adapted(job, f"{name}.dataset {dataset!r}")
        if not config.npu.layout_independent_data:
            raise UsageError(f"npu.layout_independent_data must be true with {name}.dataset {dataset!r}")
    _check_paths(data, datasets, config)
    only = {"chat_template": "chat", "too_long": "chat", "txt_documents": "text"}
    for key, dataset in only.items():
        if getattr(data, key) != getattr(Data(), key) and dataset not in used.values():
            raise UsageError(f'data.{key} is for dataset "{dataset}", which the job does not read')


def _check_paths(data: Data, datasets: dict[str, str], config: Any) -> None:
    reads_paths = datasets["training"] in USER_DATASETS
    if data.paths and not reads_paths:
        raise UsageError(
            f'data.paths is for training.dataset "text" or "chat", not {config.training.dataset!r}; validation data '
            "is in validation.dataset_path"
        )
    if data.paths and config.training.dataset_path:
        raise UsageError("data.paths and training.dataset_path are both set: remove one")
    if reads_paths and not data.paths and not config.training.dataset_path:
        raise UsageError(
            f"training.dataset {config.training.dataset!r} needs training.dataset_path, or several in data.paths"
        )
    if datasets.get("validation") in USER_DATASETS and not config.validation.dataset_path:
        raise UsageError(f"validation.dataset {config.validation.dataset!r} needs validation.dataset_path")
    if data.weights and len(data.weights) != len(data.paths):
        raise UsageError(
            f"data.weights has {len(data.weights)} numbers for the {len(data.paths)} entries of data.paths"
        )
