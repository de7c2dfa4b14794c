"""Keys, scopes and tenants: who may come in, and that nobody sees what another one's are."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_rig import Api, FakeWorker, held, make_settings, result, running

from api.keys import SCOPES, WORKER, Scope
from api.settings import Settings
from jobs import EventType
from worker.documents import DocumentSource

OPEN = {"/health/live", "/health/ready"}
FOR_ADMINS = {"/metrics", "/v1/workers", "/v1/audit"}
FOR_SUBMITTERS = {"/v1/webhooks/secret", "/v1/webhooks/secret/rotate"}
FOR_WORKERS = {("POST", "/v1/workers")}
PREFIX = "1" * 32


@dataclass
class Locked:
    """An API that asks for keys, a tenant with a finished job, and another one."""

    api: Api
    document: str
    job: str
    queued: str
    keys: dict[str, str]

    def send(self, method: str, path: str, key: str | None, **options: Any) -> httpx.Response:
        headers = options.pop("headers", {}) | ({} if key is None else {"Authorization": f"Bearer {key}"})
        return httpx.request(method, self.api.url + path, headers=headers, timeout=30, **options)

    def routes(self) -> list[tuple[str, str]]:
        """Every method and path of the OpenAPI document, with the ids of the first tenant in it."""
        ids = {"document_id": self.document, "job_id": self.job, "prefix_id": PREFIX}
        found = []
        for path, methods in self.api.http.get("/openapi.json").json()["paths"].items():
            filled = re.sub(r"\{(\w+)\}", lambda match: ids[match[1]], path)
            found += [(method.upper(), filled) for method in methods]
        return found

    def key(self, tenant: str, *scopes: Scope) -> str:
        return self.api.services.keys.create(tenant, scopes, "a test")[1]


@pytest.fixture(scope="module")
def locked(
    tmp_path_factory: pytest.TempPathFactory, empty_database: Path, redis_server: str
) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("locked")
    with running(make_settings(folder, empty_database, redis_server, require_key=True)) as api:
        keys = api.services.keys
        made = {name: keys.create(name, SCOPES, "")[1] for name in ("ours", "theirs", "revoked")}
        keys.revoke(next(row.id for row, tenant in keys.rows() if tenant == "revoked"))
        api.http.headers["Authorization"] = f"Bearer {made['ours']}"
        worker = FakeWorker(api.redis)
        document = api.upload("Only for us.")
        job = str(api.submit(document)["id"])
        worker.say(job, 1, EventType.SUCCEEDED, result("Only for us."))
        api.wait_state(job, "succeeded")
        ours = keys.caller(made["ours"])
        assert ours is not None
        worker.hold(held(PREFIX, api.services.prefixes.owner(ours.tenant)))
        yield Locked(api, document, job, str(api.submit(document)["id"]), made)


def test_every_route_asks_for_a_key(locked: Locked) -> None:
    asked = {(method, path): locked.send(method, path, None) for method, path in locked.routes()}
    assert len(asked) > 12
    for (method, path), answer in asked.items():
        if path in OPEN:
            assert answer.status_code in (200, 503)
        else:
            assert (answer.status_code, answer.json()["code"]) == (401, "key_required"), f"{method} {path}"
            assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["llk_", "llk_" + "A" * 43, "é", "revoked", "a b"])
def test_every_route_refuses_a_key_that_is_not_valid(locked: Locked, key: str) -> None:
    key = locked.keys.get(key, key)
    header = {"Authorization": f"Bearer {key}".encode("latin-1")}
    refusals = set()
    for method, path in locked.routes():
        answer = httpx.request(method, locked.api.url + path, headers=header)
        assert answer.status_code == 401, f"{method} {path}"
        refusals.add((answer.json()["code"], answer.json()["detail"]))
    # The same words for a wrong key and a revoked one.
    assert len(refusals) == 1
    assert refusals.pop()[0] == "key_invalid"


@pytest.mark.parametrize("value", ["Basic bGxr", "Bearer", "bearer", "llk_x"])
def test_another_kind_of_credential_is_refused(locked: Locked, value: str) -> None:
    answer = httpx.get(locked.api.url + "/v1/jobs", headers={"Authorization": value})
    assert answer.status_code == 401


def test_a_scope_opens_its_own_methods_alone(locked: Locked) -> None:
    reader, writer = locked.key("theirs", "read"), locked.key("theirs", "submit")
    for method, path in locked.routes():
        if path in OPEN:
            continue
        reads = method == "GET"
        for key, may in ((reader, reads), (writer, not reads)):
            answer = locked.send(method, path, key)
            is_refused = answer.status_code == 403 and answer.json()["code"] == "scope_missing"
            for_others = path in FOR_ADMINS | FOR_SUBMITTERS or (method, path) in FOR_WORKERS
            assert is_refused == (not may or for_others), f"{method} {path}"


def test_no_route_shows_a_foreign_tenant_what_is_ours(locked: Locked) -> None:
    """With our ids and with ids that nobody has: the same status and words, and nothing of ours inside."""
    mine = locked.keys["theirs"]
    nobody = {locked.document: "doc_" + "0" * 20, locked.job: "job_" + "0" * 20, PREFIX: "0" * 32}
    for method, path in locked.routes():
        if path in OPEN or path in FOR_ADMINS:
            continue
        answer = locked.send(method, path, mine)
        assert "Only for us." not in answer.text
        ours = next((item for item in nobody if item in path), None)
        if ours is None:
            assert not any(item in answer.text for item in nobody), f"{method} {path}"
            continue
        assert answer.status_code == 404, f"{method} {path}"
        other = locked.send(method, path.replace(ours, nobody[ours]), mine)
        assert _words(answer) == _words(other), f"{method} {path}"
    assert locked.api.job(locked.job)["state"] == "succeeded"
    assert locked.api.job(locked.queued)["state"] == "queued"


def test_the_owner_is_not_refused_where_a_foreign_tenant_is(locked: Locked) -> None:
    for method, path in locked.routes():
        if method == "GET" and (locked.document in path or locked.job in path):
            assert locked.api.http.request(method, path).status_code in (200, 204), path


def test_a_foreign_document_cannot_be_asked_about(locked: Locked) -> None:
    body = {"type": "summarize", "documents": [locked.document], "max_output_tokens": 8}
    answer = locked.send("POST", "/v1/jobs", locked.keys["theirs"], json=body)
    assert answer.status_code == 404
    body["documents"] = ["doc_" + "0" * 20]
    other = locked.send("POST", "/v1/jobs", locked.keys["theirs"], json=body)
    assert _words(answer) == _words(other)


def test_lists_have_ones_own_alone(locked: Locked) -> None:
    for path in ("/v1/documents", "/v1/jobs", "/v1/prefixes"):
        assert locked.send("GET", path, locked.key("nobody", "read")).json()["data"] == []
        assert len(locked.api.http.get(path).json()["data"]) >= 1


def test_the_same_content_is_new_to_another_tenant(locked: Locked) -> None:
    file = {"file": ("a.txt", b"Only for us.")}
    ours = locked.send("POST", "/v1/documents", locked.keys["ours"], files=file)
    theirs = locked.send("POST", "/v1/documents", locked.key("a third", "submit"), files=file)
    assert (ours.status_code, theirs.status_code) == (200, 201)
    assert ours.json()["id"] != theirs.json()["id"]


def test_an_idempotency_key_is_its_tenants(locked: Locked) -> None:
    key = locked.key("idempotent", "submit")
    document = locked.send("POST", "/v1/documents", key, json={"name": "a", "text": "b"}).json()["id"]
    ours = locked.api.http.post(
        "/v1/jobs",
        json={"type": "summarize", "documents": [locked.document], "max_output_tokens": 8},
        headers={"Idempotency-Key": "same"},
    )
    body = {"type": "summarize", "documents": [document], "max_output_tokens": 8}
    theirs = locked.send("POST", "/v1/jobs", key, json=body, headers={"Idempotency-Key": "same"})
    assert (ours.status_code, theirs.status_code) == (202, 202)
    assert ours.json()["id"] != theirs.json()["id"]


def test_a_worker_reads_the_documents_of_its_job_and_nothing_else(locked: Locked) -> None:
    job = locked.api.services.jobs.get(locked.queued)
    assert job is not None
    (ref,) = locked.api.services.jobs.run_request(job).documents
    token = locked.key("default", WORKER)
    source = DocumentSource(locked.api.url, lambda: token)
    (text,) = source.fetch([ref], lambda: False)
    source.close()
    assert text.text == "Only for us."
    other = locked.api.upload("Another document of ours.")
    for method, path in locked.routes():
        if path not in OPEN and not path.endswith(("/text", "/pages")) and (method, path) not in FOR_WORKERS:
            assert locked.send(method, path, token).status_code == 403, path
    for what in ("text", "pages"):
        answer = locked.send("GET", f"/v1/documents/{other}/{what}", token)
        assert (answer.status_code, answer.json()["code"]) == (404, "document_not_found")


def test_a_worker_no_longer_reads_what_its_ended_job_read(locked: Locked) -> None:
    document = locked.api.upload("Read once.")
    job = str(locked.api.submit(document)["id"])
    path, token = f"/v1/documents/{document}/text", locked.key("default", WORKER)
    assert locked.send("GET", path, token).text == "Read once."
    assert locked.api.http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    assert locked.send("GET", path, token).status_code == 404


def test_not_even_an_admin_is_a_worker(locked: Locked) -> None:
    admin = locked.key("theirs", "admin")
    assert locked.send("GET", f"/v1/documents/{locked.document}/text", admin).status_code == 404
    assert locked.send("POST", "/v1/workers", admin, json={}).json()["params"]["scope"] == WORKER


def test_tenants_have_prefix_salts_of_their_own(locked: Locked) -> None:
    salts = {}
    for tenant in ("salt a", "salt b"):
        key = locked.key(tenant, "submit")
        document = locked.send("POST", "/v1/documents", key, json={"name": "a", "text": "b"}).json()["id"]
        body = {"type": "summarize", "documents": [document], "max_output_tokens": 8}
        job = locked.api.services.jobs.get(locked.send("POST", "/v1/jobs", key, json=body).json()["id"])
        assert job is not None
        salts[tenant] = locked.api.services.jobs.run_request(job).prefix_salt
        assert locked.api.services.jobs.run_request(job).prefix_salt == salts[tenant]
    assert {len(bytes.fromhex(salt)) for salt in salts.values()} == {16}
    assert salts["salt a"] != salts["salt b"]


def test_a_key_is_kept_as_its_hash(locked: Locked) -> None:
    key = locked.key("hashed", "read")
    with closing(sqlite3.connect(locked.api.services.settings.database)) as connection:
        dump = "\n".join(connection.iterdump())
    assert key not in dump
    assert key.removeprefix("llk_") not in dump


def test_strangers_see_whether_it_is_ready_but_not_why_not(locked: Locked) -> None:
    answer = locked.send("GET", "/health/ready", None)
    assert answer.status_code == 503
    assert set(answer.json()["checks"].values()) <= {"ok", "not ok"}
    assert (
        "none serves" in locked.send("GET", "/health/ready", locked.keys["ours"]).json()["checks"]["worker"]
    )


def test_without_a_key_this_machine_is_the_default_tenant(settings: Settings) -> None:
    with running(settings) as api:
        document = api.upload()
        key = api.services.keys.create("default", ["read"], "")[1]
        shown = {"Authorization": f"Bearer {key}"}
        assert api.http.get(f"/v1/documents/{document}", headers=shown).status_code == 200
        other = {"Authorization": f"Bearer {api.services.keys.create('other', ['read'], '')[1]}"}
        assert api.http.get(f"/v1/documents/{document}", headers=other).status_code == 404
        assert api.http.get("/metrics").status_code == 200
        assert api.http.get("/metrics", headers=shown).status_code == 403


def _words(answer: httpx.Response) -> tuple[int, str, str]:
    """What a refusal says, apart from the id that the caller itself wrote."""
    body = answer.json()
    return answer.status_code, body["code"], re.sub(r"(doc|job)_[0-9a-z]{20}|[01]{32}", "ID", body["detail"])
