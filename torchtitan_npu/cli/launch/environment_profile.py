"""Environment profiles: ``train_configs/env/NAME.env``, with a comment above each variable that gives the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_npu.cli.doctor.environment import find_conflicts
from torchtitan_npu.config.shipped_files import train_configs
from torchtitan_npu.errors import UsageError, did_you_mean

FOLDER = train_configs() / "env"


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    reason: str


def names() -> list[str]:
    """Return the names of the shipped profiles."""
    return sorted(path.stem for path in FOLDER.glob("*.env"))


def read(profile: str, within: tuple[Path, ...] = ()) -> list[Variable]:
    """Read the variables of ``profile``: a name of :func:`names`, the path of an ``.env`` file, or ``none``.

    A line ``include NAME`` inserts the variables of another profile. ``within`` lists the including files.
    """
    if profile == "none":
        return []
    path = Path(profile) if profile.endswith(".env") else FOLDER / f"{profile}.env"
    if not path.is_file():
        known = [*names(), "none"]
        raise UsageError(
            f"PROFILE={profile}: no such profile{did_you_mean(profile, known)} (choose from {', '.join(known)})"
        )
    if path in within:
        raise UsageError(f"{path} includes itself: {' -> '.join(map(str, (*within, path)))}")
    variables: list[Variable] = []
    reason: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        name, equals, value = line.partition("=")
        if line.startswith("#"):
            reason.append(line[1:].strip())
        elif not line.strip():
            reason = []
        elif line.startswith("include "):
            variables += read(line.removeprefix("include ").strip(), (*within, path))
            reason = []
        elif not (equals and name.isidentifier()):
            raise UsageError(f"{path}:{number}: {line!r} is not NAME=value")
        elif not reason:
            raise UsageError(f"{path}:{number}: {name} needs a comment above it that gives the reason")
        else:
            variables.append(Variable(name, value, " ".join(reason)))
            reason = []
    return variables


def apply(profile: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ``profile`` adds to ``environment``. Variables that are already set stay.

    Raise :class:`UsageError` if the result has conflicting variables.
    """
    added = {v.name: v.value for v in read(profile) if v.name not in environment}
    _check_old_name(profile, added, environment)
    for conflict in find_conflicts({**environment, **added}):
        of_profile = [name for name in conflict.names if name in added]
        source = (
            f" ({', '.join(of_profile)} comes from PROFILE={profile}; variables that you set are kept)"
            if of_profile
            else ""
        )
        raise UsageError(f"{conflict}{source}")
    return added


def _check_old_name(profile: str, added: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Reject the old name of a variable set by the user if the profile sets the new name to another value."""
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    if new in added and environment.get(old, added[new]) != added[new]:
        raise UsageError(
            f"{old}={environment[old]} is the old name of {new}, which PROFILE={profile} sets to {added[new]}; "
            f"set {new} instead, or PROFILE=none"
        )
