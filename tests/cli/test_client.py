"""The Python client where the API or the way to it misbehaves."""

from __future__ import annotations

from typing import Any

import pytest

from cli import Client, Refused, Unreachable
from jobs import EventType, State
from tests.cli.fake_api import JOB, Request, fake_api, sse

PROGRESS = {
    "phase": "decode",
    "num_done": 1,
    "num_total": 2,
    "tokens_per_s": 1.0,
    "eta_s": 1.0,
    "cached_tokens": 0,
}


def test_cut_event_stream_is_resumed_after_the_last_event() -> None:
    asked: list[str | None] = []

    def answer(request: Request) -> None:
        if not request.path.endswith("/events"):
            state = "succeeded" if len(asked) > 1 else "running"
            request.reply(200, {**JOB, "state": state})
            return
        asked.append(request.headers.get("Last-Event-ID"))
        parts = [sse(1, "job.queued") + sse(2, "job.started"), ": ping\n\n" + sse(3, "job.succeeded")]
        request.stream(parts[len(asked) - 1])

    with fake_api(answer) as url, Client(url) as client:
        events = list(client.follow("job_1"))
    assert [event.type for event in events] == [EventType.QUEUED, EventType.STARTED, EventType.SUCCEEDED]
    assert asked == [None, "2"]


def test_long_poll_replaces_an_event_stream_that_a_proxy_spoils() -> None:
    versions: list[dict[str, Any]] = [
        {**JOB, "state": "running", "progress": PROGRESS},
        {**JOB, "state": "succeeded", "progress": PROGRESS},
    ]

    def answer(request: Request) -> None:
        if request.path.endswith("/events"):
            request.reply(200, "<html>", "text/html")
        else:
            request.reply(200, versions.pop(0) if len(versions) > 1 else versions[0], ETag='"1"')

    with fake_api(answer) as url, Client(url) as client:
        types = [event.type for event in client.follow("job_1")]
    assert types == [EventType.PROGRESS, EventType.PROGRESS, EventType.SUCCEEDED]


def test_wait_returns_the_ended_job() -> None:
    def answer(request: Request) -> None:
        if request.path.endswith("/events"):
            request.stream(sse(1, "job.cancelled"))
        else:
            request.reply(200, {**JOB, "state": "cancelled"})

    with fake_api(answer) as url, Client(url) as client:
        assert client.wait("job_1").state is State.CANCELLED


def test_refusal_carries_the_detail_of_the_problem() -> None:
    problem = {"code": "job_not_found", "detail": "there is no job 'job_1'", "status": 404}
    with (
        fake_api(lambda request: request.reply(404, problem, "application/problem+json")) as url,
        Client(url) as client,
        pytest.raises(Refused, match="there is no job 'job_1'") as caught,
    ):
        client.job("job_1")
    assert (caught.value.status, caught.value.code) == (404, "job_not_found")


def test_answer_of_another_service_is_not_taken_for_a_problem() -> None:
    with (
        fake_api(lambda request: request.reply(502, "<html>", "text/html")) as url,
        Client(url) as client,
        pytest.raises(Refused, match="answered 502 without an explanation"),
    ):
        client.job("job_1")


def test_unreachable_api_says_how_to_start_it() -> None:
    with Client("http://127.0.0.1:1") as client, pytest.raises(Unreachable, match="longleaf up"):
        client.job("job_1")
