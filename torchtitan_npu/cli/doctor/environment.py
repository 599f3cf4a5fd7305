"""Environment variables with conflicting or invalid values, and the network interfaces of this host.

For the doctor and the launcher. Each rule takes the environment and yields :class:`Conflict`; its docstring names the
source of the rule. Interfaces are for Linux only, as CANN is.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

Environment = Mapping[str, str]
YES = ("1", "true")


@dataclass(frozen=True)
class Conflict:
    """Hold the variables (``names``), the effect (``why``) and the remedy (``advice``)."""

    names: tuple[str, ...]
    why: str
    advice: str

    def __str__(self) -> str:
        return f"{self.why}; {self.advice}"


Rule = Callable[[Environment], Iterator[Conflict]]


def find_conflicts(environment: Environment) -> list[Conflict]:
    """Return every conflict in ``environment``."""
    return [conflict for rule in RULES for conflict in rule(environment)]


def allocator_options(text: str) -> dict[str, str]:
    """Parse ``"a:1,b:2"``."""
    pairs = (part.partition(":") for part in text.split(",") if part.strip())
    return {name.strip().lower(): value.strip().lower() for name, _, value in pairs}


def task_queue(environment: Environment) -> Iterator[Conflict]:
    """torch_npu's reference of TASK_QUEUE_ENABLE: synchronous launches disable the queue."""
    queue = environment.get("TASK_QUEUE_ENABLE", "0")
    if environment.get("ASCEND_LAUNCH_BLOCKING") == "1" and queue != "0":
        yield Conflict(
            ("ASCEND_LAUNCH_BLOCKING", "TASK_QUEUE_ENABLE"),
            f"ASCEND_LAUNCH_BLOCKING=1 disables the queue that TASK_QUEUE_ENABLE={queue} enables",
            "unset ASCEND_LAUNCH_BLOCKING, or set TASK_QUEUE_ENABLE=0 to debug",
        )


def allocator(environment: Environment) -> Iterator[Conflict]:
    """torch_npu's allocator rejects the first two. Without a cache it ignores its configuration."""
    name = "PYTORCH_NPU_ALLOC_CONF"
    if name not in environment:
        return
    options = allocator_options(environment[name])
    excluded = [key for key in ("max_split_size_mb", "garbage_collection_threshold") if key in options]
    if options.get("expandable_segments") == "true" and excluded:
        yield Conflict(
            (name,),
            f"{name}: torch_npu does not support {' or '.join(excluded)} together with expandable_segments:True",
            "keep one of them",
        )
    if "PYTORCH_ALLOC_CONF" in environment:
        yield Conflict(
            (name, "PYTORCH_ALLOC_CONF"),
            f"torch_npu rejects {name} together with PYTORCH_ALLOC_CONF",
            "unset PYTORCH_ALLOC_CONF",
        )
    if environment.get("PYTORCH_NO_NPU_MEMORY_CACHING") == "1":
        yield Conflict(
            (name, "PYTORCH_NO_NPU_MEMORY_CACHING"),
            f"PYTORCH_NO_NPU_MEMORY_CACHING=1 disables the cache that {name} configures",
            "unset one of them",
        )


OLD_NAMES = {
    "PYTORCH_CUDA_ALLOC_CONF": ("PYTORCH_ALLOC_CONF", "keep PYTORCH_ALLOC_CONF"),
    "HCCL_ASYNC_ERROR_HANDLING": ("TORCH_HCCL_ASYNC_ERROR_HANDLING", "unset HCCL_ASYNC_ERROR_HANDLING"),
    "HCCL_DESYNC_DEBUG": ("TORCH_HCCL_DESYNC_DEBUG", "unset HCCL_DESYNC_DEBUG"),
    "HCCL_BLOCKING_WAIT": ("TORCH_HCCL_BLOCKING_WAIT", "unset HCCL_BLOCKING_WAIT"),
}


def renamed(environment: Environment) -> Iterator[Conflict]:
    """torch and torch_npu still read the old name, with a warning."""
    for old, (new, advice) in OLD_NAMES.items():
        values = environment.get(old), environment.get(new)
        if None not in values and values[0] != values[1]:
            yield Conflict((old, new), f"{old} is the old name of {new}, and they differ", advice)


def collectives(environment: Environment) -> Iterator[Conflict]:
    """HCCL's reference of HCCL_OP_EXPANSION_MODE, HCCL_DETERMINISTIC and HCCL_ALGO."""
    deterministic = environment.get("HCCL_DETERMINISTIC", "false").lower()
    if environment.get("HCCL_OP_EXPANSION_MODE") == "AIV" and deterministic in ("true", "strict"):
        yield Conflict(
            ("HCCL_OP_EXPANSION_MODE", "HCCL_DETERMINISTIC"),
            f"HCCL_DETERMINISTIC={deterministic} overrides HCCL_OP_EXPANSION_MODE=AIV",
            "unset one of them",
        )
    for part in environment.get("HCCL_ALGO", "").replace("/", ";").split(";"):
        level, _, algorithm = part.rpartition("=")[2].partition(":")
        if level.strip() == "level0" and algorithm.strip() != "NA":
            yield Conflict(
                ("HCCL_ALGO",),
                f"HCCL_ALGO sets {algorithm.strip()!r} within a server (level0), where HCCL accepts only NA",
                "write level0:NA",
            )


def allowed_values(environment: Environment) -> Iterator[Conflict]:
    """torch_npu and HCCL reject or ignore other values."""
    for name, allowed in {
        "TASK_QUEUE_ENABLE": ("0", "1", "2"),
        "ASCEND_LAUNCH_BLOCKING": ("0", "1"),
        "PYTORCH_NO_NPU_MEMORY_CACHING": ("0", "1"),
        "HCCL_OP_EXPANSION_MODE": ("AI_CPU", "AIV", "HOST", "HOST_TS"),
        "HCCL_DETERMINISTIC": ("true", "false", "strict"),
    }.items():
        value = environment.get(name)
        if value is not None and value not in allowed and value.lower() not in allowed:
            yield Conflict((name,), f"{name}={value} is not one of {', '.join(allowed)}", "correct or unset it")
    for name in ("HCCL_BUFFSIZE", "HCCL_CONNECT_TIMEOUT", "OMP_NUM_THREADS"):
        value = environment.get(name)
        # OpenMP accepts one number per nesting level.
        parts = [] if value is None else value.split(",") if name == "OMP_NUM_THREADS" else [value]
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            yield Conflict((name,), f"{name}={value} is not an integer above 0", "correct or unset it")


RULES: tuple[Rule, ...] = (task_queue, allocator, renamed, collectives, allowed_values)


def find_cautions(environment: Environment) -> Iterator[Conflict]:
    """Yield settings that work but that a user may have left from debugging."""
    for name, what in {
        "ASCEND_LAUNCH_BLOCKING": "every operator waits for the previous one",
        "CUDA_LAUNCH_BLOCKING": "every kernel waits for the previous one",
        "TORCH_HCCL_BLOCKING_WAIT": "the host waits for each collective",
    }.items():
        if environment.get(name, "").lower() in YES:
            yield Conflict((name,), f"{name}={environment[name]}: {what}", "unset it unless you are debugging")
    if environment.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        yield Conflict(
            ("HCCL_OP_EXPANSION_MODE",),
            "HCCL's reference recommends HCCL_OP_EXPANSION_MODE=AIV for inference with one communicator at a time",
            "unset it for a training job",
        )


SIOCGIFADDR = 0x8915
"""The request for the IPv4 address of an interface (linux/sockios.h)."""
SELECTORS = ("HCCL_IF_IP", "HCCL_SOCKET_IFNAME")
"""Variables by which a user chooses HCCL's interface; the first has precedence."""


def addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this host's interfaces by name, without the loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def hccl_choice(found: Mapping[str, str]) -> str | None:
    """Return the interface that HCCL chooses: the first by name, those of Docker last (HCCL's reference)."""
    return min(found, key=lambda name: (name.startswith("docker"), name), default=None)


def interface_towards(host: str, found: Mapping[str, str]) -> str | None:
    """Return the interface by which this host reaches ``host``, or the one that has its address; ``None`` if unknown.

    No packet is sent: connecting a datagram socket only chooses the route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            target = socket.gethostbyname(host)
            if target.startswith("127."):  # /etc/hosts may map this host's name to the loopback
                return None
            if target in found.values():
                address = target
            else:
                probe.connect((target, 9))
                address, _ = probe.getsockname()
        except OSError:  # no such name, or no route: torchrun reports it
            return None
    return next((name for name, found_address in found.items() if found_address == address), None)
