"""The event stream into the database: fenced, once, in any order, whatever is on the stream."""

from __future__ import annotations

import pytest
import redis
from api_rig import Api, FakeWorker, eventually, progress, result, running

from api.db import Database
from api.settings import Settings
from api.store import JobStore
from api.worker_events import BadEvent
from jobs import EVENT_GROUP, EVENT_STREAM, Event, EventType, Problem, run_id

DATABASES = ("sqlite", "postgresql")


def events(api: Api, job_id: str) -> list[tuple[int, str]]:
    return [(row.seq, row.type) for row in api.services.jobs.events(job_id, 0, 1000)]


def start(api: Api, worker: FakeWorker) -> str:
    job_id = str(api.submit()["id"])
    worker.take()
    worker.be_there(job_id, 1)
    worker.say(job_id, 1, EventType.STARTED)
    api.wait_state(job_id, "running")
    return job_id


def drained(api: Api) -> None:
    """Return once every entry is applied, acknowledged and deleted."""
    eventually(lambda: api.redis.xlen(EVENT_STREAM) == 0)
    assert api.redis.xpending(EVENT_STREAM, EVENT_GROUP)["pending"] == 0


def test_events_get_gapless_numbers_in_the_order_of_the_stream(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    worker.say(job_id, 1, EventType.PROGRESS, progress(1))
    worker.say(job_id, 1, EventType.CHECKPOINT, {"num_tokens": 128, "exact": True})
    worker.say(job_id, 1, EventType.DELTA, {"output_index": 0, "text": "Hi"})
    drained(api)
    assert events(api, job_id) == [
        (1, "job.queued"),
        (2, "job.started"),
        (3, "job.progress"),
        (4, "job.checkpoint"),
        (5, "output.delta"),
    ]


def test_only_the_last_progress_outlives_the_job(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    for num_done in (1, 2, 3):
        worker.say(job_id, 1, EventType.PROGRESS, progress(num_done))
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    drained(api)
    assert events(api, job_id) == [
        (1, "job.queued"),
        (2, "job.started"),
        (5, "job.progress"),
        (6, "job.succeeded"),
    ]


def test_an_older_attempt_is_not_heard(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    worker.say(job_id, 1, EventType.RELEASED)
    api.wait_state(job_id, "queued")
    worker.say(job_id, 1, EventType.PROGRESS, progress(9))
    worker.say(job_id, 1, EventType.SUCCEEDED, result("stale"))
    drained(api)
    job = api.job(job_id)
    assert (job["state"], job["attempt"], job["progress"]) == ("queued", 2, None)


def test_a_future_attempt_is_not_heard(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    worker.say(job_id, 2, EventType.SUCCEEDED, result())
    drained(api)
    assert api.job(job_id)["state"] == "running"


def test_a_finished_job_hears_nothing_more(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    worker.say(job_id, 1, EventType.SUCCEEDED, result("first"))
    worker.say(job_id, 1, EventType.SUCCEEDED, result("second"))
    worker.say(job_id, 1, EventType.FAILED, {"code": "late", "detail": "late"})
    worker.say(job_id, 1, EventType.LOST, {"code": "late", "detail": "late"})
    drained(api)
    assert api.job(job_id)["state"] == "succeeded"
    assert api.http.get(f"/v1/jobs/{job_id}/result").json()["outputs"][0]["text"] == "first"
    assert [kind for _, kind in events(api, job_id)].count("job.succeeded") == 1


def test_any_event_shows_that_an_attempt_started(api: Api, worker: FakeWorker) -> None:
    job_id = str(api.submit()["id"])
    worker.be_there(job_id, 1)
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    api.wait_state(job_id, "succeeded")
    assert [kind for _, kind in events(api, job_id)] == ["job.queued", "job.started", "job.succeeded"]


def test_a_released_attempt_goes_to_the_front_and_counts_as_no_failure(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    waiting = str(api.submit()["id"])
    worker.say(job_id, 1, EventType.RELEASED)
    job = api.wait_state(job_id, "queued")
    assert (job["attempt"], job["num_failures"]) == (2, 0)
    # It is put at the end and then moved, in two steps.
    eventually(lambda: api.queued() == [run_id(job_id, 2), run_id(waiting, 1)])
    assert worker.take().job_id == job_id
    assert worker.take().job_id == waiting
    control = api.control(job_id)
    assert control is not None
    assert (control.cancel, control.min_attempt) == (False, 2)


def test_the_third_lost_attempt_fails_the_job(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    why = {"code": "engine_killed", "detail": "the engine died with signal 9", "params": {"signal": 9}}
    for attempt in (1, 2):
        worker.say(job_id, attempt, EventType.LOST, why)
        job = api.wait_state(job_id, "queued")
        assert (job["attempt"], job["num_failures"]) == (attempt + 1, attempt)
        api.end_pause(job_id)
        eventually(api.queued)
        worker.take()
        worker.be_there(job_id, attempt + 1)
        worker.say(job_id, attempt + 1, EventType.STARTED)
        api.wait_state(job_id, "running")
    worker.say(job_id, 3, EventType.LOST, why)
    job = api.wait_state(job_id, "failed")
    assert (job["num_failures"], job["error"]["code"]) == (3, "engine_crashed")
    assert "signal 9" in job["error"]["detail"]
    assert api.queued() == []


@pytest.mark.parametrize("kind", [EventType.RELEASED, EventType.LOST, EventType.CANCELLED])
def test_a_job_that_is_being_cancelled_is_not_tried_again(
    api: Api, worker: FakeWorker, kind: EventType
) -> None:
    job_id = start(api, worker)
    api.http.post(f"/v1/jobs/{job_id}/cancel")
    worker.say(job_id, 1, kind, {"code": "x", "detail": "x"})
    assert api.wait_state(job_id, "cancelled")["attempt"] == 1
    assert api.queued() == []


GARBAGE: list[dict[str, str | bytes]] = [
    {"event": "not json"},
    {"event": "{}"},
    {"event": b"\xff\xfe"},
    {"other": "field"},
    {"event": '{"job_id":"job_x","attempt":0,"type":"job.started","worker":"w","at":0}'},
    {"event": '{"job_id":"job_x","attempt":1,"type":"job.exploded","worker":"w","at":0}'},
    {"event": '{"job_id":"job_nobody","attempt":1,"type":"job.started","worker":"w","at":0}'},
    {"event": '{"job_id":"job_x","attempt":99999999999999999999,"type":"job.started","worker":"w","at":0}'},
]


def test_garbage_is_acknowledged_and_stalls_nothing(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    for fields in GARBAGE:
        worker.say_raw(fields)
    for kind, data in (
        (EventType.PROGRESS, {"phase": "dreaming"}),
        (EventType.PROGRESS, {}),
        (EventType.QUEUED, {}),
        (EventType.CANCELLING, {}),
        (EventType.DELTA, {"text": "\x00 \u2028"}),
    ):
        worker.say(job_id, 1, kind, data)
    worker.say(job_id, 1, EventType.PROGRESS, progress(4))
    drained(api)
    assert api.job(job_id)["progress"]["num_done"] == 4


def test_a_bad_event_takes_nothing_of_its_batch_along(settings: Settings) -> None:
    with running(settings) as api:
        worker = FakeWorker(api.redis)
        first, second = start(api, worker), start(api, worker)
    # Read together by the recorder that comes: what waits on the stream is one batch.
    with redis.Redis.from_url(settings.redis_url) as client:
        worker = FakeWorker(client)
        worker.say(first, 1, EventType.PROGRESS, progress(1))
        worker.say(first, 1, EventType.PROGRESS, {"phase": "dreaming"})
        worker.say_raw({"event": "not json"})
        worker.say(first, 1, EventType.SUCCEEDED, result())
        worker.say(first, 1, EventType.PROGRESS, progress(2))
        worker.say(second, 1, EventType.RELEASED)
    with running(settings) as api:
        drained(api)
        assert [kind for _, kind in events(api, first)] == [
            "job.queued",
            "job.started",
            "job.progress",
            "job.succeeded",
        ]
        job = api.job(second)
        assert (job["state"], job["attempt"], len(api.queued())) == ("queued", 2, 1)


def test_a_batch_with_a_bad_event_is_applied_whole_or_not_at_all(settings: Settings) -> None:
    with running(settings) as api:
        job_id = start(api, FakeWorker(api.redis))
    database = Database(settings.database)
    store = JobStore(database, lambda _: None)

    def event(kind: EventType, data: dict[str, object]) -> Event:
        return Event(job_id=job_id, attempt=1, type=kind, worker="w1", at=0.0, data=data)

    with pytest.raises(BadEvent):
        store.apply(
            [
                (event(EventType.PROGRESS, progress(1)), "1-0"),
                (event(EventType.PROGRESS, {"phase": "dreaming"}), "2-0"),
            ]
        )
    job = store.get(job_id)
    assert job is not None
    assert (job.progress, [row.type for row in store.events(job_id, 0, 10)]) == (
        None,
        ["job.queued", "job.started"],
    )
    database.close()


def test_a_result_that_is_none_fails_the_job_instead_of_leaving_it(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    worker.say(job_id, 1, EventType.SUCCEEDED, {"outputs": "none"})
    assert api.wait_state(job_id, "failed")["error"]["code"] == "invalid_result"


def test_a_failure_without_a_reason_is_a_failure(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    worker.say(job_id, 1, EventType.FAILED, {})
    assert api.wait_state(job_id, "failed")["error"]["code"] == "unknown"


def test_numbers_that_json_does_not_know_do_not_reach_clients(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    event = Event(job_id=job_id, attempt=1, type=EventType.PROGRESS, worker="w1", at=0.0, data=progress(5))
    text = event.model_dump_json().replace('"tokens_per_s":2.0', '"tokens_per_s":NaN')
    worker.say_raw({"event": text.replace('"eta_s":1.0', '"eta_s":Infinity')})
    drained(api)
    answer = api.http.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == 200
    assert "NaN" not in answer.text


def test_events_from_before_the_api_started_are_recorded(settings: Settings) -> None:
    with running(settings) as api:
        worker = FakeWorker(api.redis)
        job_id = start(api, worker)
    with redis.Redis.from_url(settings.redis_url) as client:
        FakeWorker(client).say(job_id, 1, EventType.SUCCEEDED, result())
    with running(settings) as api:
        api.wait_state(job_id, "succeeded")


def test_a_crash_between_commit_and_acknowledgement_applies_once(settings: Settings) -> None:
    with running(settings) as api:
        worker = FakeWorker(api.redis)
        job_id = start(api, worker)
    # What a recorder does that dies after its commit: the entry is read, applied and stays pending.
    database = Database(settings.database)
    store = JobStore(database, lambda _: None)
    with redis.Redis.from_url(settings.redis_url) as client:
        FakeWorker(client).be_there(job_id, 1)
        for num_done in (1, 2):
            FakeWorker(client).say(job_id, 1, EventType.PROGRESS, progress(num_done))
        [(_, entries)] = client.xreadgroup(EVENT_GROUP, "dead", {EVENT_STREAM: ">"})
        store.apply(
            [(Event.model_validate_json(fields[b"event"]), name.decode()) for name, fields in entries]
        )
    database.close()
    with running(settings) as api:
        drained(api)
        assert [kind for _, kind in events(api, job_id)].count("job.progress") == 2
        assert api.job(job_id)["progress"]["num_done"] == 2


def test_the_stream_survives_a_flush(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    api.redis.flushall()
    worker.be_there(job_id, 1)
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    api.wait_state(job_id, "succeeded")


def test_a_lost_worker_and_a_late_event_agree_on_one_outcome(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    why = Problem(code="worker_lost", detail="gone")
    assert api.services.jobs.lose_attempt(job_id, 1, why) is not None
    assert api.services.jobs.lose_attempt(job_id, 1, why) is None
    worker.say(job_id, 1, EventType.LOST, {"code": "x", "detail": "x"})
    drained(api)
    job = api.job(job_id)
    assert (job["attempt"], job["num_failures"]) == (2, 1)
