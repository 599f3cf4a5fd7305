"""Section ``[data]``: each wrong combination is one line that names the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.preflight.test_job_checks import job
from torchtitan_npu.components.corpus import ASSETS
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.job import check_job, check_start

TEXTS = str(ASSETS / "corpus/corpus.jsonl")
TEXT = {"training__dataset": "text", "training__dataset_path": TEXTS}
SEVERAL = {"training__dataset": "text", "data__paths": [TEXTS, TEXTS]}
CHAT = {"training__dataset": "chat", "training__dataset_path": str(ASSETS / "chat/chat.jsonl")}
VALIDATION = {"validation__enable": True, "validation__dataset": "chat"}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"data__seed": 1}, r'\[data\] is for training.dataset "text" or "chat"'),
        (
            {"training__dataset": "text"},
            r"training.dataset 'text' needs training.dataset_path, or several in data.paths",
        ),
        ({**TEXT, "data__paths": [TEXTS]}, "data.paths and training.dataset_path are both set"),
        ({**SEVERAL, "data__weights": [1.0]}, "data.weights has 1 numbers for the 2 entries of data.paths"),
        ({**TEXT, "data__weights": [1.0]}, "data.weights has 1 numbers for the 0 entries of data.paths"),
        ({**TEXT, "data__too_long": "skip"}, 'data.too_long is for dataset "chat", which the job does not read'),
        ({**TEXT, "data__chat_template": "x"}, 'data.chat_template is for dataset "chat"'),
        ({**CHAT, "data__txt_documents": "line"}, 'data.txt_documents is for dataset "text"'),
        ({**TEXT, "npu__layout_independent_data": False}, "npu.layout_independent_data must be true"),
        ({**TEXT, **VALIDATION}, "validation.dataset 'chat' needs validation.dataset_path"),
        (
            {**VALIDATION, "validation__dataset_path": TEXTS, "data__paths": [TEXTS]},
            "data.paths is for training.dataset",
        ),
    ],
)
def test_a_wrong_combination(options: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        check_job(job(**options), 1)


def test_the_files_are_read_at_the_start_only(tmp_path: Path) -> None:
    assets = {"model__hf_assets_path": str(ASSETS / "tokenizer")}
    missing = check_job(job(**assets, training__dataset="text", training__dataset_path="nowhere"), 1)
    with pytest.raises(UsageError, match=r"training\.dataset_path nowhere: no such file or folder"):
        check_start(missing)
    without_template = check_job(job(**assets, **CHAT), 1)
    with pytest.raises(UsageError, match=r"the tokenizer has no chat template.*set data\.chat_template"):
        check_start(without_template)
    several = job(**assets, **SEVERAL, data__weights=[1.0, 2.0])
    several.training.dataloader.num_workers = 3
    check_start(check_job(several, 1))
    template = str(ASSETS / "chat/template.jinja")
    check_start(check_job(job(**assets, **CHAT, data__chat_template=template), 1))
