"""Section ``[comm]``: TorchTitan's keys, and the buffers of HCCL's communicators."""

# no `from __future__ import annotations`: TorchTitan and tyro read the field types
from dataclasses import dataclass, field

from torchtitan.config.job_config import Comm as TitanComm

from torchtitan_npu.config.allowed import NAME, PATH, Allowed, ListOf, Number, Text, check_known
from torchtitan_npu.errors import UsageError

MESH_DIMENSIONS = ("pp", "dp_replicate", "fsdp", "efsdp", "cp", "tp", "ep", "etp")
"""TorchTitan's mesh dimensions that have process groups."""
ALLOWED: dict[str, Allowed] = {
    "init_timeout_seconds": Number(1),
    "train_timeout_seconds": Number(1),
    "trace_buf_size": Number(0),
    "save_traces_folder": PATH,
    "save_traces_file_prefix": Text("the beginning of a file name, without `/`", r"[^/\x00-\x1f]{1,100}"),
    "hccl_buffers": ListOf(NAME),
}
BUFFER_MIB = Number(1, 2**20)


@dataclass
class Comm(TitanComm):
    hccl_buffers: list[str] = field(default_factory=list)
    """
    Buffers of HCCL's communicators in MiB, by mesh dimension: `["ep=400", "tp=64"]`. A communicator takes twice as much
    device memory. The others have the size `HCCL_BUFFSIZE`, 200 by default. Dimensions: `pp`, `dp_replicate`, `fsdp`,
    `efsdp`, `cp`, `tp`, `ep`, `etp`. A dimension with one rank has no communicator: a log line says so. Only on NPUs.
    """


def hccl_buffers(comm: TitanComm) -> dict[str, int]:
    """Return the MiB of each mesh dimension that ``comm.hccl_buffers`` lists."""
    found: dict[str, int] = {}
    for entry in getattr(comm, "hccl_buffers", ()):
        name, equals, size = entry.partition("=")
        if not equals or not size.isdecimal():
            raise UsageError(f'comm.hccl_buffers: {entry!r} is not DIMENSION=MIB, such as "ep=400"')
        check_known("comm.hccl_buffers: dimension", name, MESH_DIMENSIONS)
        BUFFER_MIB.check(f"comm.hccl_buffers: {name}", int(size))
        if name in found:
            raise UsageError(f"comm.hccl_buffers lists {name} twice")
        found[name] = int(size)
    return found
