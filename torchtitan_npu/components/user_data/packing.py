"""Fill the rows of batches with documents, and know the position after every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_npu.components.user_data.documents import Document, Encoder
from torchtitan_npu.components.user_data.files import BadRecord
from torchtitan_npu.components.user_data.order import Location, Mixture, State
from torchtitan_npu.errors import UsageError
from torchtitan_npu.layers.documents import DOCUMENT_ENDS
from torchtitan_npu.log import log_on_first_rank

DOCUMENTS_PER_TASK = 32
"""Documents that a worker process tokenizes before the next worker's turn."""
LOGGED_RECORDS = 5
"""Skipped records that are logged with their location. Others are only counted."""
SKIP_HINT = 'data.bad_records = "skip" counts such records and skips them'

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


def unchanged(task: list[Encoded]) -> list[Encoded]:
    """Return a task as it is. By default, DataLoader makes tensors of all arrays."""
    return task


class PackedRows:
    """Rows of ``seq_len`` tokens. A subclass decides how documents fill them.

    The position after a row is the state of the first document with tokens for later rows, and how many of its tokens
    the rows before have used.
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
        loader = DataLoader(tasks, batch_size=None, collate_fn=unchanged, **self.worker_options)
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
    """Rows of complete conversations. The rest of a row has tokens without labels.

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
