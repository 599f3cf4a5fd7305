"""Data loaders whose batches do not depend on the parallel layout: every rank reads one stream and keeps its part.

With ``dp`` data-parallel ranks and local batches of ``local`` samples, batch ``n`` of rank ``r`` holds the samples from
``(n·dp + r)·local`` up to ``(n·dp + r + 1)·local``, exclusive. An optimizer step therefore consumes the same samples
for any ``dp``, ``local`` and number of accumulated batches with the same product. The only state is the position in the
stream, which is the same on every rank and valid for every layout.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from datasets import IterableDataset as HuggingFaceStream
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import text_datasets
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset

import torchtitan_npu.components.corpus  # noqa: F401  registers the shipped corpora
from torchtitan_npu.components.checkpoint.restricted_pickle import load_plain
from torchtitan_npu.components.user_data.packing import PackedRows, Sample, build_rows
from torchtitan_npu.config.job_config import with_all_sections
from torchtitan_npu.config.sections import USER_DATASETS
from torchtitan_npu.errors import UsageError

# The only key of the state. DCP names it if a checkpoint does not have it, so it has the name of the option.
STATE = "layout_independent_data"
RESTART_HINT = 'checkpoint.exclude_from_loading = ["dataloader"] restarts the data'


def build_text_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool = True
) -> BaseDataLoader:
    """Return the loader of the training batches of one data-parallel rank.

    Every rank tokenizes the complete stream: with the shipped tokenizer, about 330,000 tokens a second on one core of a
    Neoverse-N1. A job that consumes more over all its ranks sets ``npu.layout_independent_data = false`` to get
    TorchTitan's loader, which splits the documents among the ranks.
    """
    if not with_all_sections(job_config).npu.layout_independent_data:
        return text_datasets.build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
    return _build("training", dp_world_size, dp_rank, tokenizer, job_config, infinite)


def build_text_validation_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool = False
) -> BaseDataLoader:
    """Return the loader of the validation batches of one data-parallel rank.

    It yields the same batches at every validation, and as many on every rank.
    """
    if not with_all_sections(job_config).npu.layout_independent_data:
        return text_datasets.build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
    return _build("validation", dp_world_size, dp_rank, tokenizer, job_config, infinite)


def _build(
    section: str, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool
) -> LayoutIndependentDataLoader:
    config = getattr(job_config, section)
    options = worker_options(section, job_config)
    samples: SampleStream | PackedRows
    if config.dataset.lower() in USER_DATASETS:
        # worker processes tokenize; this process packs the rows, and so knows the position after each
        loading = {"pin_memory": options.pop("pin_memory")}
        options.pop("persistent_workers", None)  # they run as long as the loader is iterated
        samples, options = build_rows(section, tokenizer, job_config, infinite, **options), loading
    else:
        samples = SampleStream(config.dataset, config.dataset_path, tokenizer, config.seq_len, infinite=infinite)
    batches = RankBatches(samples, dp_rank, dp_world_size, config.local_batch_size)
    return LayoutIndependentDataLoader(batches, restart=section == "validation", **options)


def check_data_workers(name: str, section: Any) -> None:
    """Raise if the loader of ``section`` has more than one worker, each of which would read the complete stream."""
    if (workers := section.dataloader.num_workers) > 1 and section.dataset.lower() not in USER_DATASETS:
        raise UsageError(
            f"{name}.dataloader.num_workers is {workers}; it must be 0 or 1, since every worker would read the "
            "complete stream (with npu.layout_independent_data = false TorchTitan's loader can have more)"
        )


def worker_options(section: str, job_config: JobConfig) -> dict[str, Any]:
    """Return the job's options for the DataLoader of ``section``. With most datasets it has at most one worker."""
    config = getattr(job_config, section)
    check_data_workers(section, config)
    options = asdict(config.dataloader)
    if options["num_workers"] == 0:  # DataLoader rejects options for workers if it has none
        del options["persistent_workers"], options["prefetch_factor"]
    return options


class SampleStream(HuggingFaceTextDataset):
    """TorchTitan's stream of samples with a single reader, and with exact resumption where TorchTitan's has none."""

    _token_buffer: list[int]

    @property
    def source(self) -> str:
        """The dataset that a position refers to."""
        size = f" of {len(self._data)} documents" if isinstance(self._data, Dataset) else ""
        return f"{self.dataset_name}{size}"

    def __iter__(self) -> Iterator[Sample]:
        # A restored buffer can hold complete samples. TorchTitan reads a document before it checks the buffer, and so
        # drops them at the end of a dataset that is not repeated.
        while len(self._token_buffer) > self.seq_len:
            tokens = torch.tensor(self._token_buffer[: self.seq_len + 1])
            self._token_buffer = self._token_buffer[self.seq_len + 1 :]
            yield {"input": tokens[:-1]}, tokens[1:]
        yield from super().__iter__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # A Hugging Face stream ignores a position in another epoch than the current one, which TorchTitan leaves at 0.
        if isinstance(self._data, HuggingFaceStream):
            self._data.set_epoch(state_dict["data"]["epoch"])


class RankBatches(IterableDataset):
    """The batches of one rank, each with the position after it: ``({"input"}, labels, position)``.

    The position is part of the batch because a worker process reads ahead of the batches delivered.
    """

    def __init__(
        self, samples: SampleStream | PackedRows, dp_rank: int, dp_world_size: int, local_batch_size: int
    ) -> None:
        self.samples = samples
        self.global_size = dp_world_size * local_batch_size
        self.of_rank = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor, bytes]]:
        samples = iter(self.samples)
        while True:
            batch, read = [], 0
            for index, sample in enumerate(islice(samples, self.global_size)):
                read += 1
                if index in self.of_rank:
                    batch.append(sample)
            if read < self.global_size:
                return  # too few samples for a batch on every rank: all stop here
            inputs, labels = default_collate(batch)
            yield inputs, labels, self.position

    @property
    def position(self) -> bytes:
        # Serialized at once: TorchTitan's state refers to the buffer that it goes on to fill.
        return pickle.dumps({"source": self.samples.source, "samples": self.samples.state_dict()})

    @position.setter
    def position(self, position: bytes) -> None:
        self.samples.load_state_dict(load_plain(position)["samples"])


class LayoutIndependentDataLoader(BaseDataLoader):
    """Deliver the batches of a rank and keep the position after the last one delivered.

    Iteration continues there. After the end of the data, or always with ``restart``, it begins at the start.
    """

    def __init__(self, batches: RankBatches, restart: bool, **options: Any) -> None:
        self._batches = batches
        self._restart = restart
        self._options = options
        self._start = self._position = batches.position

    @property
    def source(self) -> str:
        """The data that the batches are from."""
        return self._batches.samples.source

    def __iter__(self) -> Iterator[Sample]:
        self._batches.position = self._start if self._restart else self._position
        # A new DataLoader each time: its worker gets a copy of the stream at the position just set.
        for inputs, labels, position in DataLoader(self._batches, batch_size=None, **self._options):
            self._position = position
            yield inputs, labels
        self._position = self._start

    def state_dict(self) -> dict[str, bytes]:
        return {STATE: self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if STATE not in state_dict:
            raise UsageError(
                "the checkpoint has the data position of TorchTitan's loader, which is valid for one data-parallel "
                f"degree only: npu.layout_independent_data = false continues there, {RESTART_HINT}"
            )
        try:
            saved = load_plain(state_dict[STATE])["source"]
        except pickle.UnpicklingError as error:
            raise UsageError(f"the checkpoint's data position is not plain data: {error}") from error
        if saved != self.source:
            raise UsageError(f"the checkpoint has a position in {saved}, the job reads {self.source}: {RESTART_HINT}")
        self._position = state_dict[STATE]
