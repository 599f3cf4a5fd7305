"""The network interfaces of this host, and the one that HCCL chooses by default. Linux only, as CANN is."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

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
    return next((name for name, own in found.items() if own == address), None)
