"""The shipped corpus and tokenizer: consistent, and read by TorchTitan's tokenizer."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from torchtitan_npu.components.corpus import ASSETS

TOKENIZER = HuggingFaceTokenizer(str(ASSETS / "tokenizer"))


def texts(name: str) -> list[str]:
    return [json.loads(line)["text"] for line in (ASSETS / "corpus" / name).read_text().splitlines()]


def test_assets_are_small() -> None:
    assert sum(file.stat().st_size for file in ASSETS.rglob("*") if file.is_file()) < 2_000_000


def test_documents_are_many_different_and_of_all_lengths() -> None:
    corpus, validation = texts("corpus.jsonl"), texts("validation.jsonl")
    assert len(set(corpus + validation)) == len(corpus) + len(validation) > 2_500
    lengths = sorted(map(len, corpus))
    assert lengths[0] < 20
    assert lengths[-1] > 2_000


def test_ids_fit_the_debug_models_and_leave_eight_free() -> None:
    assert TOKENIZER.get_vocab_size() == 2040
    assert sorted(TOKENIZER.get_vocab().values()) == list(range(2040))


@settings(max_examples=40)
@given(st.text())
def test_any_text_round_trips(text: str) -> None:
    ids = TOKENIZER.encode(text, add_bos=True, add_eos=True)
    assert TOKENIZER.decode(ids) == text
    assert all(0 <= i < 2040 for i in ids)


@settings(max_examples=20)
@given(st.text())
def test_bos_and_eos_are_added_on_request(text: str) -> None:
    bare = TOKENIZER.encode(text, add_bos=False, add_eos=False)
    assert TOKENIZER.bos_id not in bare
    assert TOKENIZER.eos_id not in bare
    assert TOKENIZER.encode(text, add_bos=True, add_eos=True) == [TOKENIZER.bos_id, *bare, TOKENIZER.eos_id]
    assert TOKENIZER.encode(text) == [TOKENIZER.bos_id, *bare]
