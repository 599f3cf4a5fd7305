"""Batches that do not depend on the parallel layout: one stream of samples, of which each rank keeps its share.

With ``dp`` data-parallel ranks and local batches of ``local`` samples, batch ``n`` of rank ``r`` holds the samples from
``(n·dp + r)·local`` up to ``(n·dp + r + 1)·local``, exclusive. So an optimizer step consumes the same samples for any
``dp``, ``local`` and number of accumulated batches with the same product. The position in the stream is all the state
there is: the same on every rank, and valid for every layout.
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
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from torchtitan_npu.config.job_config import npu_options
from torchtitan_npu.errors import UsageError, nearest

# {"input": (seq_len,)} and labels (seq_len,); a batch has (local batch, seq_len)
Sample = tuple[dict[str, torch.Tensor], torch.Tensor]
# The one key of the state; a checkpoint without it makes DCP name it, so it is called like the option.
STATE = "layout_independent_data"
START_ANEW = 'checkpoint.exclude_from_loading = ["dataloader"] starts the data anew'


def build_text_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool = True
) -> BaseDataLoader:
    """The training batches of one data-parallel rank; see the top of this file.

    Every rank tokenizes the whole stream: with the shipped tokenizer, about 330,000 tokens a second on one core of a
    Neoverse-N1. A job that consumes more, over all its ranks, sets ``npu.layout_independent_data = false`` to get
    TorchTitan's own loader, which splits the documents over the ranks.
    """
    if not npu_options(job_config).layout_independent_data:
        return text_datasets.build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
    return _build("training", dp_world_size, dp_rank, tokenizer, job_config, infinite)


def build_text_validation_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool = False
) -> BaseDataLoader:
    """The validation batches of one data-parallel rank: the same at every validation, and as many on every rank."""
    if not npu_options(job_config).layout_independent_data:
        return text_datasets.build_text_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config, infinite)
    return _build("validation", dp_world_size, dp_rank, tokenizer, job_config, infinite)


def _build(
    section: str, dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool
) -> LayoutIndependentDataLoader:
    config = getattr(job_config, section)
    if config.dataset.lower() not in DATASETS:
        known = f"(known: {', '.join(DATASETS)})"
        raise UsageError(
            f"{section}.dataset {config.dataset!r} is not known{nearest(config.dataset, DATASETS)} {known}"
        )
    options = worker_options(
        section, job_config, "read the whole stream (npu.layout_independent_data = false allows more)"
    )
    samples = SampleStream(config.dataset, config.dataset_path, tokenizer, seq_len=config.seq_len, infinite=infinite)
    batches = RankBatches(samples, dp_rank, dp_world_size, config.local_batch_size)
    return LayoutIndependentDataLoader(batches, restart=section == "validation", **options)


def worker_options(section: str, job_config: JobConfig, each_would: str) -> dict[str, Any]:
    """The job's options for the DataLoader of ``section``, with one worker at most: ``each_would`` says why."""
    options = asdict(getattr(job_config, section).dataloader)
    if options["num_workers"] > 1:
        raise UsageError(
            f"{section}.dataloader.num_workers is {options['num_workers']}; it must be 0 or 1, since every worker "
            f"would {each_would}"
        )
    if options["num_workers"] == 0:  # DataLoader refuses what is meant for workers
        del options["persistent_workers"], options["prefetch_factor"]
    return options


class SampleStream(HuggingFaceTextDataset):
    """TorchTitan's stream of samples with a single reader, made to resume exactly where TorchTitan's does not."""

    _token_buffer: list[int]

    @property
    def source(self) -> str:
        """What a position refers to: the same number means another place in another set."""
        size = f" of {len(self._data)} documents" if isinstance(self._data, Dataset) else ""
        return f"{self.dataset_name}{size}"

    def __iter__(self) -> Iterator[Sample]:
        # A restored buffer can hold whole samples. TorchTitan reads a document before it looks, and so drops them when
        # there is none: at the end of a set that is not repeated.
        while len(self._token_buffer) > self.seq_len:
            tokens = torch.tensor(self._token_buffer[: self.seq_len + 1])
            self._token_buffer = self._token_buffer[self.seq_len + 1 :]
            yield {"input": tokens[:-1]}, tokens[1:]
        yield from super().__iter__()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # A Hugging Face stream ignores a position of another epoch than its own, and TorchTitan leaves it at epoch 0.
        if isinstance(self._data, HuggingFaceStream):
            self._data.set_epoch(state_dict["data"]["epoch"])


class RankBatches(IterableDataset):
    """The batches of one rank, each with the position behind it: ``({"input"}, labels, position)``.

    The position travels with its batch, since a worker process reads ahead of what was delivered.
    """

    def __init__(self, samples: SampleStream, dp_rank: int, dp_world_size: int, local_batch_size: int) -> None:
        self.samples = samples
        self.global_size = dp_world_size * local_batch_size
        self.ours = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor, bytes]]:
        samples = iter(self.samples)
        while True:
            batch, read = [], 0
            for index, sample in enumerate(islice(samples, self.global_size)):
                read += 1
                if index in self.ours:
                    batch.append(sample)
            if read < self.global_size:
                return  # the rest is too small to give every rank its batch: all stop here
            inputs, labels = default_collate(batch)
            yield inputs, labels, self.position

    @property
    def position(self) -> bytes:
        # Serialized at once, since TorchTitan's state shares the list that it goes on to fill.
        return pickle.dumps({"source": self.samples.source, "samples": self.samples.state_dict()})

    @position.setter
    def position(self, position: bytes) -> None:
        self.samples.load_state_dict(pickle.loads(position)["samples"])


class LayoutIndependentDataLoader(BaseDataLoader):
    """Delivers the batches of a rank and keeps the position behind the last one delivered.

    Iterating continues there; after the end of the data, or always with ``restart``, it begins at the start.
    """

    def __init__(self, batches: RankBatches, restart: bool, **options: Any) -> None:
        self._batches = batches
        self._restart = restart
        self._options = options
        self._start = self._position = batches.position

    def __iter__(self) -> Iterator[Sample]:
        self._batches.position = self._start if self._restart else self._position
        # A new DataLoader each time: its workers get their copy of the stream at the position just set.
        for inputs, labels, position in DataLoader(self._batches, batch_size=None, **self._options):
            self._position = position
            yield inputs, labels
        self._position = self._start

    def state_dict(self) -> dict[str, bytes]:
        return {STATE: self._position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if STATE not in state_dict:
            raise UsageError(
                "the checkpoint holds the data position of TorchTitan's own loader, which belongs to one data-parallel "
                f"degree: npu.layout_independent_data = false continues there, {START_ANEW}"
            )
        theirs, ours = pickle.loads(state_dict[STATE])["source"], self._batches.samples.source
        if theirs != ours:
            raise UsageError(f"the checkpoint holds a position in {theirs}, the job reads {ours}: {START_ANEW}")
        self._position = state_dict[STATE]
