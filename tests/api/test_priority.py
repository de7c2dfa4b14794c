"""Priorities: who goes first, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_rig import Api, FakeWorker, eventually, running
from sqlalchemy import update

from api.models import Job
from api.moves import PASSED_FOR_S
from api.settings import Settings
from jobs import EventType, run_id


@pytest.fixture
def slow(settings: Settings) -> Iterator[Api]:
    """An API whose own reconciler passes once, at the start, and then never."""
    with running(settings.model_copy(update={"reconcile_s": 3600.0})) as api:
        yield api


def submit(api: Api, *priorities: str) -> list[str]:
    document = api.upload()
    return [str(api.submit(document, priority=priority)["id"]) for priority in priorities]


def age(api: Api, job_id: str, seconds: float) -> None:
    """Let a job that waits have been accepted that much earlier."""
    with api.services.database.write() as session:
        session.execute(update(Job).where(Job.id == job_id).values(rank=Job.rank - seconds))
    entry = api.queue().fetch_job(run_id(job_id, 1))
    assert entry is not None
    entry.meta["rank"] -= seconds
    entry.save_meta()


def waiting(api: Api) -> list[str]:
    return [rq_id.rpartition("-")[0] for rq_id in api.queued()]


def test_a_higher_priority_goes_first_and_equal_ones_in_turn(slow: Api) -> None:
    low, first, second, high, other_high = submit(slow, "low", "normal", "normal", "high", "high")
    assert waiting(slow) == [high, other_high, first, second, low]


def test_normal_is_the_default(slow: Api) -> None:
    job = slow.submit()
    assert slow.job(job["id"])["spec"]["priority"] == "normal"


@pytest.mark.parametrize(("lower", "higher"), [("low", "high"), ("low", "normal"), ("normal", "high")])
def test_a_job_that_waited_long_enough_is_passed_by_nobody(slow: Api, lower: str, higher: str) -> None:
    (old,) = submit(slow, lower)
    age(slow, old, PASSED_FOR_S[lower] - PASSED_FOR_S[higher] + 1)
    (late,) = submit(slow, higher)
    assert waiting(slow) == [old, late]


def test_a_job_that_is_given_back_goes_before_what_came_later(slow: Api) -> None:
    first, second = submit(slow, "normal", "normal")
    worker = FakeWorker(slow.redis)
    assert worker.take().job_id == first
    worker.say(first, 1, EventType.STARTED)
    worker.say(first, 1, EventType.RELEASED)
    slow.wait_state(first, "queued")
    eventually(lambda: slow.queued() == [run_id(first, 2), run_id(second, 1)])


def test_a_retry_waits_its_turn_anew(slow: Api) -> None:
    first, second = submit(slow, "normal", "normal")
    slow.http.post(f"/v1/jobs/{first}/cancel")
    assert slow.http.post(f"/v1/jobs/{first}/retry").status_code == 202
    assert slow.queued() == [run_id(second, 1), run_id(first, 2)]


def test_what_a_worker_has_taken_meanwhile_is_no_place_to_stand_before(slow: Api) -> None:
    first, second, third = submit(slow, "normal", "normal", "low")
    worker = FakeWorker(slow.redis)
    assert worker.take().job_id == first  # the database does not know yet
    (high,) = submit(slow, "high")
    assert waiting(slow) == [high, second, third]
    for _ in range(3):
        worker.take()
    (last,) = submit(slow, "high")
    assert waiting(slow) == [last]


def test_an_unknown_priority_is_refused(slow: Api) -> None:
    body = {"type": "summarize", "documents": [slow.upload()], "priority": "urgent"}
    answer = slow.http.post("/v1/jobs", json=body)
    assert (answer.status_code, answer.json()["param"]) == (422, "priority")
