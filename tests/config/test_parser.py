"""Parsing of a job: command line over file over defaults, and clear errors for unknown sections, keys and values."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan_npu.config.parser import JobConfigManager
from torchtitan_npu.config.shipped_files import PACKAGE, shipped, train_configs
from torchtitan_npu.errors import UsageError
from torchtitan_npu.platform import job_for

TOKENIZER = ["--model.hf_assets_path", "torchtitan_npu/assets/tokenizer"]


def parse(tmp_path: Path, toml: str, *args: str):
    file = tmp_path / "job.toml"
    file.write_text(toml)
    return JobConfigManager().parse_args(["--job.config_file", str(file), *TOKENIZER, *args])


def test_command_line_over_file_over_defaults(tmp_path: Path) -> None:
    toml = (
        '[training]\nsteps = 7\nseq_len = 64\n[npu]\nlayout_independent_data = false\n[model]\nconverters = ["a", "b"]'
    )
    config = parse(tmp_path, toml, "--training.seq_len", "32")
    assert (config.training.steps, config.training.seq_len) == (7, 32)
    assert config.npu.layout_independent_data is False and config.npu.strict_limits is False
    assert config.model.converters == ["a", "b"]
    assert parse(tmp_path, toml, "--model.converters=").model.converters == []


def test_the_cpu_defaults_to_float32_and_determinism(tmp_path: Path) -> None:
    config = parse(tmp_path, "")
    assert config.training.mixed_precision_param == "float32" and config.debug.deterministic is True
    config = parse(tmp_path, '[training]\nmixed_precision_param = "bfloat16"\n[debug]\ndeterministic = false')
    assert config.training.mixed_precision_param == "bfloat16" and config.debug.deterministic is False


def test_a_job_planned_for_the_npu_has_its_defaults(tmp_path: Path) -> None:
    assert parse(tmp_path, "").npu.bypass_codegen == "off"
    with job_for("npu"):
        assert parse(tmp_path, "").npu.bypass_codegen == "inductor"


def test_a_custom_config_module_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_options.py").write_text(
        "from dataclasses import dataclass, field\n"
        "@dataclass\nclass Mine:\n    colour: str = 'red'\n"
        "@dataclass\nclass JobConfig:\n    mine: Mine = field(default_factory=Mine)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = parse(tmp_path, '[job]\ncustom_config_module = "my_options"\n[mine]\ncolour = "blue"')
    assert config.mine.colour == "blue" and config.npu.layout_independent_data is True
    with pytest.raises(UsageError, match=r"unknown key 'mine.color'; did you mean 'mine.colour'\?"):
        parse(tmp_path, '[job]\ncustom_config_module = "my_options"\n[mine]\ncolor = "blue"')


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[trainig]\nsteps = 1", "unknown section 'trainig'; did you mean 'training'?"),
        (
            "[training]\nsteps = 1\nseq_length = 3",
            "unknown key 'training.seq_length'; did you mean 'training.seq_len'?",
        ),
        ("[model]\ntensor_parallel_degree = 2", "there is 'parallelism.tensor_parallel_degree'"),
        ("[npu]\nlayout_independant_data = true", "did you mean 'npu.layout_independent_data'?"),
        ("steps = 3", "unknown key 'steps'; there is 'training.steps'"),
        ("training = 3", "'training' is a section, not a key"),
        ("[training.steps]\nx = 1", "'training.steps' is a key, not a section"),
        ('[training]\nsteps = "ten"', "training.steps = 'ten' is not int"),
        ("[training]\nsteps = true", "training.steps = True is not int"),
        ('[model]\nconverters = "npu_rms_norm"', "model.converters = 'npu_rms_norm' is not list[str]"),
        ('[activation_checkpoint]\nmode = "selectiv"', "did you mean 'selective'?"),
        ("[optimizer]\nlr = [1]", "optimizer.lr = [1] is not float"),
        ("[training\nsteps = 1", "not valid TOML"),
        ("[training]\nsteps = 1\nsteps = 2", "not valid TOML"),
    ],
)
def test_errors_in_a_file(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(tmp_path, toml)
    assert message in str(error.value)
    assert "job.toml" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("x = " + "[" * 10_000 + "]" * 10_000, "not valid TOML: "),
        ("training.steps = " + "9" * 5000, "not valid TOML: Exceeds the limit"),
        ("optimizer.name = " + "0x" + "f" * 5000, "optimizer.name = an integer of 20000 bits is not str"),
        ("training." + "a." * 20 + "b = 1", "unknown section 'training.a'"),
        ("#" * (1 << 20) + "\n", "has 1048577 bytes; it must have at most 1048576"),
        ("optimizer.name = '\\u0000'\nmodel.name = [" + "1," * 9999 + "]", "model.name = [1, 1, 1"),
        ("validation.steps = 0", "validation steps must be positive or -1"),
        ("experimental.custom_args_module = 'mine'", "experimental.custom_args_module has no effect"),
        ("job.custom_config_module = 'json'", "job.custom_config_module 'json' has no dataclass JobConfig"),
        ("job.custom_config_module = 'a..b'", "job.custom_config_module is 'a..b'; it must be a dotted module name"),
        ("job.custom_config_module = 3", "job.custom_config_module = 3 is not str"),
    ],
    ids=lambda value: value[:20],
)
def test_absurd_files_are_one_line(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(tmp_path, toml)
    assert message in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_integers_are_floats_and_nested_sections_work(tmp_path: Path) -> None:
    config = parse(tmp_path, "[optimizer]\nlr = 1\n[training.dataloader]\nnum_workers = 1")
    assert config.optimizer.lr == 1 and isinstance(config.optimizer.lr, float)
    assert config.training.dataloader.num_workers == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--job.config_file", "no/such.toml"], "job.config_file no/such.toml: No such file or directory"),
        (["--job.config-file=."], "job.config_file .: Is a directory"),
        (["--job.config_file"], "--job.config_file needs a value"),
        (
            [
                "--job.config_file",
                "train_configs/llama3_debugmodel.toml",
                "--job.custom_config_module=nix",
            ],
            "job.custom_config_module 'nix': No module named 'nix'",
        ),
        (["--model.hf_assets_path", "no/such/folder"], "model.hf_assets_path no/such/folder: no such folder"),
        ([*TOKENIZER, "--training.stepz", "3"], "unknown key 'training.stepz'; did you mean 'training.steps'?"),
        (
            [*TOKENIZER, "--training.seq-length=3"],
            "unknown key 'training.seq_length'; did you mean 'training.seq_len'?",
        ),
        ([*TOKENIZER, "--npu.no-bypas-codegen"], "did you mean 'npu.bypass_codegen'?"),
        ([*TOKENIZER, "--trainig.steps", "3"], "unknown section 'trainig'; did you mean 'training'?"),
        ([*TOKENIZER, "--steps=3"], "unknown key 'steps'; there is 'training.steps'"),
        ([*TOKENIZER, "--training.steps", "ten"], "Error parsing --training.steps: invalid literal for int()"),
        ([*TOKENIZER, "--activation_checkpoint.mode", "ful"], "invalid choice 'ful' for argument "),
        ([*TOKENIZER, "--compile.no-enable", "yes"], "Unrecognized options: yes"),
        ([*TOKENIZER, "--compile.enable=yes"], "compile.enable is a switch without a value: --compile.enable or "),
        (["--model.tokenizer_path", "no/such/folder"], "model.tokenizer_path no/such/folder: no such folder"),
    ],
)
def test_errors_on_the_command_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as error:
        JobConfigManager().parse_args(args)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert capsys.readouterr().err == ""


def test_shipped_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = JobConfigManager().parse_args(["--job.config_file", "train_configs/llama3_debugmodel.toml"])
    assert config.model.hf_assets_path == str(PACKAGE / "assets/tokenizer")
    assert shipped("torchtitan_npu/assets/tokenizer") == str(PACKAGE / "assets/tokenizer")
    assert shipped("elsewhere/assets") == "elsewhere/assets"
    (tmp_path / "torchtitan_npu").mkdir()
    assert shipped("torchtitan_npu") == "torchtitan_npu"  # an existing path takes precedence


def test_help_needs_no_assets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        JobConfigManager().parse_args(["--help"])
    assert "--npu.strict-limits" in capsys.readouterr().out


def test_configs_of_debug_models_parse() -> None:
    """tests/test_train_configs.py parses the others."""
    for file in train_configs().glob("*debugmodel.toml"):
        JobConfigManager().parse_args(["--job.config_file", str(file)])
