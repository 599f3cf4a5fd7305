"""Describe the first failure of a job, and write it to torchrun's error file."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass

from torch.distributed import DistError


@dataclass(frozen=True)
class RankFailure:
    """The rank that failed first, and how."""

    rank: int
    host: str
    pid: int
    what: str
    """A verb phrase, such as ``failed in step 7: ValueError: ...``."""
    details: str = ""
    """The Python stack of a rank that hangs, or a hint."""
    hangs: bool = False
    """The process still exists and has to be killed."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid}) {self.what}"

    @property
    def report(self) -> str:
        """The failure with its details, for several lines."""
        return "\n".join([str(self), *(f"  {line}" for line in self.details.splitlines())])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankFailure:
        return cls(**json.loads(text))


def is_communication_error(error: BaseException) -> bool:
    """Return whether ``error`` may be the consequence of another rank's failure: a collective that failed.

    gloo and HCCL raise plain ``RuntimeError``. Its text has the file in gloo, or the name of HCCL.
    """
    text = str(error).lower()
    return isinstance(error, DistError) or (
        isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "hccl", "nccl", "connection closed"))
    )


def write_error_file(text: str, exit_code: int, cause: RankFailure | None = None, later: bool = False) -> None:
    """Write ``text`` to the file from which torchrun and the launcher report this rank.

    torchrun calls the rank with the smallest time the root cause, in seconds. ``later``: another rank is the cause.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + later)}
    message = {"message": text.partition("\n")[0], "extraInfo": extra, "errorCode": exit_code}
    if cause:
        message["cause"] = asdict(cause)
    part = f"{path}.part"
    with open(part, "w") as file:
        json.dump({"message": message}, file)
    os.replace(part, path)
