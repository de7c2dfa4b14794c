"""Whom a proxy is told: of this machine's API nothing, of any other what the environment says."""

from __future__ import annotations

import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx
import pytest

from jobs import transport
from jobs.settings import SettingsError
from jobs.transport import http_client, in_words, proxy_for

PROXY = "http://10.0.0.1:3128"
PROXY_NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of something on this machine that treats one connection as `answer` does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)  # a test whose client fails before it connects ends with the client's error

        def serve() -> None:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            thread.join()


def get(url: str) -> httpx.Response:
    with http_client(url, httpx.Timeout(10)) as client:
        return client.get("/")


def ok(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("value", [PROXY, "socks5://10.0.0.1:1080", "socks4://no", "http://[::1", "::"])
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "0.0.0.0", "[::1]", "[::ffff:127.0.0.1]"]
)
def test_this_machine_is_asked_directly_whatever_is_set(
    monkeypatch: pytest.MonkeyPatch, value: str, host: str
) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, value)
    assert proxy_for(f"http://{host}:8321") is None
    http_client(f"http://{host}:8321", httpx.Timeout(1)).close()


def test_a_system_proxy_is_not_told_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"http": PROXY})
    monkeypatch.setattr(transport, "getproxies", lambda: {"http": PROXY})
    with server(ok) as port:
        assert get(f"http://127.0.0.1:{port}").status_code == 200
    found = proxy_for("http://longleaf.example")
    assert (found and found.url, found and found.named_by) == (PROXY, "this system's network settings")


def test_the_systems_own_exceptions_are_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "getproxies", lambda: {"http": PROXY})
    monkeypatch.setattr(transport, "proxy_bypass", lambda host: host == "mac.local")
    assert proxy_for("http://mac.local:8321") is None
    assert proxy_for("http://longleaf.example") is not None


@pytest.mark.parametrize(
    ("spared", "url"),
    [
        ("*", "http://longleaf.example"),
        ("a.example, longleaf.example", "http://longleaf.example:8321"),
        (".example", "http://longleaf.example"),
        ("*.example", "http://longleaf.example"),
        ("longleaf.example:8321", "http://longleaf.example:8321"),
        ("10.0.0.0/8", "http://10.1.2.3:8321"),
        ("fd00::/8", "http://[fd00::5]:8321"),
        ("[fd00::5]", "http://[FD00:0::5]:8321"),
        ("192.168.1.5", "http://192.168.1.5"),
    ],
)
def test_who_is_in_no_proxy_is_asked_directly(monkeypatch: pytest.MonkeyPatch, spared: str, url: str) -> None:
    monkeypatch.setenv("http_proxy", PROXY)
    assert proxy_for(url) is not None
    monkeypatch.setenv("no_proxy", spared)
    assert proxy_for(url) is None


@pytest.mark.parametrize(
    "spared", ["", "example", "other.example", "longleaf.example:9", "11.0.0.0/8", "1.2"]
)
def test_who_is_not_in_no_proxy_is_asked_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, spared: str
) -> None:
    monkeypatch.setenv("http_proxy", PROXY)
    monkeypatch.setenv("no_proxy", spared)
    for url in ("http://longleaf.example.org:8321", "http://10.1.2.3:8321"):
        assert proxy_for(url) is not None


def test_each_scheme_has_its_proxy_and_all_proxy_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "secure.example:3128")
    monkeypatch.setenv("ALL_PROXY", "socks://10.0.0.1:1080/")
    found = [proxy_for(f"{scheme}://longleaf.example") for scheme in ("https", "http")]
    assert [(proxy.url, proxy.named_by) for proxy in found if proxy] == [
        ("http://secure.example:3128", "https_proxy"),
        ("socks5://10.0.0.1:1080/", "ALL_PROXY"),
    ]


def test_another_host_is_asked_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def proxy(connection: socket.socket) -> None:
        asked.append(connection.recv(65536).splitlines()[0])
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with server(proxy) as port:
        monkeypatch.setenv("http_proxy", f"127.0.0.1:{port}")
        assert get("http://longleaf.example:8321").status_code == 200
    assert asked == [b"GET http://longleaf.example:8321/ HTTP/1.1"]


def test_another_host_is_asked_through_socks_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    def proxy(connection: socket.socket) -> None:
        connection.recv(1024)
        connection.sendall(b"\x05\x00")
        asked.append(connection.recv(1024))
        connection.sendall(b"\x05\x00\x00\x01\x7f\x00\x00\x01\x00\x00")
        ok(connection)

    with server(proxy) as port:
        monkeypatch.setenv("all_proxy", f"socks5://127.0.0.1:{port}")
        assert get("http://longleaf.example:8321").status_code == 200
    assert b"longleaf.example" in asked[0]


@pytest.mark.parametrize(
    "value",
    ["socks4://h:1", "ftp://h:1", "http://", "http://h:port", "http://h:99999", "http://[::1", "a b://c"],
)
def test_a_proxy_that_cannot_be_used_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HTTP_PROXY", value.replace("://", "://user:SECRET@"))
    with pytest.raises(SettingsError, match=r"^HTTP_PROXY=.* is no proxy that can be used: ") as caught:
        http_client("http://longleaf.example", httpx.Timeout(1))
    assert "SECRET" not in str(caught.value)


def cut(connection: socket.socket) -> None:
    connection.recv(65536)


def no_http(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"SSH-2.0-OpenSSH\r\n\r\n")


@pytest.mark.parametrize(
    ("scheme", "answer", "said"),
    [
        ("http", cut, "it closed the connection without an answer"),
        ("http", no_http, "it does not speak HTTP there"),
        ("https", no_http, "it does not speak TLS there; is it http:// and not https://?"),
    ],
)
def test_what_went_wrong_is_said_in_plain_words(
    scheme: str, answer: Callable[[socket.socket], None], said: str
) -> None:
    with server(answer) as port, pytest.raises(httpx.TransportError) as caught:
        get(f"{scheme}://127.0.0.1:{port}")
    assert in_words(caught.value) == said


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://no-such-host.invalid", "(its name has no address|no name server answers)"),
    ],
)
def test_who_is_not_there_is_said_in_plain_words(url: str, said: str) -> None:
    with pytest.raises(httpx.TransportError) as caught:
        get(url)
    assert re.fullmatch(said, in_words(caught.value))
