"""Every credential on every route of the OpenAPI document: a route that is not in the table fails here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import httpx
import pytest
from api_rig import Api, FakeWorker, held, make_settings, running
from starlette.routing import Route

from api import routes
from api.gate import OPEN_PATHS
from api.keys import WORKER, Scope

OPEN, READ, SUBMIT, BOTH, ADMIN, JOIN, FETCH = "open", "read", "submit", "both", "admin", "join", "fetch"
NEEDS = {
    "GET /health/live": OPEN,
    "GET /health/ready": OPEN,
    "GET /metrics": ADMIN,
    "GET /v1/audit": ADMIN,
    "GET /v1/documents": READ,
    "POST /v1/documents": SUBMIT,
    "GET /v1/documents/{document_id}": READ,
    "DELETE /v1/documents/{document_id}": SUBMIT,
    "GET /v1/documents/{document_id}/text": FETCH,
    "GET /v1/documents/{document_id}/pages": FETCH,
    "GET /v1/jobs": READ,
    "POST /v1/jobs": SUBMIT,
    "GET /v1/jobs/{job_id}": READ,
    "DELETE /v1/jobs/{job_id}": SUBMIT,
    "GET /v1/jobs/{job_id}/result": READ,
    "GET /v1/jobs/{job_id}/events": READ,
    "GET /v1/jobs/{job_id}/deliveries": READ,
    "POST /v1/jobs/{job_id}/cancel": SUBMIT,
    "POST /v1/jobs/{job_id}/retry": SUBMIT,
    "GET /v1/models": READ,
    "GET /v1/prefixes": READ,
    "POST /v1/prefixes": SUBMIT,
    "DELETE /v1/prefixes": SUBMIT,
    "DELETE /v1/prefixes/{prefix_id}": SUBMIT,
    "POST /v1/prefixes/{prefix_id}/pin": SUBMIT,
    "POST /v1/prefixes/{prefix_id}/unpin": SUBMIT,
    "POST /v1/quote": SUBMIT,
    "GET /v1/webhooks/secret": BOTH,
    "POST /v1/webhooks/secret/rotate": BOTH,
    "GET /v1/workers": ADMIN,
    "POST /v1/workers": JOIN,
}
OPENED_BY = {
    "nothing": {OPEN},
    "read": {OPEN, READ, FETCH},
    "submit": {OPEN, SUBMIT},
    "read and submit": {OPEN, READ, FETCH, SUBMIT, BOTH},
    "admin": {OPEN, READ, FETCH, SUBMIT, BOTH, ADMIN},
    "worker": {OPEN, JOIN, FETCH},
    "the data folder's token": {OPEN, JOIN, FETCH},
}
UNKNOWN = ("nonsense", "a revoked one", "a worker's revoked one", "half a key", "a key and more")
STRANGERS: dict[str, tuple[Scope, ...]] = {
    "read": ("read",),
    "submit": ("submit",),
    "read and submit": ("read", "submit"),
    "admin": ("admin",),
}
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE", "TRACE", "PROPFIND")
PREFIX = "1" * 32


class Matrix:
    """An API that asks for keys, a queued job of ours, and one key of each kind."""

    def __init__(self, api: Api) -> None:
        keys = api.services.keys
        self.api = api
        self.keys: dict[str, str | None] = {"nothing": None, "nonsense": "llk_" + "A" * 43}

        def make(name: str, tenant: str, *scopes: Scope, ends: bool = False) -> str:
            row, plain = keys.create(tenant, scopes, name)
            self.keys[name] = plain
            if ends:
                keys.revoke(row.id)
            return plain

        make("read", "ours", "read")
        make("submit", "ours", "submit")
        both = make("read and submit", "ours", "read", "submit")
        make("admin", "ours", "admin")
        make("worker", "default", WORKER)
        for name, scopes in STRANGERS.items():
            make(f"a stranger's {name}", "theirs", *scopes)
        make("a revoked one", "ours", "admin", ends=True)
        make("a worker's revoked one", "default", WORKER, ends=True)
        self.keys |= {"half a key": both[:20], "a key and more": both + "A"}
        self.keys["the data folder's token"] = api.services.settings.local_worker_token.read_text().strip()
        api.http.headers["Authorization"] = f"Bearer {both}"
        document = api.upload("Only for us.")
        job = str(api.submit(document, callback_url="http://example.invalid/")["id"])
        ours = keys.caller(both)
        assert ours is not None
        FakeWorker(api.redis).hold(held(PREFIX, api.services.prefixes.owner(ours.tenant)))
        self.ids = {"document_id": document, "job_id": job, "prefix_id": PREFIX}

    def routes(self) -> set[str]:
        paths = httpx.get(self.api.url + "/openapi.json").json()["paths"]
        return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}

    def send(self, route: str, key: str) -> httpx.Response:
        method, path = route.split()
        path = re.sub(r"\{(\w+)\}", lambda match: self.ids[match[1]], path)
        plain = self.keys[key]
        headers = {} if plain is None else {"Authorization": f"Bearer {plain}"}
        # Each stream ends at once: whoever is let in is not kept.
        with httpx.stream(method, self.api.url + path, headers=headers, timeout=30) as answer:
            if "text/event-stream" not in answer.headers.get("content-type", ""):
                answer.read()
            return answer


@pytest.fixture(scope="module")
def matrix(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path, redis_server: str
) -> Iterator[Matrix]:
    folder = tmp_path_factory.mktemp("matrix")
    with running(make_settings(folder, empty_database, redis_server, require_key=True)) as api:
        yield Matrix(api)


def in_order(needs: dict[str, str]) -> list[str]:
    """What deletes comes last: the others are to find something."""
    return sorted(needs, key=lambda route: (route.startswith("DELETE"), route))


def test_the_table_has_every_route_and_no_other(matrix: Matrix) -> None:
    assert matrix.routes() == set(NEEDS)
    modules = [import_module(f"api.routes.{found.name}") for found in iter_modules(routes.__path__)]
    served = [route for module in modules if hasattr(module, "router") for route in module.router.routes]
    # Also what a module would keep out of the document.
    assert {f"{method} {route.path}" for route in served for method in route.methods} == set(NEEDS)
    own = {route.path for route in matrix.api.server._longleaf.routes if isinstance(route, Route)}
    assert own - OPEN_PATHS <= {"/redoc"}


@pytest.mark.parametrize("key", OPENED_BY)
def test_a_credential_opens_what_the_table_says_and_nothing_else(matrix: Matrix, key: str) -> None:
    for route in in_order(NEEDS):
        answer = matrix.send(route, key)
        is_open = NEEDS[route] in OPENED_BY[key]
        refusal = 401 if key == "nothing" else 403
        assert (answer.status_code in (401, 403)) == (not is_open), f"{route} with {key}"
        if not is_open:
            code = "key_required" if key == "nothing" else "scope_missing"
            assert (answer.status_code, answer.json()["code"]) == (refusal, code), f"{route} with {key}"


@pytest.mark.parametrize("key", UNKNOWN)
def test_an_unknown_credential_opens_nothing(matrix: Matrix, key: str) -> None:
    for route in NEEDS:
        answer = matrix.send(route, key)
        assert (answer.status_code, answer.json()["code"]) == (401, "key_invalid"), f"{route} with {key}"


@pytest.mark.parametrize("scopes", STRANGERS)
def test_another_tenants_key_finds_nothing_of_ours_on_any_route(matrix: Matrix, scopes: str) -> None:
    key = f"a stranger's {scopes}"
    for route in (route for route in in_order(NEEDS) if "{" in route and NEEDS[route] in OPENED_BY[scopes]):
        answer = matrix.send(route, key)
        assert answer.status_code == 404, f"{route} with {key}"
        assert "Only for us." not in answer.text


@pytest.mark.parametrize("key", ["nothing", "nonsense", "worker", "admin"])
def test_a_method_that_a_route_has_not_leads_nowhere(matrix: Matrix, key: str) -> None:
    refused = {"nothing": {401}, "nonsense": {401}, "worker": {403}, "admin": {405}}[key]
    for path in {route.split()[1] for route in NEEDS}:
        for method in METHODS:
            if f"{method} {path}" in NEEDS or (method == "HEAD" and f"GET {path}" in NEEDS):
                continue
            answer = matrix.send(f"{method} {path}", key)
            known = {204} if method == "OPTIONS" else {405}
            allowed = known if key == "admin" else refused
            # An open path's methods are no secret.
            if path in OPEN_PATHS and key != "nonsense":
                allowed = allowed | known
            assert answer.status_code in allowed, f"{method} {path} with {key}"


@pytest.mark.parametrize("key", OPENED_BY)
def test_head_opens_what_get_opens(matrix: Matrix, key: str) -> None:
    for route in (route for route in NEEDS if route.startswith("GET")):
        path = route.split()[1]
        got, asked = matrix.send(route, key), matrix.send(f"HEAD {path}", key)
        assert asked.status_code == got.status_code, f"{path} with {key}"


def test_without_keys_no_route_serves_a_page_from_elsewhere(shared_api: Api) -> None:
    for route in NEEDS:
        method, path = route.split()
        evil = httpx.request(method, shared_api.url + path, headers={"Host": "evil.example"})
        assert (evil.status_code, evil.json()["code"]) == (403, "host_refused"), route
        if method != "GET":
            for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
                answer = httpx.request(method, shared_api.url + path, headers=headers)
                assert (answer.status_code, answer.json()["code"]) == (403, "origin_refused"), route
