"""/metrics: true numbers in a form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from api_rig import MODEL, Api, FakeWorker, eventually, running
from prometheus_client.parser import text_string_to_metric_families
from test_jobs import run_to

from api.db import Database
from api.metrics import ServiceCollector
from api.queue import JobQueue, connect
from api.settings import Settings
from jobs import EVENT_STREAM, EventType, queue_name, run_id


@pytest.fixture
def slow(settings: Settings) -> Iterator[Api]:
    """An API whose own reconciler passes once, at the start, and then never."""
    with running(settings.model_copy(update={"reconcile_s": 3600.0})) as api:
        yield api


def read(api: Api) -> dict[str, float]:
    """Every sample by its name, with its state where it has one."""
    answer = api.http.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        ":".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def collect(database: Database, queue: JobQueue, now: float) -> dict[str, float]:
    return {
        sample.name: sample.value
        for family in ServiceCollector(database, queue, now).collect()
        for sample in family.samples
    }


def test_a_fresh_service_shows_zeros(slow: Api) -> None:
    found = read(slow)
    assert found.pop("longleaf_redis_up") == 1
    assert set(found.values()) == {0}
    assert len(found) == 7 + 1 + 4 + 2


def test_jobs_are_counted_by_state(slow: Api) -> None:
    worker = FakeWorker(slow.redis)
    for state in ("succeeded", "failed", "running", "cancelled", "queued", "queued"):
        run_to(slow, worker, state)
    found = read(slow)
    expected = {"queued": 2, "running": 1, "cancelling": 0, "succeeded": 1, "failed": 1, "cancelled": 1}
    assert {state: found[f"longleaf_jobs:{state}"] for state in expected} == expected


def test_live_workers_are_counted_by_state(slow: Api) -> None:
    FakeWorker(slow.redis, "a").be_there()
    FakeWorker(slow.redis, "b").be_there("job_1", 1)
    FakeWorker(slow.redis, "c").be_there("job_2", 1)
    found = read(slow)
    assert (found["longleaf_workers:idle"], found["longleaf_workers:busy"]) == (1, 2)


def test_each_queue_has_its_length_and_the_age_of_what_is_next(slow: Api) -> None:
    first = str(slow.submit(document=slow.upload("a " + "x" * 300))["id"])
    slow.submit()
    worker = FakeWorker(slow.redis)
    worker.be_there()
    assert worker.next() == first
    waiting = [str(slow.submit(document=slow.upload("a " + "x" * 300))["id"]) for _ in range(2)]
    entry = slow.queue().fetch_job(run_id(waiting[0], 1))
    assert entry is not None
    entry.meta["since"] -= 100
    entry.save_meta()
    found, queue = read(slow), queue_name(MODEL)
    lengths = [found[f"longleaf_queue_length:{queue}:{whose}"] for whose in ("", "w1")]
    ages = [found[f"longleaf_queue_first_age_seconds:{queue}:{whose}"] for whose in ("", "w1")]
    assert lengths == [1, 2]
    assert 0 <= ages[0] < 100 <= ages[1]


def test_the_age_is_that_of_the_oldest_attempt_in_the_queue(slow: Api) -> None:
    services, worker = slow.services, FakeWorker(slow.redis)
    first = str(slow.submit()["id"])
    worker.say(first, 1, EventType.STARTED)
    slow.wait_state(first, "running")
    second = str(slow.submit()["id"])
    queued_at = services.jobs.events(second, 0, 1)[0].at
    age = "longleaf_oldest_queued_job_age_seconds"
    assert collect(services.database, services.queue, queued_at + 7)[age] == pytest.approx(7)
    worker.say(first, 1, EventType.RELEASED)
    slow.wait_state(first, "queued")
    # Given back since: it is the older job, but has waited for less.
    assert collect(services.database, services.queue, queued_at + 7)[age] == pytest.approx(7)


def test_the_backlog_is_what_the_recorder_has_not_taken(slow: Api) -> None:
    url = str(slow.services.settings.redis_url) + "?db=1"  # where nobody records
    queue = JobQueue(connect(url), slow.services.jobs)
    connect(url).xadd(EVENT_STREAM, {"event": "{}"}, id="1-0")
    found = collect(slow.services.database, queue, 0.0)
    assert found["longleaf_events_backlog"] == 1
    assert found["longleaf_oldest_event_age_seconds"] > 1e9
    FakeWorker(slow.redis).say("job_none", 1, EventType.STARTED)
    eventually(lambda: read(slow)["longleaf_events_backlog"] == 0)


def test_what_redis_knows_is_left_out_while_it_is_away(slow: Api) -> None:
    away = JobQueue(connect("unix:///tmp/longleaf-nothing-here.sock"), slow.services.jobs)
    found = collect(slow.services.database, away, 0.0)
    assert found["longleaf_redis_up"] == 0
    assert "longleaf_jobs" in found
    assert "longleaf_workers" not in found
    assert "longleaf_events_backlog" not in found
