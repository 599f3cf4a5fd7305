"""transformers loads an exported folder as it is, and computes the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from tests._helpers import layouts, qwen3_vl_models
from tests._helpers.deepseek_v32_models import model_args
from tests._helpers.hugging_face_pairs import EXPORTED, VOCABULARY, Pair, add_flavor, exported
from tests._helpers.multirank import run_on_ranks
from torchtitan_npu.errors import UsageError
from torchtitan_npu.models.hugging_face_config import hugging_face_config

LOGITS = 1e-5
"""Largest difference of a logit, relative to the largest one: some 60 sums of up to 128 float32 terms."""
PLAIN = {"attn_implementation": "eager", "experts_implementation": "eager"}

MODELS = {
    **EXPORTED,
    "deepseek_v32_yarn": Pair("deepseek_v32", model_args(original_seq_len=256, rope_factor=4.0), None),
}


def assert_equal_logits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32
    assert (ours - theirs).abs().max() <= LOGITS * theirs.abs().max()


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_transformers_loads_the_folder(model: str, tmp_path: Path) -> None:
    ours, folder = exported(MODELS[model].train_spec, MODELS[model].args, tmp_path)
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, **PLAIN, output_loading_info=True)
    assert not any(report.values()), report  # no missing, unexpected or mismatched weights
    assert GenerationConfig.from_pretrained(folder).eos_token_id is not None
    tokens = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    assert_equal_logits(ours(tokens), theirs(tokens).logits)


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@torch.no_grad()
def test_transformers_loads_qwen3_vl(moe: bool, tmp_path: Path) -> None:
    ours, folder = exported("qwen3_vl", qwen3_vl_models.model_args(moe), tmp_path)
    theirs, report = AutoModelForImageTextToText.from_pretrained(folder, **PLAIN, output_loading_info=True)
    assert not any(report.values()), report
    assert GenerationConfig.from_pretrained(folder).eos_token_id is not None
    batch = qwen3_vl_models.make_batch(3, ("ivi", "", "v"))
    assert_equal_logits(ours(**batch.ours())[batch.mask], theirs(**batch.theirs()).logits[batch.mask])


def test_the_folder_has_the_tokenizer_and_the_dtype(tmp_path: Path) -> None:
    _, folder = exported("llama3", EXPORTED["llama3"].args, tmp_path, "--dtype", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer("to be", add_special_tokens=False)["input_ids"]) == "to be"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id is not None


def test_ids_and_context_length_come_from_the_released_config(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    assets.mkdir()
    released = {"eos_token_id": [7, 9], "max_position_embeddings": 40960, "quantization_config": {"fmt": "e4m3"}}
    (assets / "config.json").write_text(json.dumps(released))
    _, folder = exported("qwen3", EXPORTED["qwen3"].args, tmp_path, "--assets", str(assets))
    config = json.loads((folder / "config.json").read_text())
    assert config["eos_token_id"] == [7, 9] and config["max_position_embeddings"] == 40960
    assert "quantization_config" not in config
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [7, 9]


def test_a_damaged_config_of_the_assets_is_one_line(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(AssertionError):  # of the exit code
        exported("llama3", EXPORTED["llama3"].args, tmp_path, "--assets", str(tmp_path))
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path / 'config.json'} is not JSON" in error and not (tmp_path / "hf").exists()


def test_a_model_that_transformers_lacks_has_no_config(tmp_path: Path, capsys: Any) -> None:
    args = EXPORTED["deepseek_v3"].changed(score_func="softmax").args
    with pytest.raises(UsageError, match="score_func = sigmoid"):
        hugging_face_config("deepseek_v3", args)
    _, folder = exported("deepseek_v3", args, tmp_path)
    assert "no config.json: transformers' DeepSeek-V3 needs score_func = sigmoid" in capsys.readouterr().out
    assert not (folder / "config.json").exists() and (folder / "tokenizer.json").exists()


def export_from_a_job(folder: str) -> None:
    import torchtitan_npu.trainer as trainer_module

    add_flavor("qwen3", EXPORTED["qwen3"].args)
    options = {
        "model.flavor": "pair",
        "job.dump_folder": folder,
        "training.steps": 1,
        "checkpoint.enable": True,
        "checkpoint.last_save_in_hf": True,
        "checkpoint.last_save_model_only": True,
    }
    trainer = trainer_module.Trainer(layouts.job_config("qwen3", {}, options))
    trainer.checkpointer.save(1, last_step=True)
    trainer.close()


def test_a_job_on_two_ranks_exports_one_copy(tmp_path: Path) -> None:
    run_on_ranks(2, export_from_a_job, str(tmp_path), process_group=False)
    folder = tmp_path / "checkpoint" / "step-1"
    assert [path.name for path in folder.rglob("*.safetensors")] == ["model-00001-of-00001.safetensors"]
    assert all(path.is_file() for path in folder.iterdir())
    _, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert AutoTokenizer.from_pretrained(folder).eos_token_id is not None
