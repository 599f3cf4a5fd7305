"""Read the configurations of run folders and list the keys in which they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONFIGURATION_FILE = "config.json"
"""``job.save_config_file`` of the runs that ``compare run`` trains."""
_SECTIONS = {"job", "model", "training"}
ABSENT = "(absent)"


def read_configuration(folder: Path) -> dict[str, str] | None:
    """Return ``section.key`` and value of the configuration that TorchTitan saved in ``folder``, or None.

    ``job.save_config_file`` has no fixed name. Several configurations are none: nothing says which run they are of.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):  # some other file
            continue
        if isinstance(content, dict) and content.keys() >= _SECTIONS:
            found.append(dict(_flatten(content)))
    return found[0] if len(found) == 1 else None


def _flatten(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, ensure_ascii=False)


def differing_keys(configurations: list[dict[str, str]]) -> dict[str, list[str]]:
    """Return the keys that do not have one value, with the value in each configuration."""
    keys = dict.fromkeys(key for configuration in configurations for key in configuration)
    values = {key: [configuration.get(key, ABSENT) for configuration in configurations] for key in keys}
    return {key: each for key, each in values.items() if len(set(each)) > 1}
