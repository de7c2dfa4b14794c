"""What an attacker sends: bombs, paths, heads and bodies that are not what they seem."""

from __future__ import annotations

import gzip
import io
import json
import re
import socket
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from api_rig import Api, eventually, make_settings, running

from api.documents import upload

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def locked(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path, redis_server: str
) -> Iterator[Api]:
    folder = tmp_path_factory.mktemp("locked")
    changes = {"require_key": True, "extract_wall_s": 20.0, "extract_memory_bytes": 2**30}
    with running(make_settings(folder, empty_database, redis_server, **changes)) as api:
        key = api.services.keys.create("ours", ["submit", "read"], "")[1]
        api.http.headers["Authorization"] = f"Bearer {key}"
        yield api


def dial(api: Api) -> socket.socket:
    return socket.create_connection(("127.0.0.1", httpx.URL(api.url).port or 0), timeout=30)


def say(api: Api, head: bytes) -> bytes:
    """What the server answers to bytes that no client library would send."""
    with dial(api) as raw:
        raw.sendall(head)
        answer = b""
        while chunk := raw.recv(65_536):
            answer += chunk
    return answer


def authorization(api: Api) -> bytes:
    return b"Authorization: " + api.http.headers["Authorization"].encode() + b"\r\n"


# Ways around the key

DETOURS = [
    "//v1/jobs", "/v1//jobs", "/V1/jobs", "/v1/jobs/", "/v1/jobs;a",
    "/v1%2fjobs", "/%76%31/jobs", "/v1/./jobs",
    "/health/live/../../v1/jobs", "/health/live/%2e%2e/%2e%2e/v1/jobs", "/docs/../v1/jobs",
    "/openapi.json/../v1/jobs",
    "/v1/jobs?path=/health/live", "/v1/jobs#/health/live", "/v1/jobs%00/health/live",
    "/docs/oauth2-redirect/v1/jobs",
]  # fmt: skip


@pytest.mark.parametrize("path", DETOURS)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "TRACE", "PROPFIND", "get"])
def test_no_spelling_of_a_path_gets_past_the_gate(locked: Api, path: str, method: str) -> None:
    answer = say(locked, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    status = int(answer.split()[1])
    assert status in (400, 401, 404), answer
    assert b'"data"' not in answer


@pytest.mark.parametrize(
    "header",
    [
        b"X-Forwarded-For: 127.0.0.1", b"X-Original-URL: /health/live", b"X-Rewrite-URL: /health/live",
        b"X-HTTP-Method-Override: GET", b"Cookie: key=llk_x", b"X-API-Key: llk_x", b"Authorization:",
        b"Authorization: Bearer null", b"Authorization: Bearer llk_'--", b"Forwarded: for=127.0.0.1",
    ],
)  # fmt: skip
def test_no_header_gets_past_the_gate(locked: Api, header: bytes) -> None:
    answer = say(
        locked, b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header + b"\r\n\r\n"
    )
    assert answer.split()[1] in (b"400", b"401")


def test_two_credentials_are_none(locked: Api) -> None:
    head = b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    both = authorization(locked) + b"Authorization: Bearer llk_x\r\n"
    assert say(locked, head + both + b"\r\n").split()[1] == b"401"
    assert say(locked, head + authorization(locked) + b"\r\n").split()[1] == b"200"


def test_a_slash_too_many_leads_to_no_other_host(locked: Api) -> None:
    for path in ("/v1/jobs/", "//evil.example/v1/jobs/", "/v1/documents//"):
        head = f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n".encode()
        answer = say(locked, head + authorization(locked) + b"\r\n")
        assert answer.split()[1] == b"404"
        assert b"\r\nlocation:" not in answer.lower()


# Bombs


def pdf_bomb(num_bytes: int) -> bytes:
    """A PDF of a few kilobytes whose one page unpacks to that many bytes."""
    packer = zlib.compressobj(9)
    text = b"(" + b"A" * 997 + b") Tj\n"
    packed = packer.compress(b"BT /F1 1 Tf 0 0 Td\n")
    for _ in range(num_bytes // len(text)):
        packed += packer.compress(text)
    packed += packer.compress(b"ET") + packer.flush()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [4 0 R] /Count 1 >>",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 5 0 R "
        b"/Resources << /Font << /F1 3 0 R >> >> >>",
        b"<< /Filter /FlateDecode /Length %d >>\nstream\n%s\nendstream" % (len(packed), packed),
    ]
    data = b"%PDF-1.4\n"
    for number, content in enumerate(objects, 1):
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    return data + b"trailer << /Root 1 0 R /Size 6 >>\n%%EOF\n"


def test_a_pdf_that_unpacks_to_far_more_is_refused_within_its_limits(locked: Api) -> None:
    bomb = pdf_bomb(40_000_000)
    assert len(bomb) < 200_000
    answer = locked.http.post("/v1/documents", files={"file": ("bomb.pdf", bomb)}, timeout=60)
    assert answer.status_code == 422, answer.text
    assert answer.json()["code"] in ("pdf_too_costly", "pdf_broken")
    assert locked.http.post("/v1/documents", json={"name": "a", "text": "still here"}).status_code == 201


def test_archives_are_not_unpacked(locked: Api) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", b"<w>" + b"A" * 50_000_000)
        archive.writestr("../../../etc/cron.d/x", b"* * * * * root true")
    for name in ("report.docx", "a.zip", "a.txt"):
        answer = locked.http.post("/v1/documents", files={"file": (name, packed.getvalue())})
        assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


def test_a_packed_body_is_not_unpacked(locked: Api) -> None:
    body = gzip.compress(b'{"name":"a","text":"' + b"A" * 5_000_000 + b'"}')
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = locked.http.post("/v1/documents", content=body, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_json")


NUMBERS = b"9" * 100_000
BODIES = {
    "deep lists": (b"[" * 500_000 + b"]" * 500_000, (400,)),
    "deep objects": (b'{"a":' * 200_000 + b"1" + b"}" * 200_000, (400,)),
    "a number without end": (b'{"type":"ask","max_output_tokens":' + NUMBERS + b"}", (400, 422)),
    "infinity": (b'{"type":"ask","temperature":1e999}', (422,)),
    "not a number": (b'{"type":"ask","temperature":NaN}', (400, 422)),
    "many keys": (b'{"type":"ask",' + b",".join(b'"k%d":1' % n for n in range(100_000)) + b"}", (422,)),
    "many documents": (json.dumps({"type": "summarize", "documents": ["d"] * 100_000}).encode(), (422,)),
    "a long model": (b'{"type":"summarize","documents":["d"],"model":"' + b"m" * 1_000_000 + b'"}', (404,)),
    "a long id": (json.dumps({"type": "summarize", "documents": ["d" * 1_000_000]}).encode(), (404, 422)),
    "too large": (b'{"a":"' + b"A" * (33 * 2**20) + b'"}', (413,)),
    "prototype": (b'{"type":"ask","__proto__":{"a":1},"__class__":"x"}', (422,)),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("route", ["/v1/jobs", "/v1/quote", "/v1/prefixes"])
def test_a_monstrous_spec_is_refused_with_a_short_answer(locked: Api, name: str, route: str) -> None:
    body, statuses = BODIES[name]
    if route == "/v1/prefixes":
        body = re.sub(rb'"type":"\w+"', b'"type":"warm"', body)
    answer = locked.http.post(route, content=body, headers={"Content-Type": "application/json"}, timeout=60)
    assert answer.status_code in statuses, answer.text[:500]
    assert len(answer.content) < 20_000


# Names and heads

NAMES = [
    "../../../../etc/passwd", "..\\..\\windows\\win.ini", "/etc/passwd", "C:\\a.txt", "a\x00.txt",
    "a\r\nX-Evil: 1.txt",
    ".", "..", "....//....//x", "\u202ecod.exe", "\u2028", "A" * 10_000, "%2e%2e%2fx",
    "~/.ssh/id_rsa", "con", "<script>",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_a_word_and_no_path(locked: Api, name: str) -> None:
    answer = locked.http.post("/v1/documents", json={"name": name, "text": f"text of {NAMES.index(name)}"})
    assert answer.status_code == 201
    kept = answer.json()["name"]
    assert not set(kept) & set("/\\\r\n\x00")
    assert kept not in (".", "..")
    assert len(kept) <= 255
    assert "x-evil" not in answer.headers
    shown = locked.http.get(answer.headers["Location"] + "/text")
    assert shown.headers["content-type"].startswith("text/plain")
    assert shown.headers["x-content-type-options"] == "nosniff"
    assert not (Path("/tmp") / "passwd").exists()


@pytest.mark.parametrize(
    "path",
    ["/v1/documents/..%2f..%2fetc%2fpasswd/text", "/v1/documents/%0d%0aX-Evil:%201/text",
     "/v1/jobs/%00/result",
     "/v1/jobs/' OR 1=1 --", "/v1/jobs/%25s%25n", "/v1/documents/doc_" + "0" * 100_000, "/v1/jobs/%ff%fe"],
)  # fmt: skip
def test_an_id_is_looked_up_and_nothing_else(locked: Api, path: str) -> None:
    answer = say(
        locked,
        f"GET {path.replace(' ', '%20')} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
        + authorization(locked)
        + b"\r\n",
    )
    assert answer.split()[1] in (b"400", b"404", b"414"), answer[:300]
    assert b"\r\nx-evil" not in answer.lower()


@pytest.mark.parametrize(
    "header", ["X-Request-ID", "Idempotency-Key", "Prefer", "Last-Event-ID", "If-None-Match"]
)
def test_no_header_is_reflected_as_another_one(locked: Api, header: str) -> None:
    job = locked.submit()["id"]
    for value in (b"a\rX-Evil: 1", b"a\x0bX-Evil: 1", b"\xff\xfe", b"a" * 10_000, b'a, b;\t c="\\"'):
        head = f"GET /v1/jobs/{job} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{header}: ".encode()
        answer = say(locked, head + value + b"\r\n" + authorization(locked) + b"\r\n")
        assert answer.split()[1] in (b"200", b"400", b"422", b"431"), answer[:300]
        assert b"\r\nx-evil" not in answer.lower()


SMUGGLED = [
    b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
    b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"Content-Length: -1\r\n\r\n",
    b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
]


@pytest.mark.parametrize("rest", SMUGGLED)
def test_a_body_of_two_lengths_smuggles_nothing(locked: Api, rest: bytes) -> None:
    answer = say(locked, b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + rest)
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]
    assert all(status in (400, 401, 501) for status in statuses), answer


# Patience


def test_an_upload_that_stalls_is_ended_and_holds_up_nobody(
    locked: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STALL_S", 0.5)
    head = b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with ExitStack() as open_ones:
        slow = [open_ones.enter_context(dial(locked)) for _ in range(60)]
        for raw in slow:
            raw.sendall(head + authorization(locked) + b"Content-Length: 1000\r\n\r\n{")
        assert locked.http.get("/v1/jobs").status_code == 200
        for raw in slow:
            answer = raw.recv(65_536)
            assert answer.startswith(b"HTTP/1.1 408"), answer


def test_an_upload_that_stalls_leaves_no_file(locked: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "STALL_S", 0.2)
    head = (
        b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    )
    part = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 50_000
    with dial(locked) as raw:
        raw.sendall(head + authorization(locked) + b"Content-Length: 100000\r\n\r\n" + part)
        assert b"408" in raw.recv(65_536)
    eventually(lambda: locked.http.get("/v1/jobs").status_code == 200)


# Everything else, by chance


def test_a_short_fuzz_of_all_routes_finds_no_fault(tmp_path: Path) -> None:
    """Generated from the OpenAPI document; `python -m bench.api_fuzz` is the long form."""
    report = tmp_path / "report.json"
    words = ["-m", "bench.api_fuzz", "--requests", "300", "--examples", "4", "--json", str(report)]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = json.loads(report.read_text())
    assert found["num_5xx"] == 0
    assert found["num_requests"] >= 300
