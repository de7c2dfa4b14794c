"""expires_after: a job that nobody needs any more ends, in the queue or at work."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis
from api_rig import Api, FakeWorker, eventually, result, running
from test_events import stream

from api.queue import JobQueue, connect
from api.reconciler import Reconciler
from api.settings import Settings
from jobs import EventType, run_id

DATABASES = ("sqlite", "postgresql")

LIMIT_S = 100


@pytest.fixture
def slow(settings: Settings) -> Iterator[Api]:
    """An API whose own reconciler passes once, at the start, and then never."""
    with running(settings.model_copy(update={"reconcile_s": 3600.0})) as api:
        yield api


def passing(api: Api, seconds: float, queue: JobQueue | None = None) -> Reconciler:
    """A reconciler of a time that many seconds from now."""
    return Reconciler(
        api.services.jobs,
        queue or api.services.queue,
        lost_after_s=10,
        gone_after_s=0,
        now=lambda: time.time() + seconds,
    )


def start(api: Api, worker: FakeWorker) -> str:
    job_id = str(api.submit(expires_after=LIMIT_S)["id"])
    worker.take()
    worker.be_there(job_id, 1)
    worker.say(job_id, 1, EventType.STARTED)
    api.wait_state(job_id, "running")
    return job_id


def test_a_queued_job_expires_after_its_time_and_not_before(slow: Api) -> None:
    kept, job_id = slow.submit()["id"], slow.submit(expires_after=LIMIT_S)["id"]
    passing(slow, LIMIT_S - 5).compare()
    assert slow.job(job_id)["state"] == "queued"
    passing(slow, LIMIT_S).compare()
    job = slow.job(job_id)
    assert (job["state"], job["error"]["code"]) == ("expired", "expired")
    assert job["error"]["params"] == {"expires_after": LIMIT_S}
    assert slow.queued() == [run_id(kept, 1)]
    assert [kind for _, kind, _ in stream(slow, job_id)] == ["job.queued", "job.expired"]
    refused = slow.http.get(f"/v1/jobs/{job_id}/result")
    assert (refused.status_code, refused.json()["code"]) == (409, "job_expired")
    assert f"{LIMIT_S} s" in refused.json()["detail"]


def test_the_clock_starts_at_acceptance(slow: Api) -> None:
    job = slow.submit(expires_after=60)
    assert job["expires_at"][:17] >= job["created_at"][:17]
    row = slow.services.jobs.get(job["id"])
    assert row is not None
    assert row.expires_at == row.created_at + 60
    assert slow.submit()["expires_at"] is None


def test_a_worker_that_took_an_expired_job_is_stopped(slow: Api) -> None:
    job_id = slow.submit(expires_after=LIMIT_S)["id"]
    FakeWorker(slow.redis).take()
    passing(slow, LIMIT_S).compare()
    assert slow.job(job_id)["state"] == "expired"
    control = slow.control(job_id)
    assert control is not None
    assert control.min_attempt == 2


def test_a_running_job_is_told_to_stop_and_then_expires(slow: Api) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    for _ in range(2):  # the second pass must not take it back
        passing(slow, LIMIT_S).compare()
        control = slow.control(job_id)
        assert control is not None
        assert control.cancel
    assert slow.job(job_id)["state"] == "running"
    worker.say(job_id, 1, EventType.CANCELLED)
    assert slow.wait_state(job_id, "expired", "cancelled")["error"]["code"] == "expired"
    assert [kind for _, kind, _ in stream(slow, job_id)] == ["job.queued", "job.started", "job.expired"]


def test_a_job_that_ends_while_it_is_stopped_keeps_its_end(slow: Api) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    passing(slow, LIMIT_S).compare()
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    assert slow.wait_state(job_id, "succeeded", "expired")["state"] == "succeeded"


@pytest.mark.parametrize("kind", [EventType.RELEASED, EventType.LOST])
def test_an_expired_attempt_that_is_given_back_is_not_tried_again(slow: Api, kind: EventType) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    passing(slow, LIMIT_S).compare()
    worker.say(job_id, 1, kind, {"code": "engine_crashed", "detail": "it died"})
    assert slow.wait_state(job_id, "expired", "queued")["state"] == "expired"
    assert slow.queued() == []


def test_an_expired_job_whose_worker_is_gone_ends(slow: Api) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    worker.go()
    reconciler = passing(slow, LIMIT_S)
    reconciler.compare()
    reconciler.compare()
    assert slow.job(job_id)["state"] == "expired"


def test_a_cancel_has_the_last_word(slow: Api) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    passing(slow, LIMIT_S).compare()
    assert slow.http.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelling"
    worker.say(job_id, 1, EventType.CANCELLED)
    assert slow.wait_state(job_id, "cancelled", "expired")["state"] == "cancelled"


def test_a_queued_job_expires_while_redis_is_away(slow: Api) -> None:
    job_id = slow.submit(expires_after=LIMIT_S)["id"]
    away = JobQueue(connect("unix:///tmp/longleaf-nothing-here.sock"), slow.services.jobs)
    with pytest.raises(redis.RedisError):
        passing(slow, LIMIT_S, away).compare()
    assert slow.job(job_id)["state"] == "expired"


def test_a_retry_starts_the_clock_anew(slow: Api) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    passing(slow, LIMIT_S).compare()
    worker.say(job_id, 1, EventType.CANCELLED)
    expired = slow.wait_state(job_id, "expired")
    job = slow.http.post(f"/v1/jobs/{job_id}/retry").json()
    assert (job["state"], job["attempt"], job["error"]) == ("queued", 2, None)
    assert job["expires_at"] > expired["expires_at"]
    passing(slow, LIMIT_S - 5).compare()
    assert slow.queued() == [run_id(job_id, 2)]
    control = slow.control(job_id)
    assert control is not None
    assert (control.cancel, control.min_attempt) == (False, 2)


def test_the_running_api_expires_jobs(api: Api) -> None:
    job_id = api.submit(expires_after=1)["id"]
    eventually(lambda: api.job(job_id)["state"] == "expired")
    eventually(lambda: api.queued() == [])


@pytest.mark.parametrize("value", [0, -1, 2_592_001, 1.5, "soon"])
def test_other_times_are_refused(api: Api, value: object) -> None:
    spec = {"type": "summarize", "documents": [api.upload()], "expires_after": value}
    answer = api.http.post("/v1/jobs", json=spec)
    assert (answer.status_code, answer.json()["param"]) == (422, "expires_after")
