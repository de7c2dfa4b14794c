"""Bodies of few fields: bounded as uploads and specs are, on every route; and what a machine calls itself."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import httpx
import pytest
from api_rig import Api, make_settings, running

from api import routes
from api.documents import upload
from api.keys import SCOPES, WORKER
from api.routes.small_body import MAX_BYTES
from jobs import PROTOCOL, VERSION
from jobs.logs import TextFormatter

JOIN, ROTATE = "/v1/workers", "/v1/webhooks/secret/rotate"
PATHS = [JOIN, ROTATE]
JOINING = {"host": "mac", "version": VERSION, "protocol": PROTOCOL}


class Small:
    def __init__(self, api: Api) -> None:
        self.api = api
        keys = api.services.keys
        self.keys = {
            JOIN: keys.create("default", [WORKER], "")[1],
            ROTATE: keys.create("ours", SCOPES, "")[1],
        }

    def send(self, path: str, content: Any, kind: str = "application/json") -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.keys[path]}", "Content-Type": kind}
        return httpx.post(self.api.url + path, content=content, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def small(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path, redis_server: str
) -> Iterator[Small]:
    folder = tmp_path_factory.mktemp("small")
    with running(make_settings(folder, empty_database, redis_server, require_key=True)) as api:
        yield Small(api)


def test_no_route_leaves_its_body_to_the_framework() -> None:
    """It would take one of any length into memory."""
    modules = [import_module(f"api.routes.{found.name}") for found in iter_modules(routes.__path__)]
    served = [route for module in modules if hasattr(module, "router") for route in module.router.routes]
    assert len(served) > 20
    assert [route.path for route in served if route.body_field is not None] == []


BODIES = {
    "too long": (b'{"host":"' + b"A" * MAX_BYTES + b'"}', 413),
    "deep": (b"[" * 8000, 400),
    "a number without end": (b'{"protocol":' + b"9" * 10_000 + b"}", 400),
    "a large number": (b'{"protocol":' + b"9" * 4000 + b',"overlap_s":' + b"9" * 4000 + b"}", 422),
    "no number": (b'{"protocol":NaN,"overlap_s":Infinity}', 422),
    "half a character": (b'{"host":"\\ud800","version":"\\ud800","protocol":1,"overlap_s":1}', 422),
    "many keys": (b"{" + b",".join(b'"k%d":1' % n for n in range(1500)) + b"}", 422),
    "a list": (b"[]", 422),
    "prototype": (b'{"__proto__":{"a":1}}', 422),
    "nothing": (b" ", 400),
    "no text": (b"\xff\xfe", 400),
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BODIES)
def test_a_monstrous_body_is_refused_with_a_short_answer(small: Small, path: str, name: str) -> None:
    body, status = BODIES[name]
    answer = small.send(path, body)
    assert answer.status_code == status, answer.text[:500]
    assert len(answer.content) < 8000


@pytest.mark.parametrize("value", [True, False, "1", 1.5])
def test_a_number_is_written_as_a_number(small: Small, value: object) -> None:
    for path, body in ((JOIN, JOINING | {"protocol": value}), (ROTATE, {"overlap_s": value})):
        answer = small.send(path, json.dumps(body))
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request"), path


@pytest.mark.parametrize("path", PATHS)
def test_an_endless_body_is_refused_while_it_comes(small: Small, path: str) -> None:
    answer = small.send(path, (b" " * 10_000 for _ in range(500)))
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    assert answer.json()["params"]["received_bytes"] < 1_000_000


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_stalls_is_ended(small: Small, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "STALL_S", 0.2)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {small.keys[path]}\r\nContent-Length: 100\r\n\r\n{{"
    with socket.create_connection(("127.0.0.1", httpx.URL(small.api.url).port or 0), timeout=30) as raw:
        raw.sendall(head.encode())
        assert raw.recv(65_536).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_form_is_no_body(small: Small, path: str, kind: str) -> None:
    assert small.send(path, json.dumps(JOINING), kind).status_code == 415


def test_without_a_body_a_rotation_has_its_overlap(small: Small) -> None:
    headers = {"Authorization": f"Bearer {small.keys[ROTATE]}"}
    answer = httpx.post(small.api.url + ROTATE, headers=headers)
    assert answer.status_code == 200
    assert answer.json()["old_until"] is not None


NAMES = [
    "a\r\nX-Evil: 1",
    "a\nERROR api: forged",
    "../../etc/passwd",
    "\x00",
    "\x1b[2J",
    "\u2028",
    "%s%n",
    "😀" * 255,
]


@pytest.mark.parametrize("field", ["host", "version"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("protocol", [PROTOCOL, PROTOCOL + 1])
def test_what_a_machine_calls_itself_is_shown_and_nothing_else(
    small: Small, field: str, name: str, protocol: int, caplog: pytest.LogCaptureFixture
) -> None:
    body = JOINING | {field: name[:64] if field == "version" else name, "protocol": protocol}
    with caplog.at_level(logging.INFO):
        answer = small.send(JOIN, json.dumps(body))
    assert answer.status_code == (200 if protocol == PROTOCOL else 409)
    assert "x-evil" not in answer.headers
    formatter = TextFormatter("%(levelname)s %(message)s")
    assert all(formatter.format(record).isprintable() for record in caplog.records)


def test_a_message_is_one_line_and_an_exception_is_not() -> None:
    try:
        raise ValueError("broken\x1b[2J\u202e")
    except ValueError:
        record = logging.LogRecord("a", 40, "f", 1, "%s\nERROR\x1b[2J\u2028.", ("a\r\nb",), sys.exc_info())
    first, *rest = TextFormatter("%(levelname)s %(message)s").format(record).split("\n")
    assert first == "ERROR a\\r\\nb\\nERROR\\x1b[2J\\u2028."
    assert rest[0] == "Traceback (most recent call last):"
    assert all(line.isprintable() for line in rest)
