"""The prefixes that workers tell of: who sees them, and what a command becomes."""

from __future__ import annotations

from typing import Any

import pytest
from api_rig import Api, FakeWorker, held

from api.models import Tenant
from api.tenants import prefix_salt
from jobs import Warm
from jobs.prefixes import HOLDINGS_KEY, PrefixCommand, commands_key, holdings_key, prefix_owner

A, B, C = "a" * 32, "b" * 32, "c" * 32


def commands(api: Api, worker: FakeWorker) -> list[PrefixCommand]:
    found: list[Any] = api.redis.lrange(commands_key(worker.name), 0, -1)
    return [PrefixCommand.model_validate_json(raw) for raw in found]


def test_what_workers_hold_is_listed_once_the_last_used_first(api: Api, worker: FakeWorker) -> None:
    other = FakeWorker(api.redis, "w2")
    worker.hold(held(A, used_at=5.0), held(B, used_at=3.0))
    other.hold(held(B, used_at=9.0, pinned=True))
    found = api.http.get("/v1/prefixes").json()["data"]
    assert [(p["id"], p["workers"], p["pinned"]) for p in found] == [
        (B, ["w1", "w2"], True),
        (A, ["w1"], False),
    ]
    assert found[1] == {
        "id": A,
        "model": "tiny",
        "num_tokens": 320,
        "disk_bytes": 16384,
        "own_bytes": 8192,
        "prefill_s": 1.5,
        "used_at": "1970-01-01T00:00:05.000Z",
        "pinned": False,
        "workers": ["w1"],
    }


def test_a_tenant_sees_its_own_alone(api: Api, worker: FakeWorker) -> None:
    row, key = api.services.keys.create("anna", ["read"], "")
    worker.hold(held(A), held(B, api.services.prefixes.owner(row.tenant_id)), held(C, "0123456789abcdef"))
    theirs = api.http.get("/v1/prefixes", headers={"Authorization": f"Bearer {key}"})
    assert [p["id"] for p in theirs.json()["data"]] == [B]
    assert [p["id"] for p in api.http.get("/v1/prefixes").json()["data"]] == [A]


@pytest.mark.parametrize(
    ("method", "path", "op"),
    [("POST", "/pin", "pin"), ("POST", "/unpin", "unpin"), ("DELETE", "", "remove")],
)
def test_a_command_goes_to_every_worker_that_holds_the_prefix(
    api: Api, worker: FakeWorker, method: str, path: str, op: str
) -> None:
    other, third = FakeWorker(api.redis, "w2"), FakeWorker(api.redis, "w3")
    worker.hold(held(A), held(B))
    other.hold(held(A))
    third.hold(held(B))
    answer = api.http.request(method, f"/v1/prefixes/{A}{path}")
    assert (answer.status_code, answer.json()["id"]) == (202, A)
    assert [(c.op, c.id, c.owner) for c in commands(api, worker)] == [(op, A, "")]
    assert commands(api, other) == commands(api, worker)
    assert commands(api, third) == []
    assert 0 < int(api.redis.ttl(commands_key("w1"))) <= 60


def test_a_pinned_prefix_is_not_removed(api: Api, worker: FakeWorker) -> None:
    worker.hold(held(A, pinned=True))
    answer = api.http.delete(f"/v1/prefixes/{A}")
    assert (answer.status_code, answer.json()["code"]) == (409, "prefix_pinned")
    assert commands(api, worker) == []


def test_every_live_worker_is_asked_to_forget_what_is_the_callers_alone(api: Api, worker: FakeWorker) -> None:
    other = FakeWorker(api.redis, "w2")
    row, key = api.services.keys.create("anna", ["submit"], "")
    owner = api.services.prefixes.owner(row.tenant_id)
    worker.hold(held(A, pinned=True), held(B, owner))
    other.hold()
    answer = api.http.delete("/v1/prefixes", headers={"Authorization": f"Bearer {key}"})
    assert (answer.status_code, answer.json()) == (202, {"workers": ["w1", "w2"]})
    for told in (commands(api, worker), commands(api, other)):
        assert [(c.op, c.id, c.owner) for c in told] == [("forget", "", owner)]


def test_a_prefix_is_warmed_by_a_job(api: Api, worker: FakeWorker) -> None:
    document = api.upload()
    headers = {"Idempotency-Key": "once"}
    answers = [api.http.post("/v1/prefixes", json={"documents": [document]}, headers=headers) for _ in "ab"]
    job = answers[0].json()
    assert [answer.status_code for answer in answers] == [202, 202]
    assert answers[1].json()["id"] == job["id"]
    assert answers[0].headers["Location"] == job["links"]["self"]
    assert (job["type"], job["state"]) == ("warm", "queued")
    request = worker.take()
    assert isinstance(request.spec, Warm)
    assert [ref.id for ref in request.documents] == [document]


def test_a_job_of_the_type_warm_is_the_same(api: Api) -> None:
    document = api.upload()
    one = api.http.post("/v1/prefixes", json={"documents": [document], "expires_after": 60}).json()
    body = {"type": "warm", "documents": [document], "expires_after": 60}
    other = api.http.post("/v1/jobs", json=body).json()
    assert one["spec"] == other["spec"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"documents": ["doc_none"]}, 404, "document_not_found"),
        ({"documents": []}, 422, "invalid_request"),
        ({"documents": ["doc_none"], "questions": ["Why?"]}, 422, "invalid_request"),
        ({"documents": ["doc_none"], "type": "ask"}, 422, "invalid_request"),
        ([], 422, "invalid_request"),
    ],
)
def test_what_cannot_be_warmed_is_refused_as_a_job_is(api: Api, body: Any, status: int, code: str) -> None:
    answer = api.http.post("/v1/prefixes", json=body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_documents_over_the_context_are_not_warmed(api: Api) -> None:
    answer = api.http.post("/v1/prefixes", json={"documents": [api.upload("word " * 3000)]})
    assert (answer.status_code, answer.json()["code"]) == (413, "context_exceeded")
    assert answer.json()["params"]["max_output_tokens"] == 0


@pytest.mark.parametrize("prefix_id", [B, "..", "*", "x" * 500])
def test_a_prefix_that_nobody_holds_is_not_found(api: Api, worker: FakeWorker, prefix_id: str) -> None:
    worker.hold(held(A))
    answer = api.http.post(f"/v1/prefixes/{prefix_id}/pin")
    assert answer.status_code == 404
    assert not api.redis.exists(commands_key("w1"))


def test_a_listing_that_is_none_hides_no_other(api: Api, worker: FakeWorker) -> None:
    api.redis.set(holdings_key("mad"), b"{")
    worker.hold(held(A))
    assert [p["id"] for p in api.http.get("/v1/prefixes").json()["data"]] == [A]
    assert api.redis.keys(HOLDINGS_KEY + "*")


def test_without_redis_the_answer_says_so(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("injected")

    monkeypatch.setattr(api.services.prefixes, "_redis", type("Away", (), {"scan_iter": refuse})())
    answer = api.http.get("/v1/prefixes")
    assert (answer.status_code, answer.json()["code"]) == (503, "redis_away")


def test_the_default_tenant_owns_what_says_nothing(api: Api) -> None:
    assert api.services.prefixes.owner("default") == prefix_owner("") == ""
    row, _ = api.services.keys.create("anna", ["read"], "")
    with api.services.database.read() as session:
        salt = prefix_salt(session.get_one(Tenant, row.tenant_id))
    assert api.services.prefixes.owner(row.tenant_id) == prefix_owner(salt) != ""
