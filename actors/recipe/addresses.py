"""Which addresses of the network are public: what a client names is fetched from nowhere else."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

_UNICAST = IPv6Network("2000::/3")
"""All of IPv6 that was ever given out as global: what lies elsewhere has another meaning, or none yet."""

_NAT64 = IPv6Network("64:ff9b::/96")
_6TO4 = IPv6Network("2002::/16")
_NOT_GLOBAL = (
    *(IPv4Network("192.0.0.0/24"), IPv6Network("2001::/23")),  # protocol assignments, Teredo
    *(IPv4Network("192.88.99.0/24"), IPv6Network("3fff::/20")),  # relays of 6to4; documentation
)
"""What the standard library takes for global, all or part of it, in some version."""


def is_public(address: str) -> bool:
    """Whether anyone in the internet could connect to this address, given as text.

    False for private, loopback, link-local, shared (RFC 6598), multicast, reserved and unspecified addresses (IANA's
    special-purpose registries), for IPv6 addresses that stand for such an IPv4 address (mapped, NAT64, 6to4), for
    scoped ones, and for what is no address.
    """
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return _is_public(parsed)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if any(address in network for network in _NOT_GLOBAL):
        return False
    if isinstance(address, IPv6Address):
        meant = _meant(address)
        if meant is not None:
            return _is_public(meant)
        if address not in _UNICAST or address.scope_id:
            return False
    return address.is_global and not address.is_multicast


def _meant(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that a translator or tunnel makes of this one."""
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour if address in _6TO4 else None
