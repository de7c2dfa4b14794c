"""Which hosts are this machine, and how a host is written. It asks no name server."""

from __future__ import annotations

import ipaddress
import re
import socket
from functools import cache
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

HOSTS_FILE = Path("/etc/hosts")


def bare(host: str) -> str:
    """The one spelling of a host by which it is compared: `[::FFFF:127.0.0.1]` is `127.0.0.1`."""
    host = host.strip().removeprefix("[").removesuffix("]").removesuffix(".").lower()
    address = address_of(host)
    return host if address is None else str(address)


def in_url(host: str) -> str:
    """The host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def address_of(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is spelled as, an IPv4-mapped one as the IPv4 address; None for a name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # What the system's resolver takes for an address as well: 127.1, 0x7f.1, 0.
        if not re.fullmatch(r"[0-9a-fx.]*[0-9][0-9a-fx.]*", host):
            return None
        try:
            return IPv4Address(socket.inet_aton(host))
        except OSError:
            return None
    return getattr(address, "ipv4_mapped", None) or address


def is_loopback(host: str) -> bool:
    """Whether a host, by its address, as `localhost` or by the hosts file, is this machine alone."""
    host = bare(host)
    address = address_of(host)
    if address is not None:
        return address.is_loopback
    return host == "localhost" or host in _names_of_loopback()


def is_here(host: str) -> bool:
    """Whether who calls this host calls this machine. Of names that a name server knows, only its own."""
    # Names are not resolved: where a proxy is set there may be no name server, or one that shall not hear it.
    name = bare(host)
    address = address_of(name)
    if address is not None:
        return address.is_loopback or address.is_unspecified
    return is_loopback(name) or name.endswith(".localhost") or name == socket.gethostname().lower()


@cache
def _names_of_loopback() -> frozenset[str]:
    """Names that the hosts file gives to loopback addresses and to no other ones."""
    try:
        lines = HOSTS_FILE.read_text(errors="replace").splitlines()
    except OSError:
        return frozenset()
    inside: set[str] = set()
    outside: set[str] = set()
    for line in lines:
        address, *names = line.partition("#")[0].lower().split() or [""]
        found = address_of(address)
        (inside if found is not None and found.is_loopback else outside).update(names)
    return frozenset(inside - outside)
