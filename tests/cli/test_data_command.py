"""``torchtitan-npu data``: the rows of a job with tokens, text, boundaries and labels."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchtitan_npu.cli import data
from torchtitan_npu.cli.main import main

CHAT = "train_configs/llama3_chat_debugmodel.toml"


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["data", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_conversations(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "SHOWN_CHARACTERS", 10_000)
    lines = shown(capsys, "--config", CHAT, "--show", "3")
    assert lines[0].startswith("training.dataset: chat, field 'messages', 106920 bytes in 1 files, shuffled by seed 0")
    assert [line for line in lines if line.startswith("row")] == [f"row {n}: 128 tokens" for n in (1, 2, 3)]
    documents = [line for line in lines if line.startswith("  document")]
    texts = [line for line in lines if line.startswith("    text")]
    labels = [line for line in lines if line.startswith("    labels")]
    assert len(documents) == len(texts) == len(labels) >= 3
    for text, label in zip(texts, labels, strict=True):
        assert "user: " in text and "user: " not in label
        answers = re.findall(r"assistant: (.*?<\|end_of_text\|>)", text)
        assert (
            label.replace("' ", "'") == f"    labels {', '.join(map(repr, answers))}"
        )  # a space is of the first token
    assert any(line.endswith("padding, without labels") for line in lines)


def test_texts_of_an_own_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": f"text {n} " * 9}) + "\n" for n in range(9)))
    own = ["--training.dataset", "text", "--training.dataset_path", str(tmp_path / "a.jsonl"), "--data.field", "body"]
    base = ["--config", "train_configs/llama3_debugmodel.toml", "--show", "1", *own, "--data.no-shuffle"]
    lines = shown(capsys, *base)
    assert lines[1] == "row 1: 128 tokens"
    assert "'<|begin_of_text|>text 0 text 0" in lines[4]
    ends = [int(re.findall(r"to (\d+):", line)[0]) for line in lines if line.startswith("  document")]
    assert ends[-1] == 127 and len(ends) > 3


def test_validation_data_and_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--config", CHAT, "--validation", "--show", "1000"]) == 1
    output = capsys.readouterr()
    rows = len(re.findall("^row", output.out, re.MULTILINE))
    assert output.err == f"the data has {rows} rows of 128 tokens\n" and 10 < rows < 60
    assert "in 1 files, in order" in output.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--show", "0"], "--show 0: must be at least 1"),
        (["--training.dataset_path", "nowhere.jsonl"], "training.dataset_path nowhere.jsonl: no such file or folder"),
        (["--data.field", "body"], 'chat.jsonl, line 1: no list of messages under "body"'),
        (["--npu.no-layout_independent_data"], "npu.layout_independent_data must be true with training.dataset 'chat'"),
    ],
)
def test_errors_are_those_of_training(capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str) -> None:
    assert main(["data", "--config", CHAT, *arguments]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and complaint in error
