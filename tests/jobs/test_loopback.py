"""Which hosts are this machine."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import loopback
from jobs.loopback import bare, in_url, is_here, is_loopback

HOSTS = """
127.0.0.1 localhost
127.0.1.1 desk desk.lan  # as Debian writes it
::1 ip6-localhost
127.0.0.1 both
10.0.0.5 both
not-an-address odd
"""


@pytest.fixture(autouse=True)
def hosts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "hosts").write_text(HOSTS)
    monkeypatch.setattr(loopback, "HOSTS_FILE", tmp_path / "hosts")
    loopback._names_of_loopback.cache_clear()
    yield
    loopback._names_of_loopback.cache_clear()


LOOPBACK = [
    "127.0.0.1", "127.9.8.7", "127.1", "0x7f.1", "2130706433", "::1", "[::1]", "0:0:0:0:0:0:0:1", "::1%lo",
    "::ffff:127.0.0.1", "[::FFFF:7F00:1]", "localhost", "LocalHost.", "desk", "Desk.LAN", "ip6-localhost",
]  # fmt: skip
EVERYBODY = ["0.0.0.0", "0", "::", "[::]", "::ffff:0.0.0.0"]
ELSEWHERE = [
    "10.0.0.5",
    "both",
    "odd",
    "2001:db8::1",
    "127.0.0.1.example",
    "a.example",
    "dead.beef",
    "",
]


def test_loopback_has_many_spellings() -> None:
    found = [host for host in LOOPBACK + EVERYBODY + ELSEWHERE if is_loopback(host)]
    assert found == LOOPBACK


def test_who_calls_everybodys_address_calls_this_machine() -> None:
    assert [host for host in LOOPBACK + EVERYBODY + ELSEWHERE if is_here(host)] == LOOPBACK + EVERYBODY
    assert is_here("a.localhost")
    assert is_here(socket.gethostname())


def test_no_name_server_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*words: object) -> None:
        raise AssertionError

    monkeypatch.setattr(socket, "getaddrinfo", asked)
    monkeypatch.setattr(socket, "gethostbyname", asked)
    assert not is_here("longleaf.example")


def test_a_machine_without_a_hosts_file_knows_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "HOSTS_FILE", Path("/no/such"))
    assert (is_loopback("localhost"), is_loopback("desk")) == (True, False)


def test_an_ipv6_address_stands_in_brackets_in_a_url() -> None:
    assert [in_url(host) for host in ("::1", "127.0.0.1", "name")] == ["[::1]", "127.0.0.1", "name"]
    assert bare("[FD00:0::1]") == "fd00::1"
