"""Addresses of workers. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address


@dataclass(frozen=True)
class Address:
    """The host and port of a worker."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """True if only programs of this machine can connect to a server on this address."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def parse_address(text: str) -> Address:
    """Parse HOST:PORT. Raises ValueError. ggml connects over IPv4 only, so a host has no colon."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or ":" in host or not re.fullmatch("[0-9]{1,5}", port):
        raise ValueError(f"{text.strip()!r} is not HOST:PORT")
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"port {port} of {text.strip()!r} is not between 1 and 65535")
    return Address(host, int(port))
