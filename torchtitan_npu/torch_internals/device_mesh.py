"""Process groups of a DeviceMesh.

Seen on torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["override_groups"]


def override_groups(mesh: DeviceMesh, overrides: Mapping[str, Any]) -> None:
    """Let dimensions that are later unflattened from ``mesh`` have groups of their own, by name of the dimension.

    A value is a backend's name or the options of a group. Without one, a dimension over all ranks uses the default
    group.
    """
    unflatten = mesh._unflatten

    def with_overrides(dim: Any, sizes: Any, names: Any, backend_override: Any = None) -> DeviceMesh:
        chosen = {name: value for name, value in overrides.items() if name in names}
        return unflatten(dim, sizes, names, backend_override={**chosen, **(backend_override or {})})

    mesh._unflatten = with_overrides  # type: ignore[assignment, method-assign]
