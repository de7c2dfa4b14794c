"""Between lost attempts a job pauses, longer each time, and at its end it says what ended each."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import pytest
from api_rig import Api, FakeWorker, eventually, running

from api.models import Job
from api.moves import PAUSES_S, is_due
from api.reconciler import Reconciler
from api.settings import Settings
from jobs import EventType, run_id

DATABASES = ("sqlite", "postgresql")


@pytest.fixture
def slow(settings: Settings) -> Iterator[Api]:
    """An API whose own reconciler passes once, at the start, and then never."""
    with running(settings.model_copy(update={"reconcile_s": 3600.0})) as api:
        yield api


@pytest.fixture
def reconciler(slow: Api) -> Reconciler:
    return Reconciler(slow.services.jobs, slow.services.queue, lost_after_s=10, gone_after_s=5)


def lose(api: Api, worker: FakeWorker, job_id: str, attempt: int, detail: str) -> None:
    """Let an attempt end as lost; returns when the job has moved."""
    worker.say(job_id, attempt, EventType.STARTED)
    api.wait_state(job_id, "running")
    worker.say(job_id, attempt, EventType.LOST, {"code": "engine_crashed", "detail": detail})
    api.wait_state(job_id, "queued", "failed")


def pausing(api: Api, worker: FakeWorker) -> str:
    """A job in its pause after two lost attempts."""
    job_id = str(api.submit()["id"])
    for attempt in (1, 2):
        eventually(api.queued)
        worker.take()
        lose(api, worker, job_id, attempt, f"it died {attempt}")
    return job_id


def test_the_first_loss_has_no_pause_and_the_second_one_has(slow: Api, reconciler: Reconciler) -> None:
    worker = FakeWorker(slow.redis)
    job_id = str(slow.submit()["id"])
    worker.take()
    lose(slow, worker, job_id, 1, "it died")
    assert slow.job(job_id)["retry_at"] is None
    eventually(slow.queued)
    assert worker.take().attempt == 2
    lose(slow, worker, job_id, 2, "it died again")
    reconciler.compare()
    job = slow.job(job_id)
    assert (job["state"], job["attempt"], slow.queued()) == ("queued", 3, [])
    moved = slow.services.jobs.events(job_id, after=0, limit=100)[-1]
    assert moved.type == EventType.QUEUED
    assert moved.data == {
        "attempt": 3,
        "reason": "engine_crashed",
        "detail": "it died again",
        "retry_after_s": PAUSES_S[1],
    }
    assert datetime.fromisoformat(job["retry_at"]) > datetime.fromisoformat(job["started_at"])


def test_the_reconciler_hands_it_out_when_its_time_has_come(slow: Api, reconciler: Reconciler) -> None:
    job_id = pausing(slow, FakeWorker(slow.redis))
    slow.end_pause(job_id)
    reconciler.compare()
    assert slow.queued() == [run_id(job_id, 3)]


def test_a_flushed_redis_ends_no_pause(slow: Api, reconciler: Reconciler) -> None:
    job_id = pausing(slow, FakeWorker(slow.redis))
    slow.redis.flushall()
    reconciler.compare()
    assert slow.queued() == []
    assert slow.job(job_id)["attempt"] == 3


def test_a_release_has_no_pause(slow: Api, reconciler: Reconciler) -> None:
    worker = FakeWorker(slow.redis)
    job_id = pausing(slow, worker)
    slow.end_pause(job_id)
    reconciler.compare()
    worker.take()
    worker.say(job_id, 3, EventType.STARTED)
    slow.wait_state(job_id, "running")
    worker.say(job_id, 3, EventType.RELEASED)
    job = slow.wait_state(job_id, "queued")
    assert (job["attempt"], job["retry_at"], job["num_failures"]) == (4, None, 2)


def test_a_pausing_job_is_cancelled_at_once_and_its_retry_waits_for_nothing(slow: Api) -> None:
    job_id = pausing(slow, FakeWorker(slow.redis))
    assert slow.http.post(f"/v1/jobs/{job_id}/cancel").json()["state"] == "cancelled"
    job = slow.http.post(f"/v1/jobs/{job_id}/retry").json()
    assert (job["state"], job["attempt"], job["retry_at"]) == ("queued", 4, None)
    assert slow.queued() == [run_id(job_id, 4)]


def test_the_failed_job_says_what_ended_each_attempt(slow: Api) -> None:
    worker = FakeWorker(slow.redis)
    job_id = pausing(slow, worker)
    lose(slow, worker, job_id, 3, "it died 3")
    error = slow.job(job_id)["error"]
    assert error["code"] == "engine_crashed"
    assert error["params"] == {
        "num_failures": 3,
        "attempts": [
            {"attempt": number, "code": "engine_crashed", "detail": f"it died {number}"}
            for number in (1, 2, 3)
        ],
    }
    for number in (1, 2, 3):
        assert f"attempt {number} because it died {number}" in error["detail"]


@pytest.mark.parametrize(("code", "shorter"), [("engine_crashed", True), ("api_unreachable", False)])
def test_the_failed_job_is_told_what_to_do_about_its_cause(slow: Api, code: str, shorter: bool) -> None:
    worker = FakeWorker(slow.redis)
    job_id = str(slow.submit()["id"])
    for attempt in (1, 2, 3):
        slow.end_pause(job_id)
        worker.say(job_id, attempt, EventType.STARTED)
        slow.wait_state(job_id, "running")
        worker.say(job_id, attempt, EventType.LOST, {"code": code, "detail": "it was so"})
        slow.wait_state(job_id, "queued" if attempt < 3 else "failed")
    error = slow.job(job_id)["error"]
    assert (error["code"], "shorter documents" in error["detail"]) == (code, shorter)


def test_what_was_lost_before_a_retry_is_not_listed(slow: Api) -> None:
    worker = FakeWorker(slow.redis)
    job_id = pausing(slow, worker)
    slow.http.post(f"/v1/jobs/{job_id}/cancel")
    slow.http.post(f"/v1/jobs/{job_id}/retry")
    for attempt in (4, 5, 6):
        lose(slow, worker, job_id, attempt, "it died")
    error = slow.job(job_id)["error"]
    assert [each["attempt"] for each in error["params"]["attempts"]] == [4, 5, 6]


def test_a_clock_that_was_set_back_prolongs_no_pause() -> None:
    job = Job(not_before=1000.0)
    assert not is_due(job, 999.0)
    assert is_due(job, 1000.0)
    assert is_due(job, 1000.0 - PAUSES_S[-1] - 1)
