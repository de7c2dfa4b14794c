"""Listening on a host: what is bound, and what is said where nothing can be."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from jobs import listening
from jobs.listening import CannotListen, has_ipv6, listen, serves_this_machine_alone

needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="IPv6 is switched off here")


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


@needs_ipv6
def test_every_address_of_a_name_is_listened_on_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ((socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0)))
    monkeypatch.setattr(listening, "_places", lambda host: places)
    sockets = listen("localhost", 0)
    port = sockets[0].getsockname()[1]
    assert (answers("::1", port), answers("127.0.0.1", port)) == (True, True)
    for sock in sockets:
        sock.close()


@needs_ipv6
def test_everybodys_ipv6_address_takes_ipv4_too() -> None:
    (sock,) = listen("::", 0)
    port = sock.getsockname()[1]
    assert (answers("::1", port), answers("127.0.0.1", port)) == (True, True)
    sock.close()


@pytest.fixture
def without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ipv6.disable=1` leaves a machine: there is no such family."""

    class Socket(socket.socket):
        def __init__(self, family: int = socket.AF_INET, *words: Any) -> None:
            if family == socket.AF_INET6:
                raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
            super().__init__(family, *words)

    monkeypatch.setattr("jobs.listening.socket.socket", Socket)


@pytest.mark.usefixtures("without_ipv6")
def test_localhost_is_listened_on_where_ipv6_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ((socket.AF_INET6, ("::1", 0, 0, 0)), (socket.AF_INET, ("127.0.0.1", 0)))
    monkeypatch.setattr(listening, "_places", lambda host: places)
    (sock,) = listen("localhost", 0)
    assert sock.getsockname()[0] == "127.0.0.1"
    sock.close()


@pytest.mark.usefixtures("without_ipv6")
def test_an_ipv6_address_where_that_is_switched_off_is_said() -> None:
    with pytest.raises(CannotListen, match=r"IPv6 is switched off here: set LONGLEAF_HOST=127\.0\.0\.1"):
        listen("::1", 0)


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no-such-host.invalid", "has no address: set LONGLEAF_HOST"),
        ("192.0.2.1", "is no address of this machine: set LONGLEAF_HOST"),
    ],
)
def test_a_host_that_is_not_here_is_refused_with_what_to_do(host: str, said: str) -> None:
    with pytest.raises(CannotListen, match=said):
        listen(host, 0)


def test_a_machine_without_ipv4_is_shown_the_other_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_address(*words: object) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    monkeypatch.setattr(listening, "_bound", no_address)
    with pytest.raises(CannotListen, match=r"set LONGLEAF_HOST to one that it has, such as ::1$"):
        listen("127.0.0.1", 0)


def test_a_busy_port_closes_what_was_bound_before(monkeypatch: pytest.MonkeyPatch) -> None:
    places = tuple((socket.AF_INET, (address, 0)) for address in ("127.0.0.2", "127.0.0.1"))
    monkeypatch.setattr(listening, "_places", lambda host: places)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match="is in use") as caught:
            listen("localhost", port)
        assert caught.value.in_use
    assert not answers("127.0.0.2", port)


def test_a_name_that_is_elsewhere_too_is_not_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    places = ((socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET, ("192.0.2.1", 0)))
    monkeypatch.setattr(listening, "_places", lambda host: places)
    assert not serves_this_machine_alone("localhost")
