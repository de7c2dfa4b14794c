"""Server-sent events: numbered, resumable, live, and gone when either side is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from api_rig import Api, FakeWorker, eventually, progress, result, running

from api.routes import events
from api.settings import Settings
from jobs import EventType

Sent = tuple[int, str, dict[str, Any]]


def parse(lines: Iterator[str]) -> Iterator[Sent]:
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            key, _, value = line.partition(": ")
            fields[key] = value
        elif "data" in fields:
            yield int(fields["id"]), fields["event"], json.loads(fields["data"])
            fields = {}


def stream(api: Api, job_id: str, after: int | None = None) -> list[Sent]:
    """All events up to the end of the stream."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    with api.http.stream("GET", f"/v1/jobs/{job_id}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        return list(parse(answer.iter_lines()))


def start(api: Api, worker: FakeWorker) -> str:
    job_id = str(api.submit()["id"])
    worker.take()
    worker.be_there(job_id, 1)
    worker.say(job_id, 1, EventType.STARTED)
    api.wait_state(job_id, "running")
    return job_id


def test_a_finished_job_tells_its_story_and_closes(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    worker.say(job_id, 1, EventType.DELTA, {"output_index": 0, "text": "Zeile\u2028 \n Ümlaut"})
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    api.wait_state(job_id, "succeeded")
    assert stream(api, job_id) == [
        (1, "job.queued", {"attempt": 1}),
        (2, "job.started", {"attempt": 1, "worker": "w1"}),
        (3, "output.delta", {"output_index": 0, "text": "Zeile\u2028 \n Ümlaut"}),
        (4, "job.succeeded", result()),
    ]


def test_a_stream_resumes_after_the_last_event_seen(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    api.wait_state(job_id, "succeeded")
    everything = stream(api, job_id)
    for seen in range(len(everything)):
        assert stream(api, job_id, seen) == everything[seen:]


def test_a_client_that_has_seen_the_end_need_not_come_again(api: Api) -> None:
    job_id = api.submit()["id"]
    api.http.post(f"/v1/jobs/{job_id}/cancel")
    last = stream(api, job_id)[-1]
    assert last[1] == "job.cancelled"
    answer = api.http.get(f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": str(last[0])})
    assert answer.status_code == 204


def test_events_arrive_as_they_happen(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    with api.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        sent = parse(answer.iter_lines())
        assert [next(sent)[1] for _ in range(2)] == ["job.queued", "job.started"]
        for num_done in (1, 2):
            worker.say(job_id, 1, EventType.PROGRESS, progress(num_done))
            assert next(sent)[2]["num_done"] == num_done
        worker.say(job_id, 1, EventType.RELEASED)
        assert next(sent)[1:] == ("job.queued", {"attempt": 2, "reason": "released"})
        httpx.post(f"{api.url}/v1/jobs/{job_id}/cancel")
        assert [kind for _, kind, _ in sent] == ["job.cancelled"]


def test_a_long_story_is_sent_whole(api: Api, worker: FakeWorker) -> None:
    job_id = start(api, worker)
    for number in range(600):
        worker.say(job_id, 1, EventType.DELTA, {"output_index": 0, "text": str(number)})
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    sent = stream(api, job_id)
    assert [event[0] for event in sent] == list(range(1, 604))
    assert [event[2]["text"] for event in sent if event[1] == "output.delta"] == [str(n) for n in range(600)]


def test_a_silent_stream_is_kept_open_by_pings(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "PING_S", 0.05)
    job_id = api.submit()["id"]
    with api.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        lines = answer.iter_lines()
        assert [line for line, _ in zip(lines, range(8), strict=False) if line.startswith(":")] == [
            ": ping"
        ] * 2


def test_a_client_that_leaves_is_forgotten(api: Api) -> None:
    job_id = api.submit()["id"]
    with api.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
        lines = answer.iter_lines()  # kept: an iterator that is dropped closes the connection
        next(lines)
        eventually(lambda: api.services.notifier.num_waiters == 1)
    eventually(lambda: api.services.notifier.num_waiters == 0)


def test_streams_and_long_polls_do_not_hold_up_a_stop(settings: Settings) -> None:
    with running(settings) as api:
        job_id = api.submit()["id"]
        with api.http.stream("GET", f"/v1/jobs/{job_id}/events") as answer:
            sent = parse(answer.iter_lines())
            assert next(sent)[1] == "job.queued"
            api.server.should_exit = True
            # Closed by the server in good order: a stream that was cut raises here.
            assert list(sent) == []


def test_a_deleted_job_ends_its_streams(api: Api) -> None:
    job_id = api.submit()["id"]
    with api.http.stream("GET", f"/v1/jobs/{job_id}/events", headers={"Last-Event-ID": "1000"}) as answer:
        httpx.post(f"{api.url}/v1/jobs/{job_id}/cancel")
        httpx.delete(f"{api.url}/v1/jobs/{job_id}")
        assert list(parse(answer.iter_lines())) == []
