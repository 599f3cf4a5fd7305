"""``torchtitan-npu evaluate``: log-probabilities are those of transformers, in a text and in the harness's tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests._helpers.hugging_face_pairs import EXPORTED, exported
from torchtitan_npu.cli.evaluate import main
from torchtitan_npu.cli.inference.scoring import windows
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError

TEXT = "To be, or not to be, that is the question.\nWhether 'tis nobler in the mind to suffer the slings and arrows."
SEQ_LEN = 16
LOGITS = 1e-5
"""Largest difference of a log-probability in float32, as of a logit."""
TOKENIZER = shipped("torchtitan_npu/assets/tokenizer")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export a small Llama 3 with the vocabulary of the tokenizer."""
    folder = tmp_path_factory.mktemp("llama3")
    pair = EXPORTED["llama3"].changed(vocab_size=2048)
    exported(pair.train_spec, pair.args, folder)
    job = ['[model]\nname = "llama3"\nflavor = "pair"', f"[training]\nseq_len = {SEQ_LEN}"]
    (folder / "job.toml").write_text("\n".join([*job, 'mixed_precision_param = "float32"']))
    (folder / "text.txt").write_text(TEXT)
    return folder


def command(folder: Path, *arguments: str) -> list[str]:
    return [
        *("--config", str(folder / "job.toml"), "--checkpoint", str(folder / "hf")),
        *("--model.hf_assets_path", TOKENIZER, *arguments),
    ]


def tokens_of(text: str, add_bos: bool = True) -> list[int]:
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(TOKENIZER).encode(text, add_bos=add_bos, add_eos=False)


@torch.no_grad()
def log_probabilities(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Return transformers' log-probability of each token but the first."""
    model = AutoModelForCausalLM.from_pretrained(folder / "hf")
    logits = model(torch.tensor([tokens[:-1]])).logits[0].double()
    return logits.log_softmax(dim=-1).gather(-1, torch.tensor(tokens[1:]).unsqueeze(-1)).squeeze(-1)


def test_windows_predict_each_token_once() -> None:
    pairs = list(windows(list(range(12)), 5))
    assert pairs == [([0], [1, 2, 3, 4, 5]), ([5], [6, 7, 8, 9, 10]), ([10], [11])]


def test_perplexity_of_eager_and_converted(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["--text", str(checkpoint / "text.txt"), "--converters", "npu_rms_norm,npu_rope,npu_attention"]
    result = tmp_path / "result.json"
    assert main(command(checkpoint, *arguments, "--batch", "3", "--json", str(result))) == 0
    tokens = tokens_of(TEXT)
    parts = [log_probabilities(checkpoint, context + target) for context, target in windows(tokens, SEQ_LEN)]
    assert len(parts) > 2 and len(parts[-1]) < SEQ_LEN  # the last one is padded in its batch
    expected = -torch.cat(parts).mean().item()
    rows = json.loads(result.read_text())["perplexity"]
    eager, converted = rows["no converters"], rows["npu_rms_norm, npu_rope, npu_attention"]
    assert eager["tokens"] == converted["tokens"] == len(tokens) - 1
    assert eager["loss"] == pytest.approx(expected, abs=LOGITS) == converted["loss"]
    assert 0 < converted["largest difference of a log-probability"] < 10 * LOGITS
    assert eager["perplexity"] == pytest.approx(2.718281828459045 ** eager["loss"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("no converters: perplexity ") and "largest difference" in lines[-1]


TASK = """\
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/questions.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: " "
metric_list: [{metric: acc}]
"""
QUESTIONS = [
    {"question": "To be, or not to", "choices": ["be", "see", "question"], "answer": 0},
    {"question": "that is", "choices": ["nobler", "the mind", "suffer"], "answer": 1},
    {"question": "Whether 'tis nobler in the", "choices": ["arrows", "mind", "slings and"], "answer": 2},
]


def test_a_task_of_the_harness(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    (tmp_path / "task.yaml").write_text(TASK.replace("FOLDER", str(tmp_path)))
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    result = tmp_path / "result.json"
    arguments = ["--tasks", "local_choice", "--tasks-folder", str(tmp_path), "--json", str(result), "--batch", "2"]
    assert main(command(checkpoint, *arguments)) == 0
    right = []
    for one in QUESTIONS:
        context = tokens_of(one["question"])
        totals = []
        for choice in one["choices"]:
            text = tokens_of(f"{one['question']} {choice}")
            totals.append(log_probabilities(checkpoint, text)[len(context) - 1 :].sum().item())
        right.append(totals.index(max(totals)) == one["answer"])
    assert json.loads(result.read_text())["tasks"]["local_choice"]["acc,none"] == pytest.approx(sum(right) / 3)


def test_the_harness_interface(checkpoint: Path) -> None:
    from lm_eval.api.instance import Instance

    from torchtitan_npu.cli.inference.generation import Sampling, generate
    from torchtitan_npu.cli.inference.harness import HarnessModel
    from torchtitan_npu.cli.inference.loading import load_model, read_config

    model = load_model(
        read_config(*[str(checkpoint / "job.toml"), ["--model.hf_assets_path", TOKENIZER]]), checkpoint / "hf"
    )
    harness = HarnessModel(model, batch=2)

    def requests(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
        return [Instance(kind, {}, one, number) for number, one in enumerate(arguments)]

    scored = harness.loglikelihood(requests("loglikelihood", ("To be", " or not"), ("", "that is"), ("To ", "be")))
    whole, context = tokens_of("To be or not"), tokens_of("To be")
    expected = [log_probabilities(checkpoint, whole)[len(context) - 1 :].sum().item()]
    expected.append(log_probabilities(checkpoint, tokens_of("that is")).sum().item())  # after the bos token
    assert [total for total, _ in scored[:2]] == pytest.approx(expected, abs=10 * LOGITS)
    texts = (TEXT, "that is", TEXT[:200])  # of several windows, of one, and of some whose last is padded
    rolling = harness.loglikelihood_rolling(requests("loglikelihood_rolling", *((text,) for text in texts)))
    expected = [
        sum(log_probabilities(checkpoint, a + b).sum().item() for a, b in windows(tokens_of(text), SEQ_LEN))
        for text in texts
    ]
    assert rolling == pytest.approx(expected, abs=100 * LOGITS)
    options = {"until": ["\n\n"], "max_gen_toks": 4}
    text = harness.generate_until(requests("generate_until", ("To be", options)))
    assert text == [model.tokenizer.decode(generate(model, [context], Sampling(4)).tokens[0])]
    with pytest.raises(UsageError, match="max_gen_toks"):
        harness.generate_until(requests("generate_until", ("To be", {"max_gen_toks": SEQ_LEN})))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --text and --tasks is required"),
        (["--text", "nowhere.txt"], "nowhere.txt"),
        (["--tasks", "x", "--converters", "npu_rope"], "--converters needs --text"),
        (["--tasks", "x", "--tasks-folder", "nowhere"], "--tasks-folder nowhere is not a folder"),
        (["--text", "job.toml", "--batch", "0"], "--batch must be at least 1"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, checkpoint: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoint)
    code: Any = None
    try:
        code = main(command(checkpoint, *arguments))
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1, error
