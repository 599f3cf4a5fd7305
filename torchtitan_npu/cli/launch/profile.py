"""Environment profiles: ``train_configs/env/NAME.env``, a reason above each variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_npu.cli.doctor.conflicts import conflicts
from torchtitan_npu.errors import UsageError, nearest

FOLDER = Path(__file__).resolve().parents[2] / "train_configs" / "env"


@dataclass(frozen=True)
class Variable:
    name: str
    value: str
    reason: str


def names() -> list[str]:
    """The profiles there are."""
    return sorted(path.stem for path in FOLDER.glob("*.env"))


def read(profile: str, within: tuple[Path, ...] = ()) -> list[Variable]:
    """The variables of ``profile``: a name of :func:`names`, the path of such a file, or ``none``.

    A line ``include NAME`` stands for the variables of another one; ``within``: the files whose lines led here.
    """
    if profile == "none":
        return []
    path = Path(profile) if profile.endswith(".env") else FOLDER / f"{profile}.env"
    if not path.is_file():
        known = [*names(), "none"]
        raise UsageError(f"PROFILE={profile}: no such profile{nearest(profile, known)} (there are {', '.join(known)})")
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
            raise UsageError(f"{path}:{number}: {name} has no comment above it that says why")
        else:
            variables.append(Variable(name, value, " ".join(reason)))
            reason = []
    return variables


def apply(profile: str, environment: Mapping[str, str]) -> dict[str, str]:
    """What ``profile`` adds to ``environment``: nothing that is set there already, and nothing that conflicts."""
    added = {v.name: v.value for v in read(profile) if v.name not in environment}
    _refuse_an_old_name(profile, added, environment)
    for conflict in conflicts({**environment, **added}):
        ours = [name for name in conflict.names if name in added]
        source = f" ({', '.join(ours)} comes from PROFILE={profile}; what you set yourself is kept)" if ours else ""
        raise UsageError(f"{conflict}{source}")
    return added


def _refuse_an_old_name(profile: str, added: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """The conflict of a variable's two names, for who has set but the old one: the new one is the profile's."""
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
    if new in added and environment.get(old, added[new]) != added[new]:
        raise UsageError(
            f"{old}={environment[old]}: the old name of {new}, which PROFILE={profile} sets to {added[new]}; "
            f"put it into {new}, or PROFILE=none"
        )
