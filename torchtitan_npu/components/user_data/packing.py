"""Fill the rows of batches with documents, and know the position after every row.

Importing this module adds the datasets "text" and "chat" to TorchTitan's registry, whose loaders cannot read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_npu.components.user_data.documents import (
    ChatEncoder,
    Document,
    Encoder,
    TextEncoder,
    load_chat_template,
)
from torchtitan_npu.components.user_data.files import BadRecord, RecordFile, open_files
from torchtitan_npu.components.user_data.order import FIRST, Location, Mixture, RecordSource, State
from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.config.sections import USER_DATASETS, Data
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import DOCUMENT_ENDS
from torchtitan_npu.log import log_on_first_rank

DOCUMENTS_PER_TASK = 32
"""Documents that a worker process tokenizes before the next worker's turn."""
LOGGED_RECORDS = 5
"""Skipped records that are logged with their location. Others are only counted."""
SKIP_HINT = 'data.bad_records = "skip" counts such records and skips them'

# {"input": (seq_len,)} and labels (seq_len,); a batch has (local batch, seq_len)
Sample = tuple[dict[str, Tensor], Tensor]


class Encoded(NamedTuple):
    """A record, tokenized."""

    state: State
    source: int
    location: Location
    document: Document | None
    reason: str
    """If there is no document, why."""


class EncodedDocuments(IterableDataset):
    """The documents from ``state`` on, in tasks. Each of several worker processes tokenizes the tasks of its turn."""

    def __init__(self, mixture: Mixture, encoder: Encoder, state: State, infinite: bool) -> None:
        self.mixture, self.encoder, self.state, self.infinite = mixture, encoder, state, infinite

    def __iter__(self) -> Iterator[list[Encoded]]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        task: list[Encoded] = []
        for number, (state, source, location, record) in enumerate(self.mixture.records(self.state, self.infinite)):
            if number // DOCUMENTS_PER_TASK % workers == turn:
                document, reason = None, ""
                try:
                    file = self.mixture.sources[source].files[location.file]
                    document = self.encoder.encode(file.decode(record))
                except BadRecord as error:
                    reason = str(error)
                task.append(Encoded(state, source, location, document, reason))
            if task and (number + 1) % DOCUMENTS_PER_TASK == 0:
                yield task
                task = []
        if task:
            yield task


class PackedRows:
    """Rows of ``seq_len`` tokens. A subclass decides how documents fill them.

    The position after a row is the state of the first document with tokens for later rows, and the number of its tokens
    that were used.
    """

    def __init__(
        self,
        mixture: Mixture,
        encoder: Encoder,
        *,
        seq_len: int,
        infinite: bool,
        skip_bad_records: bool = False,
        **worker_options: Any,
    ) -> None:
        self.mixture, self.encoder, self.seq_len, self.infinite = mixture, encoder, seq_len, infinite
        self.skip_bad_records, self.worker_options = skip_bad_records, worker_options
        self.state, self.used = mixture.start, 0
        self.skipped = 0
        """Records that could not be used, since the start of this process."""

    name = ""

    @property
    def source(self) -> str:
        """The data that a position refers to."""
        return f"{self.name}, field {self.encoder.fields[0]!r}, {self.mixture.identity}"

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state, "used": self.used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.used = state["state"], state["used"]

    def __iter__(self) -> Iterator[Sample]:
        """Yield the rows from the position on, and keep the position after each."""
        raise NotImplementedError

    def documents(self) -> Iterator[tuple[Encoded, Document]]:
        """Yield the documents from the position on."""
        tasks = EncodedDocuments(self.mixture, self.encoder, self.state, self.infinite)
        # by default, DataLoader makes tensors of all arrays
        loader = DataLoader(tasks, batch_size=None, collate_fn=list, **self.worker_options)
        epochs = [at[0] for at in self.state]
        last_used = epochs.copy()  # the last epoch of each source with a document that was used
        for encoded in (one for task in loader for one in task):
            source, epoch = encoded.source, encoded.state[encoded.source][0]
            if epoch > epochs[source]:
                name, epochs[source] = self.mixture.sources[source].name, epoch
                if epoch > last_used[source] + 1:
                    raise UsageError(f"{name}: not one record can be used; {self.skipped} were skipped")
                log_on_first_rank(f"{name}: epoch {epoch + 1} begins; {self.skipped} records were skipped so far")
            if encoded.document is None:
                if not self.skip_bad_records:
                    raise UsageError(f"{self.location(encoded)}: {encoded.reason} ({SKIP_HINT})")
                self.skip(encoded, encoded.reason)
            elif (document := self.fitted(encoded, encoded.document)) is not None:
                last_used[source] = epoch
                yield encoded, document

    def fitted(self, encoded: Encoded, document: Document) -> Document | None:
        """Return what rows have of a document, or ``None`` if it is skipped."""
        return document

    def location(self, encoded: Encoded) -> str:
        """Return where a record is, for the user."""
        location = encoded.location
        return self.mixture.sources[encoded.source].files[location.file].location(location.block, location.number)

    def skip(self, encoded: Encoded, reason: str) -> None:
        """Count a record that is not used, and log the first ones."""
        self.skipped += 1
        if self.skipped <= LOGGED_RECORDS:
            log_on_first_rank(f"Skipped {self.location(encoded)}: {reason}")
        elif self.skipped % 1000 == 0:
            log_on_first_rank(f"Skipped {self.skipped} records")


class ConcatenatedTexts(PackedRows):
    """Rows cut from the concatenated documents, as TorchTitan cuts them: ``seq_len + 1`` tokens are a row."""

    name = "text"

    def __iter__(self) -> Iterator[Sample]:
        length = self.seq_len + 1
        pieces: list[np.ndarray] = []
        missing = length
        first = self.used
        for encoded, (tokens, _) in self.documents():
            while len(tokens) - first >= missing:
                row = torch.from_numpy(np.concatenate([*pieces, tokens[first : first + missing]]).astype(np.int64))
                first += missing
                pieces, missing = [], length
                self.state, self.used = encoded.state, first
                yield {"input": row[:-1]}, row[1:]
            pieces.append(tokens[first:])
            missing -= len(tokens) - first
            first = 0


class PackedConversations(PackedRows):
    """Rows of complete conversations, padded with tokens without labels.

    Each conversation is a document, with one input token fewer than it has tokens.
    """

    name = "chat"

    def __init__(self, *args: Any, pad: int, too_long: Literal["error", "skip", "truncate"], **options: Any) -> None:
        super().__init__(*args, **options)
        self.pad, self.too_long = pad, too_long

    def __iter__(self) -> Iterator[Sample]:
        row: list[Document] = []
        room = self.seq_len
        for encoded, document in self.documents():
            inputs = len(document.tokens) - 1
            if inputs > room:
                self.state = encoded.state
                yield self._sample(row)
                row, room = [], self.seq_len
            row.append(document)
            room -= inputs
        if row:
            self.state = self.mixture.end
            yield self._sample(row)

    def fitted(self, encoded: Encoded, document: Document) -> Document | None:
        """Return a conversation of at most one row, or ``None`` if it is skipped."""
        tokens, is_learned = document
        assert is_learned is not None
        most = self.seq_len + 1
        if len(tokens) <= most:
            return document
        reason = f"{len(tokens)} tokens, and a row has room for {most}"
        if self.too_long == "error":
            raise UsageError(
                f'{self.location(encoded)}: {reason}: raise seq_len, or set data.too_long to "truncate" or "skip"'
            )
        if self.too_long == "skip" or not is_learned[1:most].any():
            self.skip(encoded, reason)
            return None
        return Document(tokens[:most], is_learned[:most])

    def _sample(self, row: list[Document]) -> Sample:
        inputs = torch.full((self.seq_len,), self.pad)
        labels = torch.full((self.seq_len,), IGNORE_INDEX)
        ends = torch.zeros(self.seq_len, dtype=torch.bool)
        first = 0
        for tokens, is_learned in row:
            ids = torch.from_numpy(tokens.astype(np.int64))
            last = first + len(ids) - 1
            inputs[first:last] = ids[:-1]
            labels[first:last] = ids[1:].where(torch.from_numpy(is_learned)[1:], IGNORE_INDEX)
            ends[last - 1] = True
            first = last
        ends[-1] = True
        return {"input": inputs, DOCUMENT_ENDS: ends}, labels


def build_rows(
    section: str, tokenizer: BaseTokenizer | None, job_config: JobConfig, infinite: bool, **worker_options: Any
) -> PackedRows:
    """Return the rows of ``section``, ``training`` or ``validation``. Validation data is not shuffled.

    Raise :class:`UsageError` if files are missing, or their first record cannot be used.
    """
    config, options = getattr(job_config, section), with_all_sections(job_config).data
    is_chat = config.dataset.lower() == "chat"
    if is_chat and not hasattr(job_config, "data"):  # TorchTitan's Trainer would pass the document ends to the model
        raise UsageError(f'{section}.dataset "chat" needs this package\'s entry, -m torchtitan_npu.train')
    if tokenizer is None:
        raise UsageError(f"{section}.dataset {config.dataset!r} needs a tokenizer: set model.hf_assets_path")
    encoder: Encoder
    if not is_chat:
        encoder = TextEncoder(tokenizer, options.field or "text")
    elif not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UsageError(f'dataset "chat" needs a Hugging Face tokenizer, not a {type(tokenizer).__name__}')
    else:
        template = load_chat_template(job_config.model.hf_assets_path, options.chat_template)
        encoder = ChatEncoder(tokenizer, options.field or "messages", template)
    sources = _sources(section, config.dataset_path, options, encoder, is_chat)
    for source in sources:
        _check_first_record(source, encoder, can_skip=options.bad_records == "skip")
    weights = options.weights if len(sources) > 1 else [1.0]
    mixture = Mixture(sources, weights, partial(record_length, encoder))
    skips = options.bad_records == "skip"
    settings = {"seq_len": config.seq_len, "infinite": infinite, "skip_bad_records": skips, **worker_options}
    if not is_chat:
        return ConcatenatedTexts(mixture, encoder, **settings)
    if tokenizer.eos_id is None:  # the padding, and the boundary of documents for the models
        raise UsageError(f"{section}.dataset {config.dataset!r} needs a tokenizer with an end-of-sequence token")
    return PackedConversations(mixture, encoder, pad=tokenizer.eos_id, too_long=options.too_long, **settings)


def _sources(section: str, path: str | None, options: Data, encoder: Encoder, is_chat: bool) -> list[RecordSource]:
    """Return one source for each weight. Without weights, all paths are one source."""
    is_training = section == "training"
    several = is_training and bool(options.paths)
    key = "data.paths" if several else f"{section}.dataset_path"
    paths = options.paths if several else [path] if path else []
    if not paths:
        raise UsageError(f"{key} must be set: a file or a folder of {'conversations' if is_chat else 'texts'}")
    files = [open_files(one, encoder.fields, None if is_chat else options.txt_documents, key) for one in paths]
    seed = options.seed if is_training and options.shuffle else None
    window = options.shuffle_window_mib * 2**20
    if several and options.weights:
        return [RecordSource(one, found, seed, window) for one, found in zip(paths, files, strict=True)]
    return [RecordSource(", ".join(paths), [file for found in files for file in found], seed, window)]


def _check_first_record(source: RecordSource, encoder: Encoder, can_skip: bool) -> None:
    """Raise if a source has no record, or if its first one cannot be used and must not be skipped."""
    in_files = RecordSource(source.name, source.files, seed=None, window_bytes=0)
    _, location, record = next(in_files.records(FIRST))
    file = source.files[location.file]
    try:
        encoder.encode(file.decode(record))
    except BadRecord as error:
        if not can_skip:
            raise UsageError(f"{file.location(location.block, location.number)}: {error} ({SKIP_HINT})") from error


def record_length(encoder: Encoder, file: RecordFile, record: Any) -> int:
    """Return the characters of a record, at least 1."""
    try:
        return max(1, encoder.length(file.decode(record)))
    except BadRecord:
        return 1


def _refuse(path: str) -> NoReturn:
    raise UsageError('dataset "text" and "chat" need npu.layout_independent_data = true and this package\'s entry')


for _name in USER_DATASETS:
    DATASETS[_name] = DatasetConfig("", _refuse, _refuse)
