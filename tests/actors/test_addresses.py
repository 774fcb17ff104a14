"""Which addresses are public: a table of the special ones, and what translators make of each of them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.recipe.addresses import is_public

PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "172.15.0.1", "172.32.0.1", "100.63.0.1", "100.128.0.1", "191.255.0.1"]
PUBLIC_V6 = ["2001:4860:4860::8888", "2606:4700::1111", "2a00:1450::1", "2400::1"]
SPECIAL = [
    *("0.0.0.0", "0.1.2.3", "10.0.0.1", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.255"),
    *("169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.0.9", "192.0.0.170", "192.0.2.1"),
    *("192.88.99.1", "192.168.0.1", "198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.1"),
    *("224.0.0.1", "224.0.1.1", "239.255.255.255", "240.0.0.1", "255.255.255.255"),
]
SPECIAL_V6 = [
    *("::", "::1", "::7f00:1", "::8.8.8.8", "::ffff:0:8.8.8.8", "100::1", "1::1", "4000::1", "5f00::1", "3fff::1"),
    *("64:ff9b:1::808:808", "2001::1", "2001:2::1", "2001:10::1", "2001:20::1", "2001:db8::1", "fc00::1", "fd00::1"),
    *("fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "ff0e::1", "2606:4700::1111%eth0"),
]
NONE = ["", "localhost", "127.1", "0177.0.0.1", "2130706433", "8.8.8.8:80", "[2606:4700::1111]", " 8.8.8.8"]


def through_translators(address: str) -> list[str]:
    """IPv6 addresses that reach this IPv4 one: mapped, NAT64, 6to4."""
    number = int(IPv4Address(address))
    forms = [(0xFFFF << 32) | number, (0x64_FF9B << 96) | number, (0x2002 << 112) | (number << 80) | 1]
    return [str(IPv6Address(form)) for form in forms]


@pytest.mark.parametrize("address", [*SPECIAL, *SPECIAL_V6, *NONE])
def test_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", SPECIAL)
def test_refused_through_a_translator(address: str) -> None:
    assert not any(map(is_public, through_translators(address)))


@pytest.mark.parametrize("address", [*PUBLIC, *PUBLIC_V6])
def test_allowed(address: str) -> None:
    assert is_public(address)


@given(st.integers(0, 2**32 - 1))
def test_a_translator_changes_nothing(number: int) -> None:
    address = IPv4Address(number)
    assert {is_public(form) for form in through_translators(str(address))} == {is_public(str(address))}
    assert not is_public(str(address)) or (address.is_global and not address.is_multicast)


@given(st.integers(0, 2**128 - 1))
def test_outside_the_global_range_only_what_stands_for_ipv4_is_public(number: int) -> None:
    address = IPv6Address(number)
    is_v4 = address.ipv4_mapped is not None or number >> 32 == 0x64_FF9B << 64
    assert not is_public(str(address)) or number >> 125 == 1 or is_v4
