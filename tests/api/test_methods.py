"""HEAD, OPTIONS, Allow, and what is said of a path that is not there."""

from __future__ import annotations

import pytest
from api_rig import Api, FakeWorker

PATHS = [
    "/health/live", "/health/ready", "/openapi.json", "/docs", "/metrics", "/nowhere", "/v1/quote",
    "/v1/documents", "/v1/documents/DOC", "/v1/documents/DOC/text", "/v1/documents/DOC/pages",
    "/v1/documents/doc_x", "/v1/jobs", "/v1/jobs?state=asleep", "/v1/jobs/JOB", "/v1/jobs/JOB/result",
    "/v1/jobs/JOB/deliveries", "/v1/prefixes", "/v1/models", "/v1/workers", "/v1/audit",
    "/v1/webhooks/secret",
]  # fmt: skip
OF_THEIR_MOMENT = {"x-request-id", "date"}


@pytest.mark.parametrize("path", PATHS)
def test_head_has_the_status_and_the_headers_of_get_and_no_body(shared_api: Api, path: str) -> None:
    document = shared_api.upload()
    path = path.replace("DOC", document)
    if "JOB" in path:
        path = path.replace("JOB", shared_api.submit(document)["id"])
    got, asked = shared_api.http.get(path), shared_api.http.head(path)
    assert (asked.status_code, asked.content) == (got.status_code, b"")
    same = {name for name in got.headers if name not in OF_THEIR_MOMENT}
    # A problem has the request's id, and counts may change between two requests; their sizes do not matter.
    if got.is_error or path == "/metrics":
        same -= {"content-length"}
    assert {name: asked.headers.get(name) for name in same} == {name: got.headers[name] for name in same}


def test_head_with_an_etag_is_not_modified(shared_api: Api) -> None:
    path = f"/v1/documents/{shared_api.upload()}/text"
    tag = shared_api.http.head(path).headers["ETag"]
    assert shared_api.http.head(path, headers={"If-None-Match": tag}).status_code == 304


def test_head_on_an_event_stream_ends_at_once(api: Api) -> None:
    job = api.submit()["id"]
    with api.http.stream("GET", f"/v1/jobs/{job}/events") as stream:
        kinds = {name: stream.headers[name] for name in ("content-type", "cache-control")}
    answer = api.http.head(f"/v1/jobs/{job}/events")
    assert (answer.status_code, answer.content) == (200, b"")
    assert {name: answer.headers[name] for name in kinds} == kinds
    # The connection is of use again.
    assert api.http.head("/v1/jobs/job_x/events").status_code == 404


def test_head_that_waits_is_held_back_as_get_is(api: Api) -> None:
    job = api.submit()["id"]
    api.http.post(f"/v1/jobs/{job}/cancel")
    answer = api.http.head(f"/v1/jobs/{job}", params={"wait": 60})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["ETag"] == api.http.get(f"/v1/jobs/{job}").headers["ETag"]


ALLOWED = [
    ("PUT", "/v1/documents", "GET, HEAD, POST, OPTIONS"),
    ("PATCH", "/v1/documents/doc_x", "GET, HEAD, DELETE, OPTIONS"),
    ("POST", "/v1/documents/doc_x/text", "GET, HEAD, OPTIONS"),
    ("DELETE", "/v1/jobs", "GET, HEAD, POST, OPTIONS"),
    ("GET", "/v1/jobs/job_x/cancel", "POST, OPTIONS"),
    ("HEAD", "/v1/jobs/job_x/cancel", "POST, OPTIONS"),
    ("PUT", "/v1/prefixes", "GET, HEAD, POST, DELETE, OPTIONS"),
    ("POST", "/health/live", "GET, HEAD, OPTIONS"),
    ("POST", "/openapi.json", "GET, HEAD, OPTIONS"),
    ("TRACE", "/v1/workers", "GET, HEAD, POST, OPTIONS"),
]


@pytest.mark.parametrize(("method", "path", "methods"), ALLOWED)
def test_a_refused_method_is_answered_with_every_method_of_its_path(
    shared_api: Api, method: str, path: str, methods: str
) -> None:
    answer = shared_api.http.request(method, path)
    assert (answer.status_code, answer.headers["Allow"]) == (405, methods)
    assert answer.headers["Content-Type"] == "application/problem+json"
    if method != "HEAD":
        assert answer.json()["detail"] == f"{method} is not possible on '{path}'; it has {methods}"
    asked = shared_api.http.options(path)
    assert (asked.status_code, asked.headers["Allow"], asked.content) == (204, methods, b"")


def test_what_allow_names_is_never_a_405(api: Api) -> None:
    FakeWorker(api.redis).be_there()
    for path, known in api.http.get("/openapi.json").json()["paths"].items():
        for name in ("document_id", "job_id", "prefix_id"):
            path = path.replace("{" + name + "}", "x")
        named = api.http.options(path).headers["Allow"].split(", ")
        assert {method.upper() for method in known} <= set(named)
        for method in named:
            assert api.http.request(method, path).status_code != 405, f"{method} {path}"


@pytest.mark.parametrize("path", ["/v1/documents/", "/v1/jobs/job_x/", "/health/live/", "/v1/documents//"])
def test_a_slash_too_many_is_named(shared_api: Api, path: str) -> None:
    answer = shared_api.http.get(path)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert answer.json()["detail"] == f"there is no route '{path}': leave out the slash at its end"


def test_options_asks_for_nothing_that_is_not_there(shared_api: Api) -> None:
    answer = shared_api.http.options("/nowhere")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
