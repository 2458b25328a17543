"""Tells addresses of the public internet from those that only this machine or its network reaches.

The lists are written out here, because `ipaddress.is_global` differs between versions of Python.
They are the IANA registries of special-purpose addresses (RFC 6890) and what clouds add. An IPv6
address that carries an IPv4 address counts as both.
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

import psutil

IpAddress = IPv4Address | IPv6Address

_NOT_PUBLIC_V4 = tuple(
    map(
        IPv4Network,
        (
            "0.0.0.0/8",  # this network; Linux connects 0.0.0.0 to the machine itself
            "10.0.0.0/8",
            "100.64.0.0/10",  # shared by a provider's customers; Alibaba's metadata
            "127.0.0.0/8",
            "168.63.129.16/32",  # Azure's wire server, which hands out a machine's settings
            "169.254.0.0/16",  # link-local; metadata of most clouds
            "172.16.0.0/12",
            "192.0.0.0/24",  # IETF protocols; Oracle's metadata
            "192.0.2.0/24",  # documentation
            "192.88.99.0/24",  # relays of 6to4
            "192.168.0.0/16",
            "198.18.0.0/15",  # benchmarks
            "198.51.100.0/24",  # documentation
            "203.0.113.0/24",  # documentation
            "224.0.0.0/4",  # multicast
            "240.0.0.0/4",  # reserved, and broadcast
        ),
    )
)
_PUBLIC_V6 = IPv6Network("2000::/3")  # all that IANA gives out as global unicast
_NOT_PUBLIC_V6 = tuple(
    map(
        IPv6Network,
        (
            "2001::/23",  # IETF protocols: Teredo, benchmarks, ORCHID
            "2001:db8::/32",  # documentation
            "3fff::/20",  # documentation
        ),
    )
)
_MAPPED = IPv6Network("::ffff:0:0/96")
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052
_SIX_TO_FOUR = IPv6Network("2002::/16")  # RFC 3056: the IPv4 address follows the prefix
_ISATAP = (b"\0\0\x5e\xfe", b"\2\0\x5e\xfe")  # RFC 5214: then the IPv4 address


def is_public(address: IpAddress, own: Collection[IpAddress] = ()) -> bool:
    """True if the address belongs to the public internet, and is none of `own`.

    `own`: the addresses of this machine (`own_addresses`), which may be public.
    """
    if address in own:
        return False
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _NOT_PUBLIC_V4)
    inner = _carried(address)
    if inner is not None and not is_public(inner, own):
        return False
    if address in _MAPPED or address in _NAT64:
        return True
    return address in _PUBLIC_V6 and not any(address in network for network in _NOT_PUBLIC_V6)


def _carried(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address to which a translator or tunnel sends what is for `address`."""
    packed = address.packed
    if address in _SIX_TO_FOUR:
        return IPv4Address(packed[2:6])
    if address in _MAPPED or address in _NAT64 or packed[8:12] in _ISATAP:
        return IPv4Address(packed[12:])
    return None


def own_addresses() -> frozenset[IpAddress]:
    """Return the addresses of this machine's interfaces at this moment."""
    addresses: set[IpAddress] = set()
    for entries in psutil.net_if_addrs().values():
        for _, name, *_ in entries:
            try:
                addresses.add(ip_address(name.partition("%")[0]))
            except ValueError:
                continue  # the address of a network card
    return frozenset(addresses)
