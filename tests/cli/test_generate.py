"""``torchtitan-npu generate``: the text of transformers, with and without the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests._helpers.hugging_face_pairs import EXPORTED, POSITIONS, exported
from torchtitan_npu.cli.generate import main
from torchtitan_npu.cli.inference.generation import (
    Generated,
    InvalidBenchmark,
    Sampling,
    check_forwards,
    check_tokens,
    generate,
)
from torchtitan_npu.cli.inference.loading import InferenceModel, for_inference, load_model
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.shipped_files import shipped

VOCABULARY = 2048
NEW = 10
GREEDY = Sampling(NEW, stops_at_eos=False)
MODELS = ("llama3", "qwen3_tied", "qwen3_moe", "deepseek_v3_yarn", "deepseek_v32", "glm_moe_dsa")
DENSE = ["npu_rms_norm", "npu_rope", "npu_attention"]
FUSED = {"llama3": DENSE, "qwen3_moe": [*DENSE, "npu_permute", "npu_gmm"], "deepseek_v32": ["npu_rope", "npu_dsa"]}


def job(pair: str) -> JobConfig:
    config = JobConfig()
    config.model.name, config.model.flavor = EXPORTED[pair].train_spec, "pair"
    config.model.hf_assets_path = shipped("torchtitan_npu/assets/tokenizer")
    config.training.seq_len, config.training.mixed_precision_param = POSITIONS, "float32"
    config.comm.trace_buf_size = 0
    return config


def prompts() -> list[list[int]]:
    """Return prompts of different lengths. The longest has more tokens than sparse attention selects."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in (9, 3, 14)]


def model_args(pair: str) -> Any:
    """Return the model's arguments, with the vocabulary of the tokenizer."""
    return EXPORTED[pair].changed(vocab_size=VOCABULARY).args


def export(pair: str, folder: Path) -> Path:
    exported(EXPORTED[pair].train_spec, model_args(pair), folder)
    return folder / "hf"


def text_of_transformers(folder: Path) -> list[list[int]]:
    """Return the continuation of each prompt, without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager")
    model.generation_config.eos_token_id = None
    rows = [torch.tensor([prompt]) for prompt in prompts()]
    return [model.generate(row, max_new_tokens=NEW, do_sample=False)[0, row.shape[1] :].tolist() for row in rows]


@pytest.mark.parametrize("pair", MODELS)
def test_greedy_text_is_that_of_transformers(pair: str, tmp_path: Path) -> None:
    folder = export(pair, tmp_path)
    model = load_model(job(pair), tmp_path / "dcp" if pair == "deepseek_v32" else folder)
    text = generate(model, prompts(), GREEDY).tokens
    assert text == text_of_transformers(folder)
    assert text == generate(model, prompts(), GREEDY, use_cache=False).tokens
    rows = torch.tensor([prompts()[2] + text[2]])
    complete = model.logits(rows)[0]
    prefix = [model.logits(rows[:, :5]), model.logits(rows[:, :9], start=5), model.logits(rows, start=9)]
    assert (torch.cat(prefix, dim=1)[0] - complete).abs().max() <= 1e-5 * complete.abs().max()
    if pair in FUSED:
        config = job(pair)
        config.model.converters = FUSED[pair]
        converted = load_model(config, folder)
        assert generate(converted, prompts(), GREEDY).tokens == text
        assert generate(converted, prompts()[:1], GREEDY).tokens == text[:1]  # no padding: the converters' attention


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> InferenceModel:
    return load_model(job("llama3"), export("llama3", tmp_path_factory.mktemp("llama3")))


def test_sampled_text_depends_on_the_seed_and_not_on_the_batch(llama: InferenceModel) -> None:
    sampling = Sampling(NEW, temperature=0.7, top_p=0.9, seed=3, stops_at_eos=False)
    together = generate(llama, prompts(), sampling).tokens
    assert together == [generate(llama, [prompt], sampling, n).tokens[0] for n, prompt in enumerate(prompts())]
    assert together != generate(llama, prompts(), Sampling(NEW, 0.7, 0.9, seed=4, stops_at_eos=False)).tokens


def test_top_p_draws_from_the_most_probable_tokens() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    probabilities = (logits / 2).softmax(dim=-1)[0]  # tokens 1, 3, 2, 0: 0.455, 0.276, 0.167, 0.102
    sampling, generators = Sampling(temperature=2.0, top_p=0.7), [torch.Generator().manual_seed(0)]
    drawn = torch.cat([sampling.choose(logits, generators) for _ in range(4000)])
    counts = torch.bincount(drawn, minlength=4) / 4000
    expected = torch.tensor([0, probabilities[1], 0, probabilities[3]]) / (probabilities[1] + probabilities[3])
    # five standard deviations of a count
    assert ((counts - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt()).all()


def test_text_ends_before_the_end_of_text_token(llama: InferenceModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = generate(llama, prompts(), GREEDY).tokens
    monkeypatch.setattr(llama.tokenizer, "eos_id", text[0][4])
    ended = generate(llama, prompts(), Sampling(NEW)).tokens
    assert ended == [row[: row.index(text[0][4])] if text[0][4] in row else row for row in text]


def write_job(folder: Path) -> list[str]:
    lines = ['[model]\nname = "llama3"\nflavor = "pair"', f"[training]\nseq_len = {POSITIONS}"]
    (folder / "job.toml").write_text("\n".join([*lines, 'mixed_precision_param = "float32"']))
    assets = shipped("torchtitan_npu/assets/tokenizer")
    return ["--config", str(folder / "job.toml"), "--model.hf_assets_path", assets]


def test_the_command(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = export("llama3", tmp_path)
    command = [*write_job(tmp_path), "--checkpoint", str(folder), "--max-new-tokens", "4"]
    (tmp_path / "prompts.txt").write_text("To be\nor not to be, that is\n")
    capsys.readouterr()
    assert main([*command, "--prompts", str(tmp_path / "prompts.txt"), "--json", "--batch", "1"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["To be", "or not to be, that is"]
    model = load_model(job("llama3"), folder)
    for row in rows:
        again = generate(model, [model.tokenizer.encode(row["prompt"])], Sampling(4)).tokens[0]
        assert row["tokens"] == again and row["text"] == model.tokenizer.decode(again)
    assert main([*command, "--prompt", "To be"]) == 0
    assert capsys.readouterr().out == f"To be{rows[0]['text']}\n"
    assert main([*command, "--prompt", "To be", "--benchmark"]) == 0
    line = capsys.readouterr().out
    assert line.startswith("cpu, float32, 1 rows, ") and "prefill" in line and "decode" in line

    def skip_the_model(self: InferenceModel, rows: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return torch.zeros(len(rows), 1, VOCABULARY)

    monkeypatch.setattr(InferenceModel, "logits", skip_the_model)
    assert main([*command, "--prompt", "To be", "--benchmark"]) == 1
    assert "the benchmark does not count: the model ran over [] tokens" in capsys.readouterr().err


def test_only_logits_of_the_last_token_are_computed(llama: InferenceModel) -> None:
    counts: list[int] = []
    hook = llama.model.output.register_forward_hook(lambda _, args, logits: counts.append(logits.shape[1]))
    generate(llama, prompts(), Sampling(3, stops_at_eos=False))
    hook.remove()
    assert counts == [1, 1, 1]


def test_a_benchmark_counts_only_generated_tokens(llama: InferenceModel) -> None:
    check_forwards([14, 1, 1], 14, 3, tp=1)
    check_forwards([14, 2, 2], 13, 3, tp=2)
    with pytest.raises(InvalidBenchmark, match="one by one"):
        check_forwards([14, 2], 14, 3, tp=1)  # two tokens at once
    text = generate(llama, prompts(), GREEDY)
    check_tokens(llama, prompts(), text)
    changed = [list(row) for row in text.tokens]
    changed[1][6] = (changed[1][6] + 1) % VOCABULARY
    with pytest.raises(InvalidBenchmark, match="token 7 of a row"):
        check_tokens(llama, prompts(), Generated(changed))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "nowhere"], "--checkpoint nowhere is not a folder"),
        (["--checkpoint", "."], "--checkpoint . has neither .metadata nor .safetensors files"),
        (
            ["--model.flavor", "debugmodel", "--checkpoint", "damaged"],
            "--checkpoint: damaged/.metadata: Is a directory",
        ),
        (["--checkpoint", ".", "--top-p", "0.5"], "--top-p needs --temperature"),
        (["--checkpoint", ".", "--max-new-tokens", "0"], "--max-new-tokens must be at least 1"),
        (["--checkpoint", ".", "--training.seqlen", "9"], "training.seqlen"),
        (["--checkpoint", ".", "--model.name", "qwen3_vl"], "model.name qwen3_vl: there is no cache"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bad_arguments_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged/.metadata").mkdir(parents=True)
    code = None
    try:
        code = main([*write_job(tmp_path), "--prompt", "x", *arguments])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1, error


@pytest.mark.parametrize(("shard", "expected"), [(3, 12), (-1, -1)])
def test_stages_and_parts_of_sequences_shard_the_weights(shard: int, expected: int) -> None:
    config = job("llama3")
    config.parallelism.data_parallel_shard_degree = shard
    config.parallelism.pipeline_parallel_degree = config.parallelism.context_parallel_degree = 2
    found = for_inference(config, world_size=12).parallelism
    assert found.data_parallel_shard_degree == expected
    assert found.pipeline_parallel_degree == found.context_parallel_degree == 1
