"""Which addresses a server may fetch from for its clients."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.server.public_addresses import is_public, own_addresses

PRIVATE = {
    "this machine": ("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "::1", "::"),
    "private networks": (
        *("10.1.2.3", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "fc00::1"),
        *("100.127.255.255", "fd12::1"),
    ),
    "link-local": ("169.254.0.1", "fe80::1", "fe80::1%eth0", "febf::1"),
    "site-local": ("fec0::1", "feff::1"),
    "metadata of clouds": (
        *("169.254.169.254", "169.254.170.2", "168.63.129.16", "100.100.100.200", "192.0.0.192"),
        *("fd00:ec2::254", "fd20:ce::254"),
    ),
    "protocols, benchmarks, documentation": (
        *("192.0.0.1", "192.0.2.1", "192.88.99.1", "198.18.0.1", "198.19.255.255"),
        *("198.51.100.1", "203.0.113.1", "100::1", "2001:2::1", "2001:db8::1", "3fff::1", "5f00::"),
    ),
    "multicast, reserved": (
        *("224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "ff02::1", "ff0e::1"),
        *("4000::1", "8000::1"),
    ),
    "IPv4 in IPv6": (
        *("::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:0:8.8.8.8"),
        *("::ffff:168.63.129.16", "64:ff9b::a00:1", "64:ff9b::7f00:1", "64:ff9b:1::808:808"),
        *("64:ff9b:1::1", "64:ff9b::a83f:8110", "2002:7f00:1::", "2002:a9fe:a9fe::1"),
        *("2001::1", "2001:0:4136:e378:8000:63bf:3fff:fdd2", "2606:4700::5efe:10.0.0.1"),
        *("2606:4700::200:5efe:127.0.0.1", "fe80::5efe:8.8.8.8"),
    ),
}
PUBLIC = (
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0"),
    *("168.63.129.15", "168.63.129.17", "172.15.255.255", "172.32.0.0", "192.0.1.0", "198.20.0.0"),
    *("223.255.255.255", "2606:4700::1111", "2001:4860:4860::8888", "2a00::1", "::ffff:8.8.8.8"),
    *("64:ff9b::808:808", "2002:808:808::1", "2606:4700::5efe:8.8.8.8"),
)


@pytest.mark.parametrize("kind", PRIVATE)
def test_addresses_of_machine_and_network_are_not_public(kind: str) -> None:
    assert [name for name in PRIVATE[kind] if is_public(ip_address(name))] == []


def test_addresses_of_the_internet_are_public() -> None:
    assert [name for name in PUBLIC if not is_public(ip_address(name))] == []


@pytest.mark.parametrize(
    "written",
    ["{}", "::ffff:{}", "64:ff9b::{}", "2606:4700::5efe:{}", "2606:4700::200:5efe:{}"],
)
def test_own_addresses_are_refused_in_each_form(written: str) -> None:
    own = {ip_address("8.8.4.4"), ip_address("2606:4700::7")}
    assert not is_public(ip_address(written.format("8.8.4.4")), own)
    assert is_public(ip_address(written.format("8.8.8.8")), own)
    assert not is_public(ip_address("2002:808:404::1"), own)
    assert not is_public(ip_address("2606:4700::7"), own)


def test_the_machines_own_addresses_are_known() -> None:
    assert ip_address("127.0.0.1") in own_addresses()


@given(st.integers(0, 2**32 - 1))
def test_an_ipv4_address_within_ipv6_is_public_only_if_it_is(number: int) -> None:
    inner = IPv4Address(number)
    for prefix in (0xFFFF << 32, 0x64FF9B << 96, (0x26064700 << 96) | (0x5EFE << 32)):
        assert is_public(IPv6Address(prefix | number)) == is_public(inner)
    assert is_public(IPv6Address((0x2002 << 112) | (number << 80))) == is_public(inner)
    assert not is_public(IPv6Address(number))  # ::/96
