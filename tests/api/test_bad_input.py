"""Each bad input, with its status and code. A problem names the value, the limit and the field."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from api_rig import ASK_TOKENS, CONTEXT, FRAME_TOKENS, MODEL, Api, FakeWorker


@pytest.fixture
def api(shared_api: Api) -> Api:
    """Refusals leave nothing behind, so one API takes them all."""
    return shared_api


PROBLEM_FIELDS = {"type", "title", "status", "detail", "code", "param", "request_id"}


def check(answer: httpx.Response, status: int, code: str, param: str | None = None) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert set(body) >= PROBLEM_FIELDS
    assert (body["status"], body["code"]) == (status, code)
    assert body["request_id"] == answer.headers["X-Request-ID"]
    assert body["detail"]
    assert "Input should" not in answer.text  # pydantic's words are for programmers
    if param is not None:
        assert body["param"] == param
    return body


FILES = [
    ("empty.txt", b"", 422, "document_empty"),
    ("blank.txt", b" \n\t\r\n \x0c ", 422, "document_empty"),
    ("bom.txt", b"\xef\xbb\xbf", 422, "document_empty"),
    ("utf16-bom.txt", b"\xff\xfe", 422, "document_empty"),
    ("zero-width.txt", "\u200b\u200b \ufeff".encode(), 422, "document_empty"),
    ("zeros.txt", b"\x00" * 1000, 415, "unsupported_media_type"),
    ("text-with-nul.md", b"# Title\n\nA \x00 byte.", 415, "unsupported_media_type"),
    ("photo.txt", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", 415, "unsupported_media_type"),
    ("latin1.txt", "Füße".encode("latin-1"), 415, "unsupported_media_type"),
    ("cut.txt", "Füße".encode()[:2], 415, "unsupported_media_type"),
    ("odd-utf16.txt", b"\xff\xfea\x00b", 415, "unsupported_media_type"),
    ("utf32.txt", "abc".encode("utf-32"), 415, "unsupported_media_type"),
    ("control.txt", bytes(range(1, 32)) * 10, 415, "unsupported_media_type"),
    ("report.docx", b"PK\x03\x04\x14\x00\x06\x00\x08\x00", 415, "unsupported_media_type"),
    ("broken.pdf", b"%PDF-1.7\nnothing else", 422, "pdf_broken"),
    ("named-text.txt", b"%PDF-1.4\n%%EOF", 422, "pdf_broken"),
]


@pytest.mark.parametrize(("name", "data", "status", "code"), FILES, ids=[row[0] for row in FILES])
def test_a_bad_file_is_refused(api: Api, name: str, data: bytes, status: int, code: str) -> None:
    before = api.http.get("/v1/documents").json()
    check(api.http.post("/v1/documents", files={"file": (name, data)}), status, code)
    assert api.http.get("/v1/documents").json() == before


JSON = {"Content-Type": "application/json"}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
MULTIPART = {"Content-Type": "multipart/form-data; boundary=b"}
PART = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
HEAD = b"POST /v1/documents HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=b\r\n"
BODIES: list[tuple[str, dict[str, str], bytes, int, str, str | None]] = [
    ("no content type", {}, b"text", 415, "unsupported_media_type", "Content-Type"),
    ("plain text", {"Content-Type": "text/plain"}, b"text", 415, "unsupported_media_type", "Content-Type"),
    (
        "form",
        {"Content-Type": "application/x-www-form-urlencoded"},
        b"a=b",
        415,
        "unsupported_media_type",
        None,
    ),
    ("no boundary", {"Content-Type": "multipart/form-data"}, b"x", 400, "invalid_multipart", None),
    (
        "not multipart",
        {"Content-Type": "multipart/form-data; boundary=b"},
        b"x",
        400,
        "invalid_multipart",
        None,
    ),
    ("no json", JSON, b"{", 400, "invalid_json", None),
    ("empty json", JSON, b"", 400, "invalid_json", None),
    ("json in latin-1", JSON, b'{"name":"a","text":"\xfc"}', 400, "invalid_json", None),
    ("deep json", JSON, b"[" * 100_000, 400, "invalid_json", None),
    ("json list", JSON, b"[]", 422, "invalid_request", None),
    ("json null", JSON, b"null", 422, "invalid_request", None),
    ("no text", JSON, b'{"name":"a"}', 422, "invalid_request", "text"),
    ("number as text", JSON, b'{"name":"a","text":1}', 422, "invalid_request", "text"),
    ("unknown field", JSON, b'{"name":"a","text":"b","c":1}', 422, "invalid_request", "c"),
    ("lone surrogate", JSON, b'{"name":"a","text":"\\ud800"}', 422, "invalid_request", "text"),
    ("surrogate name", JSON, b'{"name":"\\udfff","text":"a"}', 422, "invalid_request", "name"),
    ("nul in json", JSON, b'{"name":"a","text":"a\\u0000b"}', 415, "unsupported_media_type", None),
    ("empty text", JSON, b'{"name":"a","text":""}', 422, "document_empty", None),
]


@pytest.mark.parametrize(
    ("headers", "body", "status", "code", "param"), [r[1:] for r in BODIES], ids=[r[0] for r in BODIES]
)
def test_a_bad_document_body_is_refused(
    api: Api, headers: dict[str, str], body: bytes, status: int, code: str, param: str | None
) -> None:
    check(api.http.post("/v1/documents", headers=headers, content=body), status, code, param)


@pytest.mark.parametrize("fields", [{"other": ("a.txt", b"text")}, {"file": (None, b"text")}])
def test_a_form_without_a_file_is_refused(api: Api, fields: Any) -> None:
    check(api.http.post("/v1/documents", files=fields), 422, "invalid_request", "file")


def test_a_form_with_two_files_is_refused(api: Api) -> None:
    two = [("file", ("a.txt", b"a")), ("file", ("b.txt", b"b"))]
    check(api.http.post("/v1/documents", files=two), 400, "invalid_multipart")


def test_an_upload_over_the_limit_is_refused_by_its_length(api: Api) -> None:
    answer = api.http.post("/v1/documents", files={"file": ("big.txt", b"x" * 100_000_000)})
    body = check(answer, 413, "too_large")
    assert body["params"]["limit_bytes"] == 200_000
    assert body["params"]["received_bytes"] >= 100_000_000
    assert "200000" in body["detail"]
    assert str(body["params"]["received_bytes"]) in body["detail"]


def test_an_upload_just_over_the_limit_is_refused_by_the_file_alone(api: Api) -> None:
    assert api.http.post("/v1/documents", files={"file": ("a", b"x" * 200_000)}).status_code == 201
    body = check(api.http.post("/v1/documents", files={"file": ("a", b"x" * 200_001)}), 413, "too_large")
    assert body["params"] == {"limit_bytes": 200_000, "received_bytes": 200_001}
    text = {"name": "a", "text": "y" * 200_001}
    assert check(api.http.post("/v1/documents", json=text), 413, "too_large")["params"] == body["params"]


def test_an_endless_upload_without_a_length_is_refused_while_it_streams(api: Api) -> None:
    chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
    with dial(api) as raw:
        raw.sendall(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + f"{len(PART):x}\r\n".encode() + PART + b"\r\n"
        )
        for _ in range(6):  # of infinitely many: the answer comes as soon as the limit is passed
            raw.sendall(chunk)
        head, _, body = raw.recv(65_536).partition(b"\r\n\r\n")
        problem = json.loads(body or raw.recv(65_536))
    assert head.startswith(b"HTTP/1.1 413")
    assert problem["code"] == "too_large"
    assert 200_000 < problem["params"]["received_bytes"] < 6 * 65_536 + 1000


def test_a_length_that_promises_less_than_comes_does_no_harm(api: Api) -> None:
    with dial(api) as raw:
        raw.sendall(HEAD + b"Content-Length: 1000\r\n\r\n" + PART + b"x" * 100_000)
        assert raw.recv(65_536).startswith(b"HTTP/1.1 4")
    assert api.http.get("/health/live").status_code == 200


def test_a_client_that_leaves_in_the_middle_does_no_harm(api: Api) -> None:
    before = api.http.get("/v1/documents").json()
    with dial(api) as raw:
        raw.sendall(HEAD + b"Content-Length: 1000\r\n\r\n" + PART + b"x")
    assert api.http.get("/v1/documents").json() == before


def dial(api: Api) -> socket.socket:
    """A bare connection, for what an HTTP client would not send."""
    return socket.create_connection(("127.0.0.1", api.http.base_url.port or 0), timeout=10)


DOC = {"type": "summarize", "documents": ["DOC"]}
SPECS: list[tuple[str, Any, int, str, str | None]] = [
    ("no object", [], 422, "invalid_request", None),
    ("no type", {"documents": ["DOC"]}, 422, "invalid_request", None),
    ("unknown type", {"type": "dance", "documents": ["DOC"]}, 422, "invalid_request", None),
    ("no documents", {"type": "summarize"}, 422, "invalid_request", "documents"),
    ("empty documents", {"type": "summarize", "documents": []}, 422, "invalid_request", "documents"),
    ("65 documents", {"type": "summarize", "documents": ["DOC"] * 65}, 422, "invalid_request", "documents"),
    ("number as id", {"type": "summarize", "documents": [1]}, 422, "invalid_request", "documents[0]"),
    ("no questions", {"type": "ask", "documents": ["DOC"]}, 422, "invalid_request", "questions"),
    ("blank question", {"type": "ask", "documents": ["DOC"], "questions": ["a", " "]}, 422, "invalid_request",
     "questions[1]"),
    ("no instruction", {"type": "prompt", "documents": ["DOC"]}, 422, "invalid_request", "instruction"),
    ("long instruction", {"type": "prompt", "documents": ["DOC"], "instruction": "a" * 20_001}, 422,
     "invalid_request", "instruction"),
    ("unknown field", DOC | {"colour": 1}, 422, "invalid_request", "colour"),
    ("no output", DOC | {"max_output_tokens": 0}, 422, "invalid_request",
     "max_output_tokens"),
    ("hot", DOC | {"temperature": 3}, 422, "invalid_request", "temperature"),
    ("huge seed", DOC | {"seed": 10**40}, 422, "invalid_request", "seed"),
    ("unknown document", {"type": "summarize", "documents": ["DOC", "doc_x"]}, 404, "document_not_found",
     "documents[1]"),
    ("unknown model", DOC | {"model": "gpt-9"}, 404, "unknown_model", "model"),
    ("path as model", DOC | {"model": "../../etc"}, 404, "unknown_model",
     "model"),
    ("over the context", DOC | {"max_output_tokens": CONTEXT}, 413,
     "context_exceeded", "documents"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "status", "code", "param"), [row[1:] for row in SPECS], ids=[row[0] for row in SPECS]
)
def test_a_bad_job_is_refused(api: Api, spec: Any, status: int, code: str, param: str | None) -> None:
    document = api.upload("One two three.")
    before = api.http.get("/v1/jobs").json()
    if isinstance(spec, dict) and isinstance(spec.get("documents"), list):
        spec = spec | {"documents": [document if item == "DOC" else item for item in spec["documents"]]}
    check(api.http.post("/v1/jobs", json=spec), status, code, param)
    assert api.http.get("/v1/jobs").json() == before


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"\xff", 400, "invalid_json"),
        (b'{"type":"summarize","documents":["a"],"temperature":NaN}', 422, "invalid_request"),
        (b'{"type":"summarize","documents":["a"],"top_p":Infinity}', 422, "invalid_request"),
        (b'{"type":"summarize","documents":["\\ud800"]}', 422, "invalid_request"),
        (b'{"type":"ask","documents":["a"],"questions":["\\udc00"]}', 422, "invalid_request"),
        (b'{"type":"summarize","documents":["\\u0000"]}', 404, "document_not_found"),
        (b'{"type":"summarize","documents":["a"],"seed":1' + b"0" * 5000 + b"}", 400, "invalid_json"),
    ],
)
def test_json_that_is_none_or_odd_is_refused(api: Api, content: bytes, status: int, code: str) -> None:
    check(api.http.post("/v1/jobs", content=content, headers=JSON), status, code)


def test_a_job_must_come_as_json(api: Api) -> None:
    # A form can be sent by any web page to a server on this machine; JSON cannot.
    answer = api.http.post("/v1/jobs", content=b"{}", headers={"Content-Type": "text/plain"})
    check(answer, 415, "unsupported_media_type", "Content-Type")


def test_a_job_over_the_context_names_all_three_numbers(api: Api) -> None:
    document = api.upload(" ".join(["word"] * 40))
    spec = {
        "type": "ask",
        "documents": [document],
        "questions": ["one", "one two three"],
        "max_output_tokens": 8,
    }
    body = check(api.http.post("/v1/jobs", json=spec), 413, "context_exceeded")
    prompt = FRAME_TOKENS + 40 + ASK_TOKENS + 3
    expected = {"prompt_tokens": prompt, "max_output_tokens": 8, "context_tokens": CONTEXT, "model": MODEL}
    assert body["params"] == expected
    for number in (str(prompt), "8", str(CONTEXT)):
        assert number in body["detail"]
    assert api.http.post("/v1/jobs", json=spec | {"max_output_tokens": 7}).status_code == 202


def test_an_unknown_model_is_answered_with_the_known_ones(api: Api) -> None:
    FakeWorker(api.redis).be_there(model="served")
    spec = {"type": "summarize", "documents": [api.upload()], "model": "other"}
    body = check(api.http.post("/v1/jobs", json=spec), 404, "unknown_model")
    assert body["params"]["models"] == [MODEL, "served"]


REQUESTS = [
    ("GET", "/nowhere", 404, "not_found", None),
    ("GET", "/v1/jobs/job_x/nothing", 404, "not_found", None),
    ("PUT", "/v1/jobs", 405, "method_not_allowed", None),
    ("DELETE", "/health/live", 405, "method_not_allowed", None),
    ("GET", "/v1/jobs/job_x", 404, "job_not_found", None),
    ("GET", "/v1/jobs/%00", 404, "job_not_found", None),
    ("GET", "/v1/jobs/%ff%fe", 404, "job_not_found", None),
    ("GET", "/v1/jobs/job_x/result", 404, "job_not_found", None),
    ("GET", "/v1/jobs/job_x/events", 404, "job_not_found", None),
    ("POST", "/v1/jobs/job_x/cancel", 404, "job_not_found", None),
    ("DELETE", "/v1/jobs/job_x", 404, "job_not_found", None),
    ("GET", "/v1/jobs/job_x?wait=61", 422, "invalid_request", "wait"),
    ("GET", "/v1/jobs/job_x?wait=-1", 422, "invalid_request", "wait"),
    ("GET", "/v1/jobs/job_x?wait=nan", 422, "invalid_request", "wait"),
    ("GET", "/v1/jobs/job_x?wait=soon", 422, "invalid_request", "wait"),
    ("GET", "/v1/jobs?state=asleep", 422, "invalid_request", "state"),
    ("GET", "/v1/jobs?limit=0", 422, "invalid_request", "limit"),
    ("GET", "/v1/jobs?limit=201", 422, "invalid_request", "limit"),
    ("GET", "/v1/jobs?after=';--", 422, "invalid_request", "after"),
    ("GET", "/v1/documents?limit=x", 422, "invalid_request", "limit"),
    ("GET", "/v1/documents/doc_x", 404, "document_not_found", None),
    ("GET", "/v1/documents/doc_x/text", 404, "document_not_found", None),
    ("GET", "/v1/documents/doc_x/pages", 404, "document_not_found", None),
    ("DELETE", "/v1/documents/doc_x", 404, "document_not_found", None),
]


@pytest.mark.parametrize(("method", "path", "status", "code", "param"), REQUESTS)
def test_a_bad_request_is_a_problem(
    api: Api, method: str, path: str, status: int, code: str, param: str | None
) -> None:
    check(api.http.request(method, path), status, code, param)


@pytest.mark.parametrize("value", ["x", "-1", "1e9", "99999999999999999999"])
def test_a_bad_last_event_id_is_named(api: Api, value: str) -> None:
    answer = api.http.get("/v1/jobs/job_x/events", headers={"Last-Event-ID": value})
    check(answer, 422, "invalid_request", "last-event-id")


def test_a_request_id_is_taken_over_or_made(api: Api) -> None:
    assert (
        api.http.get("/health/live", headers={"X-Request-ID": "mine-1"}).headers["X-Request-ID"] == "mine-1"
    )
    body = check(api.http.get("/nowhere", headers={"X-Request-ID": "mine-2"}), 404, "not_found")
    assert body["request_id"] == "mine-2"
    for bad in ("a b", "x" * 129, "<script>"):
        assert api.http.get("/nowhere", headers={"X-Request-ID": bad}).headers["X-Request-ID"] != bad


def test_an_allowed_method_is_named(api: Api) -> None:
    assert "POST" in api.http.put("/v1/jobs").headers["Allow"]
