"""Section ``[replay]``: record the experts and keys that a model selects, or train with those of a record."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass

from torchtitan_npu.config.allowed import Allowed, FilePath

ALLOWED: dict[str, Allowed] = {"record": FilePath(or_empty=True), "replay": FilePath(or_empty=True)}


@dataclass
class Replay:
    """Record or replay of discrete choices: the experts of each token, and the keys of sparse attention."""

    record: str = ""
    """Write the choices of every training step to this folder. Empty: off."""

    replay: str = ""
    """Train with the choices that a job has recorded in this folder. Empty: off."""

    @property
    def is_used(self) -> bool:
        return bool(self.record or self.replay)
