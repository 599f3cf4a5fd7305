"""``torchtitan-npu convert`` with damaged checkpoints: one line that names file and tensor, exit code 2, no output."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests._helpers.damaged_checkpoints import CALLED, EMBEDDING, FILES, Damage, dcp_damages, safetensors_damages
from tests._helpers.released_checkpoints import INDEX, quantised, read_back, write
from tests.cli.test_convert import RELEASED, add_tiny, options, weights_of
from torchtitan_npu.cli.convert.command import main
from torchtitan_npu.components.checkpoint.folder import Manifest, file_record

MODEL = ("llama3", "llama3", 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the same good weights in Hugging Face's format and as a distributed checkpoint."""
    add_tiny()
    folder = tmp_path_factory.mktemp("good")
    (folder / "hf").mkdir()
    write(weights_of(MODEL)[1], folder / "hf", files=2)
    assert main(["from-hf", str(folder / "hf"), str(folder / "dcp"), *options(MODEL)]) == 0
    return {"from-hf": folder / "hf", "to-hf": folder / "dcp"}


def check(command: str, source: Path, damage: Damage, capsys: Any, *further: str) -> None:
    capsys.readouterr()
    target = source.parent / "new" / "target"
    code = main([command, str(source), str(target), *(further or options(MODEL))])
    # Python prints this line itself, after a pickle that asks for terabytes
    error = capsys.readouterr().err.replace("SystemError: deallocated bytearray object has exported buffers\n", "")
    if code == 0 and damage.may_pass:
        assert target.is_dir()
        return
    assert code == 2, error
    assert error.startswith("torchtitan-npu convert: ") and error.count("\n") == 1 and error.endswith("\n"), error
    assert len(error) < 1000 and "Traceback" not in error
    assert all(part in error for part in damage.named), error
    assert not (source / CALLED).exists()
    assert not target.parent.exists() and not (source.parent / "target.partial").exists()


DAMAGES = {"from-hf": list(safetensors_damages()), "to-hf": list(dcp_damages())}
CASES = [
    pytest.param(command, damage, id=f"{command} {damage.name}", marks=[pytest.mark.slow] if damage.repeats else [])
    for command, damages in DAMAGES.items()
    for damage in damages
]


@pytest.mark.parametrize(("command", "damage"), CASES)
def test_a_damaged_checkpoint_is_one_line(
    command: str, damage: Damage, folders: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders[command], source)
    damage.apply(source)
    check(command, source, damage, capsys)


def remove_a_scale(files: dict[str, Tensor], scale: str) -> None:
    del files[scale]


def widen_a_scale(files: dict[str, Tensor], scale: str) -> None:
    files[scale] = torch.ones(7, 7)


def spoil_a_scale(files: dict[str, Tensor], scale: str) -> None:
    files[scale].view(-1)[0] = float("nan")


@pytest.mark.parametrize("spoil", [remove_a_scale, widen_a_scale, spoil_a_scale])
def test_damaged_scales_are_one_line(spoil: Any, tmp_path: Path, capsys: Any) -> None:
    add_tiny()
    source = tmp_path / "source"
    source.mkdir()
    files, _ = quantised(weights_of(RELEASED)[1])
    scale = next(name for name in files if name.endswith("_scale_inv"))
    spoil(files, scale)
    write(files, source, files=2)
    named = (".safetensors", scale.removesuffix("_scale_inv"))
    check("from-hf", source, Damage("", lambda folder: None, named), capsys, *options(RELEASED), "--quantized")


def test_a_flipped_bit_is_found_by_the_manifest(folders: dict[str, Path], tmp_path: Path, capsys: Any) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders["to-hf"], source)
    data = source / "__0_0.distcp"
    Manifest(1, "run", 1, False, {}, {data.name: file_record(data)}).write(source)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    check("to-hf", source, Damage("", lambda folder: None, (data.name, "its checksum differs")), capsys)


def test_a_weight_too_large_for_the_dtype_is_one_line(tmp_path: Path, capsys: Any) -> None:
    add_tiny()
    theirs = weights_of(MODEL)[1]
    theirs[EMBEDDING][0, 0] = 1e6
    (tmp_path / "hf").mkdir()
    write(theirs, tmp_path / "hf", files=2)
    assert main(["from-hf", str(tmp_path / "hf"), str(tmp_path / "dcp"), *options(MODEL)]) == 0
    named = ("__0_0.distcp", "tok_embeddings.weight is too large for --dtype torch.float16")
    check("to-hf", tmp_path / "dcp", Damage("", lambda f: None, named), capsys, *options(MODEL), "--dtype", "float16")


def test_without_an_index_all_files_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders["from-hf"], source)
    (source / INDEX).unlink()
    assert main(["from-hf", str(source), str(tmp_path / "dcp"), *options(MODEL)]) == 0
    assert main(["to-hf", str(tmp_path / "dcp"), str(tmp_path / "back"), *options(MODEL)]) == 0
    assert read_back(tmp_path / "back").keys() == read_back(folders["from-hf"]).keys()
    assert len(list(source.iterdir())) == len(FILES)


@pytest.mark.parametrize("layers", ["-1", "1000000000000"])
def test_absurd_numbers_of_layers_are_one_line(layers: str, folders: dict[str, Path], capsys: Any) -> None:
    arguments = ["--model", "deepseek_v32", "--flavor", "tiny", "--mtp-layers", layers]
    damage = Damage("", lambda folder: None, ("--mtp-layers is", "it must be at"))
    check("from-hf", folders["from-hf"], damage, capsys, *arguments)
