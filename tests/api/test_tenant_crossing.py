"""What one tenant could learn or change of another's unasked: reuse, secrets, documents, names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import httpx
import pytest
from api_rig import Api, FakeWorker, eventually, held, result, running
from sqlalchemy import update
from test_queue_dispatch import text

from api.keys import SCOPES, WORKER
from api.models import Job
from api.settings import Settings
from jobs import EventType, queue_name
from jobs.dispatch import OWNERS_KEY
from jobs.prefixes import PrefixCommand, commands_key

MODEL = "tiny"


@pytest.fixture
def api(settings: Settings) -> Iterator[Api]:
    """One that asks for keys, and whose own reconciler passes once, at the start; its client is `ours`."""
    with running(settings.model_copy(update={"require_key": True, "reconcile_s": 3600.0})) as api:
        api.http.headers["Authorization"] = f"Bearer {key_of(api, 'ours')}"
        yield api


@pytest.fixture
def theirs(api: Api) -> Iterator[Api]:
    with httpx.Client(base_url=api.url, timeout=30) as client:
        client.headers["Authorization"] = f"Bearer {key_of(api, 'theirs')}"
        yield Api(client, api.services, api.server, api.redis)


def key_of(api: Api, tenant: str) -> str:
    return api.services.keys.create(tenant, [scope for scope in SCOPES if scope != "admin"], "")[1]


def owner_of(api: Api) -> str:
    caller = api.services.keys.caller(api.http.headers["Authorization"].removeprefix("Bearer "))
    assert caller is not None
    return api.services.prefixes.owner(caller.tenant)


@pytest.mark.parametrize("state", ["busy", "idle"])
def test_a_document_that_another_tenant_has_read_waits_as_one_that_nobody_has(
    api: Api, theirs: Api, state: str
) -> None:
    """Where it waits, and so how long, shows nobody that the text was here before."""
    reader, other = FakeWorker(api.redis, "w1"), FakeWorker(api.redis, "w2")
    for worker in (reader, other):
        worker.be_there(store=f"store of {worker.name}")
    known, unknown = text("known"), text("unknown")
    job = str(api.submit(api.upload(known))["id"])
    assert reader.next() == job
    reader.say(job, 1, EventType.STARTED, {"store": "store of w1"})
    api.wait_state(job, "running")
    reader.say(job, 1, EventType.SUCCEEDED, result())
    api.wait_state(job, "succeeded")
    if state == "idle":
        assert other.next() is None
    again = str(api.submit(api.upload(known))["id"])
    assert api.waiting_for("w1") == [again]
    same = theirs.upload(known)
    asked = [str(theirs.submit(document)["id"]) for document in (same, theirs.upload(unknown))]
    assert api.waiting_for("w1") == [again]
    expected = {"busy": [], "idle": asked[:1]}[state]
    assert api.waiting_for("w2") == expected
    quotes = [
        theirs.http.post("/v1/quote", json={"type": "summarize", "documents": [document]}).json()
        for document in (same, theirs.upload(text("unknown")))
    ]
    assert [quote["cached_tokens"] for quote in quotes] == [None, None]


def end(api: Api, job: str, how: str) -> None:
    worker = FakeWorker(api.redis)
    if how == "succeeded":
        worker.say(job, 1, EventType.SUCCEEDED, result())
    elif how == "failed":
        worker.say(job, 1, EventType.FAILED, {"code": "x", "detail": "y"})
    elif how == "cancelled":
        assert api.http.post(f"/v1/jobs/{job}/cancel").status_code == 202
    elif how == "expired":
        with api.services.database.write() as session:
            session.execute(update(Job).where(Job.id == job).values(expires_at=1.0))
        worker.say(job, 1, EventType.EXPIRED)
    api.wait_state(job, how)


@pytest.mark.parametrize("how", ["succeeded", "failed", "cancelled", "expired"])
@pytest.mark.parametrize("deleted", [False, True])
def test_a_worker_reads_nothing_of_a_job_that_has_ended(api: Api, how: str, deleted: bool) -> None:
    token = {"Authorization": f"Bearer {api.services.keys.create('default', [WORKER], '')[1]}"}
    document, idle = api.upload("Read once."), api.upload("Read by no job.")
    job = str(api.submit(document)["id"])
    for what in ("text", "pages"):
        assert httpx.get(f"{api.url}/v1/documents/{document}/{what}", headers=token).status_code == 200
    end(api, job, how)
    if deleted:
        assert api.http.delete(f"/v1/jobs/{job}").status_code == 204
    for what in ("text", "pages"):
        refusals = set()
        for name in (document, idle, "doc_" + "0" * 20):
            answer = httpx.get(f"{api.url}/v1/documents/{name}/{what}", headers=token)
            refusals.add((answer.status_code, re.sub(r"doc_\w+", "ID", answer.json()["detail"])))
        assert len(refusals) == 1
        assert refusals.pop()[0] == 404


def test_a_rotation_leaves_the_secrets_of_other_tenants(api: Api, theirs: Api) -> None:
    before = api.http.get("/v1/webhooks/secret").json()
    rotated = theirs.http.post("/v1/webhooks/secret/rotate").json()
    assert rotated["secret"] != before["secret"]
    assert api.http.get("/v1/webhooks/secret").json() == before


def test_the_audit_has_ids_and_no_words_of_anyone(api: Api) -> None:
    document = api.upload("A secret sentence.", "a-secret-name.txt")
    assert api.http.delete(f"/v1/documents/{document}").status_code == 204
    assert api.http.get("/v1/audit").status_code == 403
    admin = {"Authorization": f"Bearer {api.services.keys.create('theirs', ['admin'], '')[1]}"}
    rows = httpx.get(f"{api.url}/v1/audit", headers=admin).text
    assert document in rows
    assert "secret" not in rows.replace("webhook_secret", "")


COMMANDS: list[Callable[[httpx.Client], httpx.Response]] = [
    lambda http: http.delete("/v1/prefixes/" + "1" * 32),
    lambda http: http.post(f"/v1/prefixes/{'1' * 32}/pin"),
    lambda http: http.post(f"/v1/prefixes/{'1' * 32}/unpin"),
    lambda http: http.delete("/v1/prefixes/..%2f" + "1" * 32),
    lambda http: http.delete("/v1/prefixes/" + "1" * 31),
    lambda http: http.delete("/v1/prefixes/%00"),
    lambda http: http.delete("/v1/prefixes/*"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_reaches_a_worker_for_what_is_anothers(
    api: Api, theirs: Api, command: Callable[[httpx.Client], httpx.Response]
) -> None:
    FakeWorker(api.redis).hold(held("1" * 32, owner_of(api)), held("2" * 32, owner_of(theirs)))
    assert command(theirs.http).status_code == 404
    assert api.redis.llen(commands_key("w1")) == 0


def test_who_forgets_all_forgets_what_is_its_own(api: Api, theirs: Api) -> None:
    FakeWorker(api.redis).hold(held("1" * 32, owner_of(api)))
    assert theirs.http.delete("/v1/prefixes").json() == {"workers": ["w1"]}
    (raw,) = api.redis.lrange(commands_key("w1"), 0, -1)
    command = PrefixCommand.model_validate_json(raw)
    assert (command.op, command.owner) == ("forget", owner_of(theirs))
    assert command.owner != owner_of(api)


WORKERS = [
    "../../etc/passwd",
    "a\nlongleaf_up 0",
    'a"} 1\nlongleaf_up{x="',
    "a:b",
    "*",
    "\x00",
    "é\u2028",
    "x" * 9000,
]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_may_be_called_anything(api: Api, name: str) -> None:
    admin = {"Authorization": f"Bearer {api.services.keys.create('theirs', ['admin'], '')[1]}"}
    worker = FakeWorker(api.redis, name)
    worker.be_there()
    worker.hold(held("1" * 32, owner_of(api)))
    api.redis.sadd(OWNERS_KEY + queue_name(MODEL), name)
    (shown,) = httpx.get(f"{api.url}/v1/workers", headers=admin).json()
    assert shown["name"] == name
    assert api.http.post(f"/v1/prefixes/{'1' * 32}/pin").json()["workers"] == [name]
    assert api.redis.llen(commands_key(name)) == 1
    lines = httpx.get(f"{api.url}/metrics", headers=admin).text.splitlines()
    assert all(re.match(r"(# |longleaf_|python_|process_)", line) for line in lines)
    assert not [line for line in lines if line.startswith("longleaf_up")]
    job = str(api.submit()["id"])
    eventually(lambda: worker.next() == job)


@pytest.mark.parametrize("path", ["/v1/jobs", "/v1/quote", "/v1/prefixes"])
def test_a_document_of_another_tenant_is_one_that_is_not_there(api: Api, theirs: Api, path: str) -> None:
    refusals = set()
    for document in (api.upload("Only for us."), "doc_" + "0" * 20):
        body = {"documents": [document]} | ({} if path == "/v1/prefixes" else {"type": "summarize"})
        answer = theirs.http.post(path, json=body)
        refusals.add((answer.status_code, re.sub(r"doc_\w+", "ID", answer.json()["detail"])))
    assert len(refusals) == 1
    assert refusals.pop()[0] == 404
