"""Sockets that listen on a host and a port, and why there can be none: the doctor tries what a start does."""

from __future__ import annotations

import errno
import socket
from functools import cache
from typing import Any

from jobs.loopback import bare, is_loopback

_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class CannotListen(Exception):
    """Why not, and what to do."""

    def __init__(self, why: str, mend: str, in_use: bool = False) -> None:
        super().__init__(f"{why}: {mend}")
        self.why = why
        self.mend = mend
        self.in_use = in_use


def listen(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address that the host has here; for port 0 all on one free port.

    Raises:
        CannotListen: the port is in use, or the host is none of this machine's.
    """
    found: list[socket.socket] = []
    failure: OSError | None = None
    try:
        for family, address in _places(host):
            try:
                found.append(_bound(family, (address[0], port, *address[2:])))
            except OSError as error:
                # `localhost` is ::1 too where IPv6 is switched off.
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                failure = error
            else:
                port = found[0].getsockname()[1]
        if not found and failure is not None:
            raise failure
    except OSError as error:
        for sock in found:
            sock.close()
        raise _refusal(host, port, error) from None
    return found


def serves_this_machine_alone(host: str) -> bool:
    """Whether every address that `listen` takes for the host is a loopback one."""
    try:
        return all(is_loopback(address[0]) for _, address in _places(host))
    except OSError:
        return False


def has_ipv6() -> bool:
    try:
        _bound(socket.AF_INET6, ("::1", 0, 0, 0)).close()
    except OSError:
        return False
    return True


@cache
def _places(host: str) -> tuple[tuple[socket.AddressFamily, Any], ...]:
    """The host's addresses, asked for once: who needs a key is decided on the very ones that are bound."""
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return tuple(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _bound(family: socket.AddressFamily, address: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # `::` is everybody, over IPv4 as well, whatever the system's default is.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
        sock.listen(256)
    except OSError:
        sock.close()
        raise
    return sock


def _refusal(host: str, port: int, error: OSError) -> CannotListen:
    if isinstance(error, socket.gaierror):
        mend = "set LONGLEAF_HOST to an address of this machine, such as 127.0.0.1 or ::1"
        return CannotListen(f"the host {host} has no address", mend)
    if error.errno == errno.EADDRINUSE:
        mend = f"stop what listens there (`lsof -i :{port}` names it) or set LONGLEAF_PORT to another port"
        return CannotListen(f"port {port} on {host} is in use", mend, in_use=True)
    if error.errno == errno.EACCES:
        mend = "set LONGLEAF_PORT to one from 1024 on"
        return CannotListen(f"this user may not listen on port {port}", mend)
    if error.errno == errno.EINVAL and bare(host).startswith("fe80:"):
        return CannotListen(f"{host} is on every interface", "name one of them, such as fe80::1%eth0")
    if error.errno in _NO_SUCH_ADDRESS:
        if ":" in host and not has_ipv6():
            mend = "set LONGLEAF_HOST=127.0.0.1, or 0.0.0.0 for others than this machine"
            return CannotListen(f"{host} cannot be listened on, for IPv6 is switched off here", mend)
        other = "::1" if is_loopback(host) else "127.0.0.1 or ::1"
        mend = f"set LONGLEAF_HOST to one that it has, such as {other}"
        return CannotListen(f"{host} is no address of this machine", mend)
    return CannotListen(f"cannot listen on {host} port {port} ({error.strerror})", "set LONGLEAF_HOST")
