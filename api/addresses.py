"""Which network addresses a stranger may make this machine call: public ones, and those of some networks."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Network = IPv4Network | IPv6Network

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def may_call(address: str, networks: Sequence[Network]) -> bool:
    """Whether a stranger may make this machine call an address: a public one, or one in `networks`."""
    found = _plain(ipaddress.ip_address(address.partition("%")[0]))
    if any(found in network for network in networks):
        return True
    return found.is_global and not found.is_multicast and not found.is_reserved


def _plain(found: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 one stands for, where it does."""
    if isinstance(found, IPv4Address):
        return found
    if found.ipv4_mapped is not None:
        return found.ipv4_mapped
    if found.sixtofour is not None:
        return found.sixtofour
    return IPv4Address(int(found) & 0xFFFFFFFF) if found in _NAT64 else found
