"""Layout-independent batches: the same samples on every layout, exact resumption on any other, and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets import DatasetConfig, text_datasets

from torchtitan_npu.components.corpus import ASSETS, load_texts
from torchtitan_npu.components.dataloader import build_text_dataloader, build_text_validation_dataloader
from torchtitan_npu.errors import UsageError

TOKENIZER = HuggingFaceTokenizer(str(ASSETS / "tokenizer"))
SEQ_LEN = 16
GLOBAL_BATCH = 12
LAYOUTS = [  # data-parallel degree, local batch size, accumulated batches; the product is the global batch
    (dp, local, GLOBAL_BATCH // (dp * local))
    for dp in (1, 2, 3, 4)
    for local in (1, 2, 3)
    if GLOBAL_BATCH % (dp * local) == 0
]
# A map-style dataset, a stream, and a sharded stream, whose order Hugging Face changes in each epoch.
DATASETS = ("tiny_corpus", "tiny_corpus_validation", "shards")
text_datasets.DATASETS["shards"] = DatasetConfig(
    path="",
    loader=lambda path: load_texts(path).to_iterable_dataset(num_shards=4),
    sample_processor=lambda doc: doc["text"],
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a corpus whose end a few steps pass: short documents, and a last one of many samples."""
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(16):
        words = " ".join(f"word {i} {j}" for j in range(60 if i == 15 else 1 + i % 5))
        (folder / f"{i:02}.txt").write_text(words)
    return str(folder)


def job(corpus: str | None, dataset: str = "tiny_corpus", local: int = 1, **dataloader: object) -> JobConfig:
    config = JobConfig()
    config.npu = SimpleNamespace(layout_independent_data=True)
    for section in (config.training, config.validation):
        section.dataset, section.dataset_path = dataset, corpus
        section.seq_len, section.local_batch_size = SEQ_LEN, local
        for name, value in dataloader.items():
            setattr(section.dataloader, name, value)
    return config


def ranks(config: JobConfig, dp: int, infinite: bool = True) -> list[BaseDataLoader]:
    return [build_text_dataloader(dp, rank, TOKENIZER, config, infinite) for rank in range(dp)]


def take(iterators: list[Iterator], accumulate: int) -> torch.Tensor:
    """Return the samples of one optimizer step on all ranks, in stream order: (global batch, seq_len + 1)."""
    rows = []
    for _ in range(accumulate):
        for iterator in iterators:
            inputs, labels = next(iterator)
            rows.append(torch.cat([inputs["input"], labels[:, -1:]], dim=1))
            assert rows[-1][:, 1:].equal(labels)
    return torch.cat(rows)


def reference(corpus: str, dataset: str, n: int, infinite: bool = True) -> torch.Tensor:
    """Return the first ``n`` samples of TorchTitan's stream."""
    stream = text_datasets.HuggingFaceTextDataset(dataset, corpus, TOKENIZER, SEQ_LEN, infinite=infinite)
    samples = [torch.cat([inputs["input"], labels[-1:]]) for (inputs, labels), _ in zip(stream, range(n), strict=False)]
    return torch.stack(samples)


def test_the_steps_below_pass_the_end_of_the_small_corpus_more_than_once(corpus: str) -> None:
    assert 2 * len(reference(corpus, "tiny_corpus", 1000, infinite=False)) < 8 * GLOBAL_BATCH


@settings(deadline=None, max_examples=12)
@given(
    before=st.sampled_from(LAYOUTS),
    after=st.sampled_from(LAYOUTS),
    steps=st.integers(0, 7),
    dataset=st.sampled_from(DATASETS),
    rank=st.integers(0, 3),
)
def test_every_layout_gets_the_same_samples_and_any_other_resumes_with_the_next_one(
    corpus: str, before: tuple[int, int, int], after: tuple[int, int, int], steps: int, dataset: str, rank: int
) -> None:
    dp, local, accumulate = before
    loaders = ranks(job(corpus, dataset, local), dp)
    iterators = [iter(loader) for loader in loaders]
    expected = reference(corpus, dataset, (steps + 4) * GLOBAL_BATCH)
    for number in range(steps):
        assert take(iterators, accumulate).equal(expected[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH])
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    take(iterators, accumulate)  # further training must not change the saved state

    dp, local, accumulate = after
    resumed = ranks(job(corpus, dataset, local), dp)
    for loader in resumed:
        loader.load_state_dict(states[rank % len(states)])
    iterators = [iter(loader) for loader in resumed]
    got = torch.cat([take(iterators, accumulate) for _ in range(4)])
    assert got.equal(expected[steps * GLOBAL_BATCH :])


@settings(deadline=None, max_examples=8)
@given(dp=st.integers(1, 4), local=st.integers(1, 3), dataset=st.sampled_from(DATASETS), data=st.data())
def test_without_repetition_all_ranks_end_at_the_same_batch_and_resume_there(
    corpus: str, dp: int, local: int, dataset: str, data: st.DataObject
) -> None:
    samples = reference(corpus, dataset, 1000, infinite=False)
    batches = len(samples) // (dp * local)
    loaders = ranks(job(corpus, dataset, local), dp, infinite=False)
    for _ in range(2):  # after the end it restarts
        iterators = [iter(loader) for loader in loaders]
        got = torch.cat([take(iterators, 1) for _ in range(batches)])
        assert got.equal(samples[: batches * dp * local])
        assert [next(iterator, None) for iterator in iterators] == [None] * dp

    consumed = data.draw(st.integers(0, batches))
    loader = loaders[0]
    iterator = iter(loader)
    for _ in range(consumed):
        next(iterator)
    remaining = build_text_dataloader(dp, 0, TOKENIZER, job(corpus, dataset, local), infinite=False)
    remaining.load_state_dict(loader.state_dict())
    assert sum(1 for _ in remaining) == batches - consumed


@pytest.mark.parametrize("dataset", DATASETS)
def test_a_worker_that_reads_ahead_changes_neither_batches_nor_state(corpus: str, dataset: str) -> None:
    samples = reference(corpus, dataset, 40)
    options = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    with_worker = build_text_dataloader(1, 0, TOKENIZER, job(corpus, dataset, 2, **options))
    iterator = iter(with_worker)
    got = torch.cat([take([iterator], 1) for _ in range(13)])
    assert got.equal(samples[:26])

    without = build_text_dataloader(1, 0, TOKENIZER, job(corpus, dataset, 2))
    without.load_state_dict(with_worker.state_dict())
    resumed = iter(without)
    assert take([resumed], 3).equal(samples[26:32])

    with_worker.load_state_dict(without.state_dict())
    assert take([iter(with_worker)], 4).equal(samples[32:40])


def test_iterating_again_continues_after_the_last_batch(corpus: str) -> None:
    loader = build_text_dataloader(1, 0, TOKENIZER, job(corpus))
    rows = [take([iter(loader)], 1) for _ in range(5)]
    assert torch.cat(rows).equal(reference(corpus, "tiny_corpus", 5))


@pytest.mark.parametrize("infinite", [False, True])
def test_every_validation_sees_the_same_batches(corpus: str, infinite: bool) -> None:
    config = job(corpus, "tiny_corpus", local=2)
    config.training.dataset, config.training.seq_len = "c4", 2048  # validation does not read these
    loader = build_text_validation_dataloader(2, 1, TOKENIZER, config, infinite)
    samples = reference(corpus, "tiny_corpus", 12)
    for _ in range(2):
        iterator = iter(loader)
        assert take([iterator], 3).equal(torch.cat([samples[2:4], samples[6:8], samples[10:12]]))


def test_without_the_option_torchtitans_loaders_are_used(corpus: str) -> None:
    config = job(corpus, local=2, num_workers=2)
    config.npu.layout_independent_data = False
    for build in (build_text_dataloader, build_text_validation_dataloader):
        assert isinstance(build(2, 1, TOKENIZER, config), ParallelAwareDataloader)


def test_a_checkpoint_of_torchtitans_loader_is_an_error(corpus: str, tmp_path: Path) -> None:
    titan = text_datasets.build_text_dataloader(1, 0, TOKENIZER, job(corpus))
    next(iter(titan))
    independent = build_text_dataloader(1, 0, TOKENIZER, job(corpus))
    with pytest.raises(UsageError, match=r"npu\.layout_independent_data = false.*exclude_from_loading"):
        independent.load_state_dict(titan.state_dict())
    # DCP itself raises for the missing key, whose name is that of the option
    dcp.save({"dataloader": titan}, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointException, match=r"dataloader\.layout_independent_data"):
        dcp.load({"dataloader": independent}, checkpoint_id=tmp_path, no_dist=True)


def test_a_position_in_another_dataset_is_an_error(corpus: str) -> None:
    state = build_text_dataloader(1, 0, TOKENIZER, job(None)).state_dict()
    with pytest.raises(UsageError, match=r"in tiny_corpus of \d+ documents, the job reads tiny_corpus of 16 documents"):
        build_text_dataloader(1, 0, TOKENIZER, job(corpus)).load_state_dict(state)
    with pytest.raises(UsageError, match="the job reads shards"):
        build_text_dataloader(1, 0, TOKENIZER, job(corpus, "shards")).load_state_dict(state)


def test_more_than_one_worker_is_an_error(corpus: str) -> None:
    """TorchTitan's entry, which has no preflight, must not train on every sample twice."""
    for build in (build_text_dataloader, build_text_validation_dataloader):
        with pytest.raises(UsageError, match=r"\.dataloader\.num_workers is 2; it must be 0 or 1"):
            build(1, 0, TOKENIZER, job(corpus, num_workers=2))
