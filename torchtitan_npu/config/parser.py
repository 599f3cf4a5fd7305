"""Reads a job's TOML file and command line; what it does not know is an error that names the nearest thing it knows."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import tomli
from torchtitan.config import ConfigManager

from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.errors import UsageError, nearest

PACKAGE = Path(__file__).resolve().parents[1]


def shipped(path: str) -> str:
    """Return ``path``, or the installed file that it names.

    ``train_configs/X.toml`` and ``torchtitan_npu/assets/...`` are files of this package. If there is no such file
    below the current folder, the installed one is meant.
    """
    first, *rest = Path(path).parts or ("",)
    if os.path.exists(path) or first not in ("train_configs", PACKAGE.name):
        return path
    return str(PACKAGE.joinpath(*([first, *rest] if first == "train_configs" else rest)))


class JobConfigManager(ConfigManager):
    """TorchTitan's ConfigManager over our JobConfig: command line over TOML file over defaults."""

    def __init__(self) -> None:
        super().__init__(JobConfig)

    def parse_args(self, args: list[str] | None = None) -> JobConfig:
        return super().parse_args(sys.argv[1:] if args is None else args)

    def _maybe_load_toml(self, args: list[str]) -> dict[str, Any] | None:
        path = _option(args, "job.config_file")
        if path is None:
            return None
        try:
            with open(shipped(path), "rb") as file:
                table = tomli.load(file)
        except OSError as error:
            raise UsageError(f"job.config_file {path}: {error.strerror}") from error
        except (tomli.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"job.config_file {path}: no valid TOML: {error}") from error
        custom = _option(args, "job.custom_config_module") or _lookup(table, "job", "custom_config_module")
        if custom:
            import_module("job.custom_config_module", custom)
        _check(self._maybe_add_custom_config(args, table), table, path)
        return table

    def _validate_config(self) -> None:
        model = self.config.model
        model.hf_assets_path = shipped(model.hf_assets_path)
        model.converters = [name for name in model.converters if name]  # `--model.converters=` means none
        if model.tokenizer_path is None and not os.path.exists(model.hf_assets_path):
            raise UsageError(f"model.hf_assets_path {model.hf_assets_path}: no such folder")
        super()._validate_config()


def import_module(key: str, name: str) -> None:
    """Import the module that the job names under ``key``."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{key} {name!r}: {error}") from error


def _lookup(table: dict[str, Any], section: str, key: str) -> Any:
    values = table.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _option(args: Sequence[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value`` on a command line, dashes and underscores alike."""
    for i, arg in enumerate(args):
        key, equals, value = arg.partition("=")
        if key.replace("-", "_") == f"__{name}":
            if not equals and i + 1 == len(args):
                raise UsageError(f"--{name} needs a value")
            return value if equals else args[i + 1]
    return None


def _check(config_cls: type, table: dict[str, Any], file: str) -> None:
    """Every section, key and value of ``table`` is one that ``config_cls`` has a place for."""
    everywhere = list(_keys(config_cls))

    def check(cls: type, table: dict[str, Any], section: str) -> None:
        known = {field.name: field.type for field in fields(cls)}
        for name, value in table.items():
            key = section + name
            kind = "section" if isinstance(value, dict) else "key"
            if name not in known:
                elsewhere = [k for k in everywhere if k.split(".")[-1] == name]
                hint = nearest(name, known) or (f"; there is {elsewhere[0]!r}" if elsewhere else "")
                raise UsageError(f"{file}: unknown {kind} {key!r}{hint}")
            wanted = known[name]
            if is_dataclass(wanted) != isinstance(value, dict):
                raise UsageError(f"{file}: {key!r} is a {'section' if is_dataclass(wanted) else 'key'}, not a {kind}")
            if isinstance(value, dict):
                check(wanted, value, key + ".")  # type: ignore[arg-type]
            elif not _fits(value, wanted):
                hint = nearest(value, _choices(wanted)) if isinstance(value, str) else ""
                raise UsageError(f"{file}: {key} = {value!r} is not {_name(wanted)}{hint}")

    check(config_cls, table, "")


def _keys(cls: type, section: str = "") -> Iterator[str]:
    for field in fields(cls):
        if is_dataclass(field.type):
            yield from _keys(field.type, f"{section}{field.name}.")  # type: ignore[arg-type]
        else:
            yield section + field.name


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _choices(kind: Any) -> list[str]:
    """The strings that a field of this type may hold, as far as the type names them."""
    if _is_union(kind):
        return [choice for option in get_args(kind) for choice in _choices(option)]
    return [c for c in get_args(kind) if isinstance(c, str)] if get_origin(kind) is Literal else []


def _fits(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if _is_union(kind):
        return any(_fits(value, option) for option in get_args(kind))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else get_origin(kind) or kind)


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if _is_union(kind):
        return " or ".join(_name(option) for option in get_args(kind) if option is not type(None))
    return str(kind) if get_origin(kind) else kind.__name__
