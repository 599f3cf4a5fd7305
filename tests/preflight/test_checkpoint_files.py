"""A checkpoint that cannot be loaded as asked is one line before the job starts, with the file, tensor or key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from tests._helpers.layouts import add_flavor
from torchtitan_npu.components.checkpoint.folder import saved_checkpoints
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError
from torchtitan_npu.preflight.files import check_checkpoint_files
from torchtitan_npu.preflight.job_context import JobContext, build_on_meta

FLAVORS = {
    "one": {"n_layers": 1, "dim": 16, "n_heads": 2, "vocab_size": 32},
    "two": {"n_layers": 2, "dim": 16, "n_heads": 2, "vocab_size": 32},
    "wide": {"n_layers": 1, "dim": 32, "n_heads": 2, "vocab_size": 32},
}
GPT_OSS = {"n_layers": 1, "dim": 64, "moe_inter_dim": 32, "vocab_size": 32}


def job(flavor: str, folder: Path, **checkpoint: Any) -> JobContext:
    add_flavor("llama3", flavor, FLAVORS[flavor])
    config = JobConfig()
    config.model.flavor, config.job.dump_folder, config.checkpoint.enable = flavor, str(folder), True
    for key, value in checkpoint.items():
        setattr(config.checkpoint, key, value)
    return JobContext(config, 1)


def weights(flavor: str, folder: Path) -> dict[str, torch.Tensor]:
    model = build_on_meta(job(flavor, folder).config)
    return {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}


def write_dcp(flavor: str, folder: Path) -> Path:
    dcp.save(weights(flavor, folder), checkpoint_id=folder, no_dist=True)
    return folder


def write_safetensors(flavor: str, folder: Path) -> Path:
    """Write each half of the weights to a file, with an index."""
    folder.mkdir(exist_ok=True)
    adapter = Llama3StateDictAdapter(job(flavor, folder).model_args, None)
    tensors = {name: value.contiguous() for name, value in adapter.to_hf(weights(flavor, folder)).items()}
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


FORMATS: dict[str, tuple[Callable[[str, Path], Path], dict[str, Any]]] = {
    "dcp": (write_dcp, {}),
    "safetensors": (write_safetensors, {"initial_load_in_hf": True}),
}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def error_of(context: JobContext) -> str:
    with pytest.raises(UsageError) as error:
        check_checkpoint_files(context)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("form", FORMATS)
def test_weights_of_the_model_pass_and_those_of_another_do_not(form: str, tmp_path: Path) -> None:
    write, options = FORMATS[form]
    source = write("two", tmp_path / "two")
    check_checkpoint_files(job("two", tmp_path, initial_load_path=str(source), **options))
    fewer = error_of(job("one", tmp_path, initial_load_path=str(source), **options))
    assert "layers.1." in fewer and "more tensors that llama3 one lacks" in fewer
    wide = error_of(job("wide", tmp_path, initial_load_path=str(source), **options))
    assert "(32, 16)" in wide and "(32, 32) in llama3 wide: the checkpoint is of another model" in wide
    source = write("one", tmp_path / "one")
    assert "layers.1." in error_of(job("two", tmp_path, initial_load_path=str(source), **options))


@pytest.mark.parametrize(
    ("form", "file"), [("dcp", "__0_0.distcp"), ("safetensors", "b.safetensors")], ids=list(FORMATS)
)
def test_a_truncated_or_missing_file_is_named(form: str, file: str, tmp_path: Path) -> None:
    write, options = FORMATS[form]
    source = write("one", tmp_path / "source")
    context = job("one", tmp_path, initial_load_path=str(source), **options)
    data = (source / file).read_bytes()
    for size in (len(data) - 1, 30, 3):
        (source / file).write_bytes(data[:size])
        assert f"{file} " in error_of(context)
    (source / file).unlink()
    assert error_of(context).startswith(f"checkpoint.initial_load_path: {source / file} is missing")


def test_a_file_that_cannot_be_read_is_named_with_its_key(tmp_path: Path) -> None:
    initial, saved = tmp_path / "initial/.metadata", tmp_path / "checkpoint/step-1/.metadata"
    initial.mkdir(parents=True)
    for model_only in (True, False):
        context = job("one", tmp_path, initial_load_path=str(initial.parent), initial_load_model_only=model_only)
        assert error_of(context) == f"checkpoint.initial_load_path: {initial}: Is a directory"
    saved.mkdir(parents=True)
    assert error_of(job("one", tmp_path)) == f"checkpoint.folder: {saved}: Is a directory"
    (saved.parent / "manifest.json").mkdir()
    assert saved_checkpoints(saved.parents[1])[0].damage == f"{saved.parent}/manifest.json: Is a directory"


def test_an_index_cannot_point_outside_its_folder(tmp_path: Path) -> None:
    source = write_safetensors("one", tmp_path / "source")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../x.safetensors"}}))
    message = error_of(job("one", tmp_path, initial_load_path=str(source), initial_load_in_hf=True))
    assert "refers to '../x.safetensors', which is not a file of this folder" in message


def test_a_wrong_folder_is_named_with_what_it_has(tmp_path: Path) -> None:
    assert "checkpoint.initial_load_path: nowhere is not a folder" in error_of(
        job("one", tmp_path, initial_load_path="nowhere")
    )
    write_dcp("one", tmp_path / "run" / "step-5")
    assert "has no .metadata: name one of its checkpoints: step-5" in error_of(
        job("one", tmp_path, initial_load_path=str(tmp_path / "run"))
    )
    hugging_face = write_safetensors("one", tmp_path / "hf")
    assert "set checkpoint.initial_load_in_hf = true" in error_of(
        job("one", tmp_path, initial_load_path=str(hugging_face))
    )
    context = job("one", tmp_path, initial_load_in_hf=True)
    context.config.model.hf_assets_path = str(tmp_path / "run")
    assert "model.hf_assets_path" in error_of(context) and "has no .safetensors files" in error_of(context)


def test_a_resumed_job_is_checked_too(tmp_path: Path) -> None:
    write_dcp("two", tmp_path / "checkpoint" / "step-0")
    check_checkpoint_files(job("two", tmp_path))
    assert "more tensors that llama3 one lacks" in error_of(job("one", tmp_path))
    assert "checkpoint.load_step is 7; the complete checkpoints in" in error_of(job("two", tmp_path, load_step=7))


def test_mxfp4_blocks_have_the_shape_of_their_weights(tmp_path: Path) -> None:
    add_flavor("gpt_oss", "tiny", GPT_OSS)
    config = JobConfig()
    config.model.name, config.model.flavor, config.job.dump_folder = "gpt_oss", "tiny", str(tmp_path / "job")
    config.checkpoint.enable = config.checkpoint.initial_load_in_hf = True
    config.checkpoint.initial_load_in_hf_quantized = True
    config.checkpoint.initial_load_path = str(tmp_path)
    context = JobContext(config, 1)
    adapter = context.train_spec.state_dict_adapter
    assert adapter is not None
    tensors = {}
    for name, weight in adapter(context.model_args, None).to_hf(context.model.state_dict()).items():
        tensors[name] = torch.zeros(weight.shape, dtype=torch.bfloat16)
        if name.endswith("_blocks"):  # 32 numbers of 4 bits and a scale
            *rows, columns = weight.shape
            tensors[name] = torch.zeros(*rows, columns // 32, 16, dtype=torch.uint8)
            tensors[name.replace("_blocks", "_scales")] = torch.zeros(*rows, columns // 32, dtype=torch.uint8)
    assert any(name.endswith("_blocks") for name in tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint_files(context)
    config.checkpoint.initial_load_in_hf_quantized = False
    assert "_blocks is" in error_of(context)


def test_files_that_the_index_does_not_name_are_not_read(tmp_path: Path) -> None:
    source = write_safetensors("two", tmp_path / "two")
    save_file({"another.model": torch.zeros(1)}, source / "consolidated.safetensors")
    check_checkpoint_files(job("two", tmp_path, initial_load_path=str(source), initial_load_in_hf=True))
