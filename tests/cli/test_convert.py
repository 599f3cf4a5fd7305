"""``torchtitan-npu convert``: round trips, a job that starts from the result, memory use and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_npu.cli.convert.to_hf
from tests._helpers import layouts
from tests._helpers.deepseek_v32_training import SMALLER
from tests._helpers.multirank import run_on_ranks
from tests._helpers.peak_allocation import NewMemory
from tests._helpers.released_checkpoints import quantised, read_back, write
from tests._helpers.training import recording, state, train_until
from torchtitan_npu.cli.convert.command import main
from torchtitan_npu.cli.convert.from_hf import FromHuggingFace
from torchtitan_npu.cli.convert.model_pieces import build, cut

TINY = {**SMALLER, "n_layers": 3, "inter_dim": 96, "moe_inter_dim": 256}
MODELS = [("deepseek_v32", "tiny", 0), ("deepseek_v32", "tiny", 2)]
MODELS += [(layouts.TINY[name][0], name, 0) for name in ("deepseek_v3", "llama3", "qwen3", "qwen3_moe")]


@pytest.fixture(autouse=True)
def tiny_models() -> None:
    add_tiny()


def add_tiny() -> None:
    layouts.add_flavors()
    layouts.add_flavor("deepseek_v32", "tiny", TINY)


def options(model: tuple[str, str, int]) -> list[str]:
    name, flavor, depths = model
    return ["--model", name, "--flavor", flavor, *(["--mtp-layers", str(depths)] if depths else [])]


def weights_of(model: tuple[str, str, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return random weights by TorchTitan's and by Hugging Face's names, with matrices in bfloat16 as in releases."""
    without_weights = build(*model)
    generator = torch.Generator().manual_seed(0)
    ours = {}
    for name, value in without_weights.tensors.items():
        dtype = torch.bfloat16 if value.ndim > 1 else torch.float32
        ours[name] = torch.randn(value.shape, generator=generator).to(dtype)
    if without_weights.tied:
        ours["output.weight"] = ours["tok_embeddings.weight"]
    return ours, {
        name: value.clone(memory_format=torch.contiguous_format)
        for name, value in without_weights.adapter.to_hf(ours).items()
    }


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and torch.equal(actual[name], value), name


@pytest.mark.parametrize("model", MODELS, ids=lambda model: f"{model[1]} {model[0]} {model[2]}")
def test_a_round_trip_is_bit_identical(model: tuple[str, str, int], tmp_path: Path, capsys: Any) -> None:
    ours, theirs = weights_of(model)
    (tmp_path / "hf").mkdir()
    write(theirs, tmp_path / "hf", files=2)
    there, back = str(tmp_path / "new folder" / "dcp"), str(tmp_path / "back")
    assert main(["from-hf", str(tmp_path / "hf"), there, *options(model)]) == 0
    metadata: Any = FileSystemReader(there).read_metadata().state_dict_metadata
    assert {name: (value.size, value.properties.dtype) for name, value in metadata.items()} == {
        name: (value.shape, value.dtype) for name, value in ours.items()
    }
    assert main(["to-hf", there, back, *options(model)]) == 0
    assert_same(read_back(Path(back)), theirs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "new folder"]
    output = capsys.readouterr().out
    assert f"{len(ours)} tensors of {model[0]}" in output
    assert ("not written" in output and "layers.0.moe.expert_bias" in output) == (model[1] == "qwen3_moe")


RELEASED = ("deepseek_v32", "tiny", 1)


def train_from(folder: str, dump_folder: str) -> dict[str, Tensor]:
    """Train a job that loads ``folder`` and saves a checkpoint. Return its initial weights."""
    add_tiny()
    job = {
        "model.name": "deepseek_v32",
        "model.flavor": "tiny",
        "mtp.layers": 1,
        "job.dump_folder": dump_folder,
        "checkpoint.enable": True,
        "checkpoint.initial_load_path": folder,
        "checkpoint.interval": 1,
    }
    with recording(layouts.job_config("deepseek_v3", {"ep": 2}, job)) as (trainer, _):
        weights = state(trainer.model_parts)
        train_until(trainer, 1)
    return weights


def test_a_job_loads_the_checkpoint_and_its_own_is_exported(tmp_path: Path) -> None:
    """From FP8 weights, through a job with expert parallelism, to an export without optimizer states."""
    _, theirs = weights_of(RELEASED)
    files, expected = quantised(theirs)
    (tmp_path / "hf").mkdir()
    write(files, tmp_path / "hf")
    dcp, back = str(tmp_path / "dcp"), str(tmp_path / "back")
    assert main(["from-hf", str(tmp_path / "hf"), dcp, "--quantized", *options(RELEASED)]) == 0
    weights, _ = run_on_ranks(2, train_from, dcp, str(tmp_path / "job"), process_group=False)
    model = build(*RELEASED)
    assert_same(weights, {name: value.float() for name, value in model.from_hf(expected).items()})

    trained = str(tmp_path / "job/checkpoint/step-1")
    assert main(["to-hf", trained, back, "--dtype", "bfloat16", *options(RELEASED)]) == 0
    exported = read_back(Path(back))
    assert exported.keys() == theirs.keys()
    for name, value in exported.items():
        assert value.dtype == (torch.float32 if "e_score_correction_bias" in name else torch.bfloat16), name
        # The first step changes a weight by the learning rate, 8e-4, an expert bias by 1e-3. bfloat16 has 8 bits.
        moved = (value.float() - expected[name].float()).abs()
        assert (moved <= 1.01e-3 + expected[name].float().abs() * 2**-8).all(), name


def test_fp8_weights_as_deepseek_releases_them(tmp_path: Path) -> None:
    """Names, shapes and elements are the release's, values are within half a step, and a round trip keeps them."""
    _, theirs = weights_of(RELEASED)
    released, _ = quantised(theirs)
    (tmp_path / "hf").mkdir()
    write(theirs, tmp_path / "hf")
    hf, dcp, fp8, dcp_again, again = (str(tmp_path / name) for name in ("hf", "dcp", "fp8", "dcp2", "again"))
    assert main(["from-hf", hf, dcp, *options(RELEASED)]) == 0
    assert main(["to-hf", dcp, fp8, "--dtype", "float8_e4m3fn", *options(RELEASED)]) == 0
    exported = read_back(Path(fp8))
    assert exported.keys() == released.keys()
    for name, value in released.items():
        assert exported[name].shape == value.shape, name
        assert (exported[name].dtype == torch.float8_e4m3fn) == (value.dtype == torch.float8_e4m3fn), name
    values = dequantised(exported)
    for name, value in values.items():
        error = (value - theirs[name].float()).abs()
        smallest = scales_of(exported, name) * 2**-10  # half of the smallest element
        assert (error <= torch.maximum(theirs[name].float().abs() * 2**-4, smallest)).all(), name
    config = json.loads((Path(fp8) / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128] and config["dtype"] == "bfloat16"

    assert main(["from-hf", fp8, dcp_again, "--quantized", *options(RELEASED)]) == 0
    assert main(["to-hf", dcp_again, again, "--dtype", "float8_e4m3fn", *options(RELEASED)]) == 0
    assert_same(dequantised(read_back(Path(again))), values)


def scales_of(weights: dict[str, Tensor], name: str) -> Tensor:
    """Return the scale of each element, a power of two."""
    scales = weights[f"{name}_scale_inv"]
    assert torch.equal(scales.frexp()[0], torch.full_like(scales, 0.5)), name
    rows, columns = weights[name].shape
    return scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]


def dequantised(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the values of the FP8 weights."""
    names = [name.removesuffix("_scale_inv") for name in weights if name.endswith("_scale_inv")]
    return {name: weights[name].float() * scales_of(weights, name) for name in names}


def test_fp8_is_deepseeks_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dcp").mkdir()
    command = ["to-hf", str(tmp_path / "dcp"), str(tmp_path / "back"), "--dtype", "float8_e4m3fn"]
    assert main([*command, "--model", "llama3", "--flavor", "debugmodel"]) == 2
    assert "--dtype float8_e4m3fn is DeepSeek's format, which llama3" in capsys.readouterr().err


def test_conversion_takes_a_fraction_of_the_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flavors: Any = get_train_spec("deepseek_v32").model_args
    flavors["tiny"].vocab_size = 256  # as in large models, most weights are expert weights
    _, theirs = weights_of(RELEASED)
    (tmp_path / "hf").mkdir()
    write(theirs, tmp_path / "hf")
    monkeypatch.setattr(torchtitan_npu.cli.convert.to_hf, "FILE_BYTES", 100_000)
    pieces = cut(build(*RELEASED))
    model = sum(value.nbytes for value in theirs.values())
    stacked, rest = (
        max(sum(theirs[name].nbytes for name in piece.hf) for piece in pieces if piece.stacked == is_stacked)
        for is_stacked in (True, False)
    )
    expert = max(theirs[name].nbytes for piece in pieces if piece.stacked for name in piece.hf)
    with NewMemory() as there:
        assert main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "dcp"), *options(RELEASED)]) == 0
    # DCP keeps the last chunk of each tensor in a file, here three, and one weight is in flight.
    assert there.peak <= rest + 4 * expert < model / 4
    with NewMemory() as back:
        assert main(["to-hf", str(tmp_path / "dcp"), str(tmp_path / "back"), *options(RELEASED)]) == 0
    assert back.peak <= stacked + 100_000 + 2 * expert < model / 4  # one being read, one being written
    sizes = [path.stat().st_size for path in (tmp_path / "back").glob("*.safetensors")]
    largest = max(value.nbytes for value in theirs.values())
    assert len(sizes) > 3 and max(sizes) <= max(100_000, largest) + 10_000  # plus a header


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, ["--model", "deepseek_v23", "--flavor", "tiny"], "--model deepseek_v23 .*did you mean 'deepseek_v"),
        ({}, ["--model", "deepseek_v32", "--flavor", "tinny"], "--flavor tinny .*did you mean 'tiny'"),
        (
            {},
            ["--model", "llama4", "--flavor", "llama4"],
            r"no Hugging Face name for layers\.0\.feed_forward\.w1\.weight",
        ),
        ({}, ["--model", "llama3", "--flavor", "llama3", "--mtp-layers", "1"], "--mtp-layers must be 0"),
        ({}, ["--model", "deepseek_v32", "--flavor", "debugmodel"], r"weight is \(.*\) in .* and \(.*--flavor"),
        ({}, [*options(("deepseek_v32", "tiny", 2))], r"no model\.layers\.4\..*--mtp-layers"),
        ({}, [*options(RELEASED), "--quantized"], "no quantized weights"),
        ({"lm_head.weight": None}, options(RELEASED), "no lm_head.weight"),
        ({"model.norm.weight": (63,)}, options(RELEASED), r"model.norm.weight is \(63,\) in .* and \(64,\)"),
        ({"model.layers.9.mlp.gate.weight": (8, 64)}, options(RELEASED), r"model.layers.9.mlp.gate.weight and 0 more"),
        ({"model.layers.0.mlp.up_proj.weight_scale_inv": (1, 1)}, options(RELEASED), "add --quantized"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mismatch_is_one_line(
    changes: dict[str, Any], arguments: list[str], message: str, tmp_path: Path, capsys: Any
) -> None:
    _, theirs = weights_of(RELEASED)
    for name, shape in changes.items():
        theirs.pop(name, None)
        if shape is not None:
            theirs[name] = torch.zeros(shape)
    (tmp_path / "hf").mkdir()
    write(theirs, tmp_path / "hf")
    capsys.readouterr()
    assert main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "dcp"), *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("torchtitan-npu convert: ") and error.count("\n") == 1
    assert re.search(message, error), error
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_existing_folders_are_kept(tmp_path: Path, capsys: Any) -> None:
    source, target = tmp_path / "hf", tmp_path / "dcp"
    source.mkdir()
    save_file({"lm_head.weight": torch.zeros(1)}, source / "model.safetensors")
    for existing in (target, target.with_name("dcp.partial")):
        existing.mkdir()
        (existing / "precious").write_text("kept")
        assert main(["from-hf", str(source), str(target), *options(RELEASED)]) == 2
        assert f"{existing} exists" in capsys.readouterr().err
        assert (existing / "precious").read_text() == "kept"
        (existing / "precious").unlink()
        existing.rmdir()
    assert main(["to-hf", str(source), str(target), *options(RELEASED)]) == 2
    assert "no .metadata" in capsys.readouterr().err and not target.exists()


def test_an_interrupted_conversion_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, theirs = weights_of(RELEASED)
    (tmp_path / "hf").mkdir()
    write(theirs, tmp_path / "hf")
    read_slice = FromHuggingFace.read_slice

    def interrupt(self: Any, piece: Any, number: int) -> Tensor:
        if number == 5:
            assert (tmp_path / "dcp.partial").exists() and not (tmp_path / "dcp").exists()
            raise KeyboardInterrupt
        return read_slice(self, piece, number)

    monkeypatch.setattr(FromHuggingFace, "read_slice", interrupt)
    assert main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "dcp"), *options(RELEASED)]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
