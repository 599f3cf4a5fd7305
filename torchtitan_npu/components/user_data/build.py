"""Build the rows of ``training.dataset = "text"`` or ``"chat"`` from a job's configuration.

Importing this module adds both names to TorchTitan's dataset registry, whose own loaders cannot read them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from torchtitan_npu.components.user_data.documents import ChatEncoder, Encoder, TextEncoder, load_chat_template
from torchtitan_npu.components.user_data.files import BadRecord, RecordFile, open_files
from torchtitan_npu.components.user_data.order import FIRST, Mixture, Source
from torchtitan_npu.components.user_data.packing import (
    SKIP_HINT,
    ConcatenatedTexts,
    PackedConversations,
    PackedRows,
)
from torchtitan_npu.config.data import USER_DATASETS, Data
from torchtitan_npu.config.job_config import data_options
from torchtitan_npu.errors import UsageError


def build_rows(
    section: str, tokenizer: BaseTokenizer | None, job_config: JobConfig, infinite: bool, **worker_options: Any
) -> PackedRows:
    """Return the rows of ``section``, ``training`` or ``validation``. Validation data is not shuffled.

    Raise :class:`UsageError` if files are missing, or their first record cannot be used.
    """
    config, options = getattr(job_config, section), data_options(job_config)
    is_chat = config.dataset.lower() == "chat"
    if is_chat and not hasattr(job_config, "data"):  # TorchTitan's Trainer would pass the document ends to the model
        raise UsageError(f'{section}.dataset "chat" needs this package\'s entry, -m torchtitan_npu.train')
    if tokenizer is None:
        raise UsageError(f"{section}.dataset {config.dataset!r} needs a tokenizer: set model.hf_assets_path")
    encoder = _encoder(tokenizer, options, job_config, is_chat)
    sources = _sources(section, config.dataset_path, options, encoder, is_chat)
    for source in sources:
        _check_first_record(source, encoder, can_skip=options.bad_records == "skip")
    weights = options.weights if len(sources) > 1 else [1.0]
    mixture = Mixture(sources, weights, partial(record_length, encoder))
    settings: dict[str, Any] = {
        "seq_len": config.seq_len,
        "infinite": infinite,
        "skip_bad_records": options.bad_records == "skip",
    }
    if not is_chat:
        return ConcatenatedTexts(mixture, encoder, **settings, **worker_options)
    if tokenizer.eos_id is None:  # the padding, and the boundary of documents for the models
        raise UsageError(f"{section}.dataset {config.dataset!r} needs a tokenizer with an end-of-sequence token")
    settings |= {"pad": tokenizer.eos_id, "too_long": options.too_long}
    return PackedConversations(mixture, encoder, **settings, **worker_options)


def _encoder(tokenizer: BaseTokenizer, options: Data, job_config: JobConfig, is_chat: bool) -> Encoder:
    if not is_chat:
        return TextEncoder(tokenizer, options.field or "text")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise UsageError(f'dataset "chat" needs a Hugging Face tokenizer, not a {type(tokenizer).__name__}')
    template = load_chat_template(job_config.model.hf_assets_path, options.chat_template)
    return ChatEncoder(tokenizer, options.field or "messages", template)


def _sources(section: str, path: str | None, options: Data, encoder: Encoder, is_chat: bool) -> list[Source]:
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
        return [Source(one, found, seed, window) for one, found in zip(paths, files, strict=True)]
    return [Source(", ".join(paths), [file for found in files for file in found], seed, window)]


def _check_first_record(source: Source, encoder: Encoder, can_skip: bool) -> None:
    """Raise if a source has no record, or if its first one cannot be used and must not be skipped."""
    in_files = Source(source.name, source.files, seed=None, window_bytes=0)
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
