"""The database into the queue: whatever is killed, flushed or lost, the job comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from api_rig import Api, FakeWorker, eventually, result, running

from api.models import Job
from api.queue import JobQueue, connect
from api.reconciler import Reconciler
from api.settings import Settings
from jobs import EVENT_STREAM, EventType, control_key, run_id, worker_key

DATABASES = ("sqlite", "postgresql")


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def slow(settings: Settings) -> Iterator[Api]:
    """An API whose own reconciler passes once, at the start, and then never."""
    with running(settings.model_copy(update={"reconcile_s": 3600.0})) as api:
        yield api


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reconciler(slow: Api, clock: Clock) -> Reconciler:
    return Reconciler(slow.services.jobs, slow.services.queue, lost_after_s=10, gone_after_s=5, clock=clock)


def start(api: Api, worker: FakeWorker) -> str:
    job_id = str(api.submit()["id"])
    worker.take()
    worker.be_there(job_id, 1)
    worker.say(job_id, 1, EventType.STARTED)
    api.wait_state(job_id, "running")
    return job_id


def after(reconciler: Reconciler, clock: Clock, seconds: float) -> None:
    """A pass now and another one when `seconds` have gone by."""
    reconciler.compare()
    clock.now += seconds
    reconciler.compare()


def attempt(api: Api, job_id: str) -> tuple[str, int, int]:
    job = api.job(job_id)
    return job["state"], job["attempt"], job["num_failures"]


def test_no_presence_outlasts_its_lease_where_the_clock_of_redis_was_set_back(
    slow: Api, reconciler: Reconciler
) -> None:
    worker = FakeWorker(slow.redis)
    worker.be_there()
    slow.redis.expire(worker_key(worker.name), 3600)
    reconciler.compare()
    assert 0 < slow.redis.ttl(worker_key(worker.name)) <= 15
    slow.redis.expire(worker_key(worker.name), 5)
    reconciler.compare()
    assert slow.redis.ttl(worker_key(worker.name)) <= 5


def test_a_job_whose_worker_is_gone_is_tried_again(slow: Api, reconciler: Reconciler, clock: Clock) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    worker.go()
    after(reconciler, clock, 4.9)
    assert attempt(slow, job_id) == ("running", 1, 0)
    clock.now += 0.2
    reconciler.compare()
    assert attempt(slow, job_id) == ("queued", 2, 1)
    assert slow.queued() == [run_id(job_id, 2)]
    control = slow.control(job_id)
    assert control is not None
    assert control.min_attempt == 2


def test_a_worker_that_says_it_does_something_else_has_lost_the_job_after_its_lease(
    slow: Api, reconciler: Reconciler, clock: Clock
) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    worker.be_there()
    after(reconciler, clock, 14.9)
    assert attempt(slow, job_id) == ("running", 1, 0)
    clock.now += 0.2
    reconciler.compare()
    assert attempt(slow, job_id) == ("queued", 2, 1)


def test_a_worker_that_holds_its_job_is_left_alone_for_ever(
    slow: Api, reconciler: Reconciler, clock: Clock
) -> None:
    job_id = start(slow, FakeWorker(slow.redis))
    for _ in range(10):
        after(reconciler, clock, 3600)
    assert attempt(slow, job_id) == ("running", 1, 0)


def test_a_short_silence_is_forgotten(slow: Api, reconciler: Reconciler, clock: Clock) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    for _ in range(5):
        worker.go()
        after(reconciler, clock, 4)
        worker.be_there(job_id, 1)
        reconciler.compare()
    assert attempt(slow, job_id) == ("running", 1, 0)


def test_three_lost_workers_fail_the_job(slow: Api, reconciler: Reconciler, clock: Clock) -> None:
    worker = FakeWorker(slow.redis)
    job_id = str(slow.submit()["id"])
    for number in (1, 2, 3):
        worker.take()
        worker.say(job_id, number, EventType.STARTED)
        slow.wait_state(job_id, "running")
        after(reconciler, clock, 6)
        slow.end_pause(job_id)
        reconciler.compare()
    assert attempt(slow, job_id) == ("failed", 3, 3)
    assert slow.job(job_id)["error"]["code"] == "worker_lost"


def test_a_cancelled_job_whose_worker_is_gone_ends(slow: Api, reconciler: Reconciler, clock: Clock) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    slow.http.post(f"/v1/jobs/{job_id}/cancel")
    worker.go()
    after(reconciler, clock, 6)
    assert slow.job(job_id)["state"] == "cancelled"
    assert slow.queued() == []


def test_a_job_that_was_popped_and_never_started_comes_back(
    slow: Api, reconciler: Reconciler, clock: Clock
) -> None:
    job_id = str(slow.submit()["id"])
    FakeWorker(slow.redis).take()
    after(reconciler, clock, 9.9)
    assert attempt(slow, job_id) == ("queued", 1, 0)
    clock.now += 0.2
    reconciler.compare()
    assert attempt(slow, job_id) == ("queued", 2, 0)
    assert slow.queued() == [run_id(job_id, 2)]


def test_a_popped_job_that_its_worker_names_is_left_alone(
    slow: Api, reconciler: Reconciler, clock: Clock
) -> None:
    worker = FakeWorker(slow.redis)
    job_id = str(slow.submit()["id"])
    worker.take()
    worker.be_there(job_id, 1)
    after(reconciler, clock, 100)
    assert attempt(slow, job_id) == ("queued", 1, 0)


def test_a_flushed_redis_gets_every_job_back(slow: Api, reconciler: Reconciler, clock: Clock) -> None:
    worker = FakeWorker(slow.redis)
    ran = start(slow, worker)
    waiting = {str(slow.submit()["id"]) for _ in range(3)}
    slow.redis.flushall()
    after(reconciler, clock, 11)
    taken = {worker.take().job_id for _ in range(4)}
    assert taken == waiting | {ran}


def test_a_healthy_worker_keeps_its_job_through_a_flush(
    slow: Api, reconciler: Reconciler, clock: Clock
) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    slow.redis.flushall()
    reconciler.compare()
    clock.now += 3
    worker.be_there(job_id, 1)
    after(reconciler, clock, 60)
    assert attempt(slow, job_id) == ("running", 1, 0)


def test_an_end_still_on_the_stream_is_waited_for(slow: Api, settings: Settings, clock: Clock) -> None:
    job_id = start(slow, FakeWorker(slow.redis))
    # The same jobs seen through a Redis without the worker, where nobody records the stream.
    url = settings.redis_url + "?db=1"
    queue = JobQueue(connect(url), slow.services.jobs)
    reconciler = Reconciler(slow.services.jobs, queue, lost_after_s=10, gone_after_s=5, clock=clock)
    with redis.Redis.from_url(url) as other:
        other.flushdb()
        other.xadd(EVENT_STREAM, {"event": "older than the silence"}, id="1-0")
        after(reconciler, clock, 6)
        assert attempt(slow, job_id) == ("running", 1, 0)
        other.xdel(EVENT_STREAM, "1-0")
    reconciler.compare()
    assert attempt(slow, job_id) == ("queued", 2, 1)


def test_work_on_an_ended_job_is_stopped(slow: Api, reconciler: Reconciler) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    slow.wait_state(job_id, "succeeded")
    reconciler.compare()
    control = slow.control(job_id)
    assert control is not None
    # The next attempt, if there is to be one, is not told to stop.
    assert (control.cancel, control.min_attempt) == (False, 2)


def test_work_on_a_deleted_job_is_stopped(slow: Api, reconciler: Reconciler) -> None:
    FakeWorker(slow.redis).be_there("job_deleted", 1)
    reconciler.compare()
    control = slow.control("job_deleted")
    assert control is not None
    assert control.cancel


def test_work_on_an_older_attempt_is_stopped(slow: Api, reconciler: Reconciler, clock: Clock) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    worker.say(job_id, 1, EventType.RELEASED)
    slow.wait_state(job_id, "queued")
    slow.redis.delete(control_key(job_id))
    reconciler.compare()
    control = slow.control(job_id)
    assert control is not None
    assert (control.cancel, control.min_attempt) == (False, 2)


def test_entries_of_ended_jobs_and_older_attempts_leave_the_queue(slow: Api, reconciler: Reconciler) -> None:
    kept, ended = slow.submit()["id"], slow.submit()["id"]
    slow.http.post(f"/v1/jobs/{ended}/cancel")
    slow.queue().push_job_id(run_id(ended, 1))
    slow.queue().push_job_id(run_id("job_deleted", 7))
    reconciler.compare()
    assert slow.queued() == [run_id(kept, 1)]


def test_a_cancel_is_told_again_after_a_flush(slow: Api, reconciler: Reconciler) -> None:
    worker = FakeWorker(slow.redis)
    job_id = start(slow, worker)
    slow.http.post(f"/v1/jobs/{job_id}/cancel")
    slow.redis.flushall()
    worker.be_there(job_id, 1)
    reconciler.compare()
    control = slow.control(job_id)
    assert control is not None
    assert control.cancel


def test_a_job_is_never_on_the_queue_twice(slow: Api, reconciler: Reconciler) -> None:
    job_id = str(slow.submit()["id"])
    job = slow.services.jobs.get(job_id)
    assert job is not None
    job.handed_out = False  # as seen by someone who read it before it was handed out
    slow.services.queue.follow(job)
    assert slow.queued() == [run_id(job_id, 1)]


def test_the_running_api_hands_out_what_a_flush_took(settings: Settings) -> None:
    hurry = {"lost_after_s": 0.1, "gone_after_s": 0.1}
    with running(settings.model_copy(update=hurry)) as api:
        job_id = api.submit()["id"]
        api.redis.flushall()
        eventually(api.queued)
        assert api.queued() == [run_id(job_id, api.job(job_id)["attempt"])]


def test_one_job_that_cannot_be_handed_out_holds_up_no_other(slow: Api, reconciler: Reconciler) -> None:
    broken, fine = sorted(slow.submit()["id"] for _ in range(2))
    with slow.services.database.write() as session:
        for job_id in (broken, fine):
            row = session.get(Job, job_id)
            assert row is not None
            row.handed_out = False
            row.spec = {"type": "from another version"} if job_id == broken else row.spec
    slow.redis.flushall()
    reconciler.compare()
    assert slow.queued() == [run_id(fine, 1)]


def test_two_reconcilers_do_not_disagree(slow: Api, reconciler: Reconciler, clock: Clock) -> None:
    other = Reconciler(slow.services.jobs, slow.services.queue, lost_after_s=10, gone_after_s=5, clock=clock)
    job_id = str(slow.submit()["id"])
    FakeWorker(slow.redis).take()
    reconciler.compare()
    other.compare()
    clock.now += 11
    reconciler.compare()
    other.compare()
    assert attempt(slow, job_id) == ("queued", 2, 0)
    assert slow.queued() == [run_id(job_id, 2)]


def test_no_redis_means_no_change(slow: Api, clock: Clock) -> None:
    job_id = start(slow, FakeWorker(slow.redis))
    away = JobQueue(connect("unix:///tmp/longleaf-nothing-here.sock"), slow.services.jobs)
    blind = Reconciler(slow.services.jobs, away, lost_after_s=10, gone_after_s=5, clock=clock)
    for _ in range(2):
        with pytest.raises(redis.RedisError):
            blind.compare()
        clock.now += 100
    assert attempt(slow, job_id) == ("running", 1, 0)
