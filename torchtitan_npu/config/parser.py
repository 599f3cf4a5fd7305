"""Parse a job's TOML file and command line. Errors suggest the nearest known section, key or value."""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import types
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin

import tomli
from torchtitan.config import ConfigManager

from torchtitan_npu.config.allowed import MODULE, PATH
from torchtitan_npu.config.job_config import JobConfig
from torchtitan_npu.config.shipped_files import shipped
from torchtitan_npu.errors import UsageError, did_you_mean, shown

LARGEST_FILE = 2**20
"""The largest TOML file, in bytes."""


class JobConfigManager(ConfigManager):
    """TorchTitan's ConfigManager for this package's JobConfig: command line over TOML file over defaults."""

    def __init__(self) -> None:
        super().__init__(JobConfig)

    def parse_args(self, args: list[str] | None = None) -> JobConfig:
        """Return the job's config; raise :class:`UsageError` for an unreadable file, an unknown key or a bad value."""
        args = list(sys.argv[1:] if args is None else args)
        table: dict[str, Any] = {}
        if (file := _option(args, "job.config_file")) is not None:
            table = _load_toml(file)
            args = _with_option(args, "job.config_file", shipped(file))
        custom = _option(args, "job.custom_config_module") or _lookup(table, "job", "custom_config_module")
        sections = [JobConfig, _custom_config(custom)] if custom else [JobConfig]
        _check_table(sections, table, file or "")
        if {"-h", "--help"} & set(args):
            return super().parse_args(args)  # prints and exits
        args = _with_assets_path(args, table)
        printed = io.StringIO()
        try:
            with redirect_stdout(printed), redirect_stderr(printed):
                config: Any = super().parse_args(args)
        except SystemExit:
            _check_options(sections, args)
            raise UsageError(f"command line: {_message_of_tyro(printed.getvalue())}") from None
        except (AssertionError, ValueError) as error:  # a section checks its keys when it is created
            raise UsageError(str(error)) from error
        sys.stderr.write(printed.getvalue())
        config.model.converters = [name for name in config.model.converters if name]  # `--model.converters=` is [""]
        if config.experimental.custom_args_module:
            raise UsageError("experimental.custom_args_module has no effect: set job.custom_config_module")
        _make_floats(config)
        return config


def load_job(args: list[str] | None = None) -> JobConfig:
    """Parse a job, and import the module that may register its models and converters."""
    config = JobConfigManager().parse_args(args)
    if config.experimental.custom_import:
        import_module("experimental.custom_import", config.experimental.custom_import)
    return config


def import_module(key: str, name: str) -> types.ModuleType:
    """Import the module that the job names under ``key``."""
    MODULE.check(key, name)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{key} {name!r}: {error}") from error


def _custom_config(module: Any) -> type:
    """Return the ``JobConfig`` of the module that ``job.custom_config_module`` names."""
    if not isinstance(module, str):
        raise UsageError(f"job.custom_config_module = {shown(module)} is not str")
    config = getattr(import_module("job.custom_config_module", module), "JobConfig", None)
    if not is_dataclass(config) or not isinstance(config, type):
        raise UsageError(f"job.custom_config_module {module!r} has no dataclass JobConfig")
    return config


def _load_toml(path: str) -> dict[str, Any]:
    PATH.check("job.config_file", path)
    try:
        with open(shipped(path), "rb") as file:
            if (size := os.fstat(file.fileno()).st_size) <= LARGEST_FILE:
                return tomli.load(file)
    except OSError as error:
        raise UsageError(f"job.config_file {path}: {error.strerror}") from error
    except (RecursionError, ValueError) as error:  # ValueError also for a number with too many digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise UsageError(f"job.config_file {path}: not valid TOML: {reason}") from error
    raise UsageError(f"job.config_file {path} has {size} bytes; it must have at most {LARGEST_FILE}")


def _with_assets_path(args: list[str], table: dict[str, Any]) -> list[str]:
    """Return ``args`` with ``model.hf_assets_path`` resolved; raise if there is no such folder."""
    for key in ("tokenizer_path", "hf_assets_path"):  # TorchTitan's deprecated key replaces the other
        path = _option(args, f"model.{key}")
        path = _lookup(table, "model", key) if path is None else path
        if path is not None:
            break
    else:
        path = JobConfig().model.hf_assets_path
    PATH.check(f"model.{key}", path)
    path = shipped(path)
    if not os.path.isdir(path):
        raise UsageError(f"model.{key} {path}: no such folder")
    return _with_option(args, f"model.{key}", path)


def _lookup(table: dict[str, Any], section: str, key: str) -> Any:
    values = table.get(section)
    return values.get(key) if isinstance(values, dict) else None


def _option(args: Sequence[str], name: str) -> str | None:
    """Return the value of ``--name value`` or ``--name=value``; dashes and underscores are equivalent."""
    for i, arg in enumerate(args):
        key, equals, value = arg.partition("=")
        if key.replace("-", "_") == f"__{name}":
            if not equals and i + 1 == len(args):
                raise UsageError(f"--{name} needs a value")
            return value if equals else args[i + 1]
    return None


def _with_option(args: list[str], name: str, value: str) -> list[str]:
    """Return ``args`` with ``--name`` set to ``value``, in place of the value it has there."""
    keys = [arg.partition("=")[0].replace("-", "_") for arg in args]
    if f"__{name}" not in keys:
        return [*args, f"--{name}", value]
    at = keys.index(f"__{name}")
    return [*args[:at], *args[at + (1 if "=" in args[at] else 2) :], f"--{name}", value]


def _check_table(config_classes: Iterable[type], table: dict[str, Any], file: str) -> None:
    """Raise unless every section, key and value of ``table`` has a field in one of ``config_classes``."""
    all_keys = [key for cls in config_classes for key in _keys(cls)]

    def check(classes: list[type], table: dict[str, Any], section: str) -> None:
        known: dict[str, list[Any]] = {}
        for cls in classes:
            for field in fields(cls):
                known.setdefault(field.name, []).append(field.type)
        for name, value in table.items():
            key = section + name
            kind = "section" if isinstance(value, dict) else "key"
            if name not in known:
                elsewhere = [k for k in all_keys if k.split(".")[-1] == name]
                hint = did_you_mean(name, known, section) or (f"; there is {elsewhere[0]!r}" if elsewhere else "")
                raise UsageError(f"{file}: unknown {kind} {key!r}{hint}")
            expected = known[name][-1]  # a class later in the list overrides
            if is_dataclass(expected) != isinstance(value, dict):
                right = "section" if is_dataclass(expected) else "key"
                raise UsageError(f"{file}: {key!r} is a {right}, not a {kind}")
            if isinstance(value, dict):
                sections = [cls for cls in known[name] if isinstance(cls, type) and is_dataclass(cls)]
                check(sections, value, key + ".")
            elif not _fits(value, expected):
                hint = did_you_mean(value, _choices(expected)) if isinstance(value, str) else ""
                raise UsageError(f"{file}: {key} = {shown(value)} is not {_name(expected)}{hint}")

    check(list(config_classes), table, "")


def _make_floats(section: Any) -> None:
    """Convert integers of a file, such as ``beta1 = 0``, to the type of their key: torch's Adam takes floats only."""
    for field in fields(section):
        value = getattr(section, field.name)
        if is_dataclass(value):
            _make_floats(value)
        elif field.type in (float, float | None) and isinstance(value, int) and value.bit_length() < 64:
            setattr(section, field.name, float(value))


def _check_options(config_classes: Sequence[type], args: Sequence[str]) -> None:
    """Raise for the first option of the command line that is not a key, as :func:`_check_table` does for a file."""
    known = {key: kind for cls in config_classes for key, kind in _keys(cls).items()}
    for name, equals in (arg[2:].partition("=")[:2] for arg in args if arg.startswith("--")):
        name = name.replace("-", "_")
        *sections, key = name.split(".")
        if equals and known.get(name) is bool:
            switch = ".".join([*sections, f"no-{key}"])
            raise UsageError(f"command line: {name} is a switch without a value: --{name} or --{switch}")
        positive = ".".join([*sections, key.removeprefix("no_")])  # tyro's --section.no-key is false
        if not {name, positive} & known.keys():
            table: dict[str, Any] = {key: None}
            for section in reversed(sections):
                table = {section: table}
            _check_table(config_classes, table, "command line")


def _message_of_tyro(text: str) -> str:
    """Return the first paragraph of the text that tyro prints, in one line: title, rule, paragraph, rule, ..."""
    title, *paragraphs = re.split(r"^ *-+ *$", text, flags=re.MULTILINE)
    return " ".join((paragraphs or [title])[0].split())


def _keys(cls: type, section: str = "") -> dict[str, Any]:
    """Return the type of every key, by ``section.key``."""
    found: dict[str, Any] = {}
    for field in fields(cls):
        if is_dataclass(field.type):
            found |= _keys(field.type, f"{section}{field.name}.")  # type: ignore[arg-type]
        else:
            found[section + field.name] = field.type
    return found


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _choices(kind: Any) -> list[str]:
    """Return the strings that the type ``kind`` lists as literals."""
    if _is_union(kind):
        return [choice for option in get_args(kind) for choice in _choices(option)]
    return [c for c in get_args(kind) if isinstance(c, str)] if get_origin(kind) is Literal else []


def _fits(value: Any, kind: Any) -> bool:
    """Return whether ``value`` of a TOML file can be a field of type ``kind``."""
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
