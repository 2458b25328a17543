"""Addresses of workers, and the options of using their devices. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from itertools import pairwise

from offload.errors import DeviceUnavailable
from offload.plan.ranges import Order
from offload.remote.secret import Secret

DEFAULT_PATIENCE_S = 20.0
_DEVICE = re.compile(r"rpc\d+", re.IGNORECASE)


@dataclass(frozen=True)
class Address:
    """The host and port of a worker, and the secret that it shares with its clients, if any."""

    host: str
    port: int
    secret: Secret | None = field(default=None, compare=False, repr=False)

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
    try:
        host.encode("idna")
    except UnicodeError as e:
        raise ValueError(f"{host!r} of {text.strip()!r} is no host name") from e
    if not 0 < int(port) < 1 << 16:
        raise ValueError(f"port {port} of {text.strip()!r} is not between 1 and 65535")
    return Address(host, int(port))


def parse_addresses(text: str) -> tuple[Address, ...]:
    """Parse HOST:PORT,HOST:PORT,... Raises ValueError for a bad address or one given twice."""
    addresses = tuple(parse_address(part) for part in text.split(","))
    for address in addresses:
        if addresses.count(address) > 1:
            raise ValueError(f"{address} is given twice")
    return addresses


@dataclass(frozen=True)
class RemoteOptions:
    """The workers whose devices an engine uses. Without workers, it uses no remote devices."""

    workers: tuple[Address, ...] = ()
    devices: tuple[str, ...] = ()  # names of the remote devices to use, in order; (): all
    order: Order = "auto"
    patience_s: float = DEFAULT_PATIENCE_S  # longest silence of a worker that owes an answer

    @property
    def is_used(self) -> bool:
        return bool(self.workers) and self.order != "none"

    def of(self, device: str, flag: str = "--device") -> tuple[str, RemoteOptions]:
        """Return the local part of a text of `flag`, and the options with its remote part.

        `auto` uses all remote devices, and any other text uses those that it names. If the text
        names only remote devices, the local part is "cpu". Raises DeviceUnavailable for a bad list.
        """
        parts = [part.strip() for part in device.split(",")]
        names = [part.upper() for part in parts if _DEVICE.fullmatch(part)]
        if not names:
            return device, replace(self, order="auto" if device.lower() == "auto" else "none")
        if not self.workers:
            raise DeviceUnavailable(f"{flag} {device}: {names[0]} needs --rpc HOST:PORT")
        name, n = Counter(names).most_common(1)[0]
        if n > 1:
            raise DeviceUnavailable(
                f"{flag} {device}: {name} is named {n} times; name each device once"
            )
        kinds = [bool(_DEVICE.fullmatch(part)) for part in parts]
        if sum(a != b for a, b in pairwise(kinds)) > 1:
            raise DeviceUnavailable(
                f"{flag} {device}: remote devices come before or after all local ones"
            )
        local = ",".join(p for p, is_remote in zip(parts, kinds, strict=True) if not is_remote)
        order: Order = "only" if not local else "first" if kinds[0] else "last"
        return local or "cpu", replace(self, devices=tuple(names), order=order)


def named_remotely(device: str | None) -> bool:
    """True if a text of `--device` names remote devices."""
    return device is not None and any(map(_DEVICE.fullmatch, device.replace(" ", "").split(",")))
