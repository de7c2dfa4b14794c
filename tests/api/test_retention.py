"""Ended jobs and documents of no job are deleted when they have been kept for long enough, and only those."""

from __future__ import annotations

import time
from typing import Any

import pytest
from api_rig import Api, FakeWorker, eventually, result, running
from sqlalchemy import func, select, update
from test_jobs import run_to

from api.audit import DAY_S
from api.models import Base, Document, Job, JobEvent, JobResult, WebhookDelivery, new_id
from api.retention import BATCH, Retention
from api.settings import Settings
from jobs import EventType

DATABASES = ("sqlite", "postgresql")
LATER = time.time() + 31 * DAY_S
"""When what is made here has been kept for 30 days."""


@pytest.fixture
def retention(api: Api) -> Retention:
    return Retention(api.services.database, 30, lambda job_id: None)


def delete_all(retention: Retention, now: float) -> int:
    """Delete until nothing is left to delete; in how many steps."""
    num_steps = 0
    while retention.delete_some(now):
        num_steps += 1
    return num_steps


def num_rows(api: Api, table: type[Base]) -> int:
    with api.services.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def succeeded(api: Api, worker: FakeWorker, **spec: Any) -> str:
    job_id = str(api.submit(**spec)["id"])
    worker.say(job_id, 1, EventType.STARTED)
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    api.wait_state(job_id, "succeeded")
    return job_id


@pytest.mark.parametrize("state", ["succeeded", "failed", "cancelled"])
def test_an_ended_job_goes_with_all_that_is_its_own(
    api: Api, worker: FakeWorker, retention: Retention, state: str
) -> None:
    job_id = run_to(api, worker, state)
    document = api.job(job_id)["spec"]["documents"][0]
    assert delete_all(retention, time.time() + 29 * DAY_S) == 0
    assert delete_all(retention, LATER) == 2
    assert [num_rows(api, table) for table in (Job, JobEvent, JobResult, Document)] == [0, 0, 0, 0]
    assert api.http.get(f"/v1/documents/{document}").status_code == 404


@pytest.mark.parametrize("state", ["queued", "running", "cancelling"])
def test_a_job_that_has_not_ended_stays_with_its_documents(
    api: Api, worker: FakeWorker, retention: Retention, state: str
) -> None:
    job_id = run_to(api, worker, state)
    assert delete_all(retention, LATER) == 0
    assert api.job(job_id)["state"] == state
    assert num_rows(api, Document) == 1


def test_a_document_stays_as_long_as_a_job_does(api: Api, worker: FakeWorker, retention: Retention) -> None:
    document = api.upload()
    old, recent = succeeded(api, worker, documents=[document]), succeeded(api, worker, documents=[document])
    with api.services.database.write() as session:
        session.execute(update(Job).where(Job.id == old).values(finished_at=1.0))
        session.execute(update(Document).values(uploaded_at=1.0))
    assert delete_all(retention, time.time()) == 1
    assert api.http.get(f"/v1/jobs/{old}").status_code == 410
    assert api.job(recent)["state"] == "succeeded"
    assert api.http.get(f"/v1/documents/{document}").status_code == 200


@pytest.mark.parametrize("as_json", [False, True])
def test_a_document_that_is_uploaded_again_begins_anew(api: Api, retention: Retention, as_json: bool) -> None:
    document = api.upload("The same text.")
    with api.services.database.write() as session:
        session.execute(update(Document).values(uploaded_at=1.0))
    if as_json:
        answer = api.http.post("/v1/documents", json={"name": "a.txt", "text": "The same text."})
        assert (answer.status_code, answer.json()["id"]) == (200, document)
    else:
        assert api.upload("The same text.") == document
    assert delete_all(retention, time.time()) == 0
    assert delete_all(retention, LATER) == 1


def test_a_job_whose_end_is_still_to_be_told_stays(
    api: Api, worker: FakeWorker, retention: Retention
) -> None:
    job_id = succeeded(api, worker)
    with api.services.database.write() as session:
        owed = WebhookDelivery(
            id=new_id("whd"),
            job_id=job_id,
            url="http://a/",
            body="{}",
            attempts=[],
            created_at=1.0,
            next_at=9e9,
        )
        session.add(owed)
    assert delete_all(retention, LATER) == 0
    with api.services.database.write() as session:
        session.execute(update(WebhookDelivery).values(next_at=None))
    assert delete_all(retention, LATER) == 2
    assert num_rows(api, WebhookDelivery) == 0


def test_it_is_gone_and_not_unknown_and_the_audit_says_why(
    api: Api, worker: FakeWorker, retention: Retention
) -> None:
    aged, deleted = succeeded(api, worker), run_to(api, worker, "cancelled")
    api.http.delete(f"/v1/jobs/{deleted}")
    delete_all(retention, LATER)
    for path in (f"/v1/jobs/{aged}", f"/v1/jobs/{aged}/result", f"/v1/jobs/{aged}?wait=5"):
        answer = api.http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (410, "job_gone")
    assert api.http.get(f"/v1/jobs/{deleted}").status_code == 404
    assert api.http.get("/v1/jobs/job_none").status_code == 404
    _row, key = api.services.keys.create("another", ["read"], "")
    shown = {"Authorization": f"Bearer {key}"}
    assert api.http.get(f"/v1/jobs/{aged}", headers=shown).status_code == 404
    entries = api.http.get("/v1/audit").json()["data"]
    found = {(e["action"], e["what"], e["item"]) for e in entries if e["key"] == "retention"}
    assert ("deleted", "job", aged) in found
    assert {what for _, what, _ in found} == {"job", "document"}


def test_it_deletes_a_few_at_a_time(api: Api, retention: Retention) -> None:
    for number in range(BATCH + 1):
        api.upload(f"Text {number}.")
    assert retention.delete_some(LATER)
    assert num_rows(api, Document) == 1
    assert delete_all(retention, LATER) == 1


def test_the_running_service_does_it_where_it_is_told_to(settings: Settings) -> None:
    with running(settings) as api:
        document = api.upload()
        with api.services.database.write() as session:
            session.execute(update(Document).values(uploaded_at=1.0))
    with running(settings) as api:
        assert api.http.get(f"/v1/documents/{document}").status_code == 200
    with running(settings.model_copy(update={"keep_days": 1.0})) as api:
        eventually(lambda: api.http.get(f"/v1/documents/{document}").status_code == 404)
