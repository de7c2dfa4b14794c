"""A job reaches its end whatever is killed: real API, real worker, real model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli import Client, Document
from cli.client import JobEvent
from jobs import Ask, EventType, State
from tests.e2e.stack import MODEL, REPORT, end, engine_of, environment, free_port, start, wait_ready

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class Stack:
    def __init__(self, folder: Path, redis_url: str) -> None:
        port = free_port()
        self.env = environment(folder / "data", port, REDIS_URL=redis_url)
        self.log = folder / "log"
        self.client = Client(f"http://127.0.0.1:{port}")
        self.api = start(self.log, self.env, "api")
        self.workers = [start(self.log, self.env, "worker")]

    @property
    def worker(self) -> subprocess.Popen[bytes]:
        return self.workers[-1]

    def new_worker(self) -> None:
        self.workers.append(start(self.log, self.env, "worker"))

    def close(self) -> None:
        self.client.close()
        end(*self.workers, self.api)


@pytest.fixture
def stack(tmp_path: Path, redis_url: str) -> Iterator[Stack]:
    pulled = subprocess.run(
        [sys.executable, "-m", "worker.models", "pull", MODEL], capture_output=True, text=True, check=False
    )
    assert pulled.returncode == 0, pulled.stderr
    found = Stack(tmp_path, redis_url)
    try:
        wait_ready(found.client, found.worker, found.log)
        yield found
    finally:
        found.close()


@pytest.fixture
def report(stack: Stack, tmp_path: Path) -> Document:
    path = tmp_path / "report.md"
    path.write_text(REPORT)
    return stack.client.upload(path)


def question(document: Document, text: str = "Who built the stations?") -> Ask:
    return Ask(documents=[document.id], questions=[text], max_output_tokens=24)


def until(events: Iterator[JobEvent], *wanted: EventType) -> list[JobEvent]:
    seen = []
    for event in events:
        seen.append(event)
        if event.type in wanted:
            return seen
    raise AssertionError(f"none of {wanted} came, only {[event.type for event in seen]}")


def test_job_whose_engine_is_killed_is_tried_again_and_finished(stack: Stack, report: Document) -> None:
    job = stack.client.submit(question(report))
    events = stack.client.follow(job.id)
    until(events, EventType.PROGRESS, EventType.DELTA)
    os.kill(engine_of(stack.worker), signal.SIGKILL)
    queued = until(events, EventType.QUEUED)[-1]
    assert (queued.data["attempt"], queued.data["reason"]) == (2, "engine_crashed")
    assert "SIGKILL" in queued.data["detail"]
    until(events, EventType.SUCCEEDED)
    ended = stack.client.job(job.id)
    assert (ended.state, ended.attempt, ended.num_failures) == (State.SUCCEEDED, 2, 1)
    assert stack.client.result(job.id).outputs[0].text
    assert stack.worker.poll() is None


def test_answers_that_were_complete_when_the_engine_died_are_not_asked_again(
    stack: Stack, report: Document
) -> None:
    """More questions than are written at a time, so that some are answered while others wait."""
    questions = [f"In which year was the station of section {number % 8 + 1} built?" for number in range(20)]
    spec = Ask(documents=[report.id], questions=questions, max_output_tokens=12, temperature=0.7, seed=11)
    job = stack.client.submit(spec)
    events = stack.client.follow(job.id)
    done = [until(events, EventType.OUTPUT)[-1].data["output_index"]]
    os.kill(engine_of(stack.worker), signal.SIGKILL)
    before = until(events, EventType.QUEUED)
    assert before[-1].data["attempt"] == 2
    done += [event.data["output_index"] for event in before if event.type is EventType.OUTPUT]
    after = until(events, EventType.SUCCEEDED)
    again = [event.data["output_index"] for event in after if event.type is EventType.OUTPUT]
    assert 0 < len(done) < 20
    assert sorted(done + again) == list(range(20))
    assert {event.data["output_index"] for event in after if event.type is EventType.DELTA} <= set(again)
    result = stack.client.result(job.id)
    assert [output.question for output in result.outputs] == questions
    undisturbed = stack.client.submit(spec)
    assert stack.client.wait(undisturbed.id).state is State.SUCCEEDED
    expected = stack.client.result(undisturbed.id)
    assert [output.text for output in result.outputs] == [output.text for output in expected.outputs]
    assert result.usage.output_tokens == expected.usage.output_tokens


def test_drained_worker_gives_its_job_back_to_the_front(stack: Stack, report: Document) -> None:
    first = stack.client.submit(question(report))
    second = stack.client.submit(question(report, "How much grain is there?"))
    events = stack.client.follow(first.id)
    until(events, EventType.PROGRESS, EventType.DELTA)
    stack.worker.send_signal(signal.SIGTERM)
    assert stack.worker.wait(30) == 0
    assert until(events, EventType.QUEUED)[-1].data == {"attempt": 2, "reason": "released"}
    assert stack.client.job(first.id).num_failures == 0
    stack.new_worker()
    until(events, EventType.SUCCEEDED)
    assert not stack.client.job(second.id).ended
    assert stack.client.wait(second.id).state is State.SUCCEEDED


def test_cancelled_job_leaves_the_worker_usable(stack: Stack, report: Document) -> None:
    job = stack.client.submit(question(report))
    until(stack.client.follow(job.id), EventType.PROGRESS, EventType.DELTA)
    stack.client.cancel(job.id)
    assert stack.client.wait(job.id).state is State.CANCELLED
    again = stack.client.submit(question(report))
    assert stack.client.wait(again.id).state is State.SUCCEEDED


def test_expired_job_is_stopped_and_can_be_retried(stack: Stack, report: Document) -> None:
    # Far more tokens than the seconds allow, so that it is at work when its time is over.
    job = stack.client.submit(
        Ask(
            documents=[report.id], questions=["Tell all of it."] * 64, max_output_tokens=1000, expires_after=5
        )
    )
    seen = until(stack.client.follow(job.id), EventType.EXPIRED)
    assert EventType.STARTED in [event.type for event in seen]
    assert seen[-1].data["code"] == "expired"
    assert stack.client.job(job.id).state is State.EXPIRED
    retried = httpx.post(f"{stack.client.url}/v1/jobs/{job.id}/retry").json()
    assert (retried["state"], retried["attempt"]) == ("queued", 2)
    follow = stack.client.follow(job.id)
    until(follow, EventType.EXPIRED)
    until(follow, EventType.STARTED)  # the worker goes on
    until(follow, EventType.EXPIRED)


def test_killed_worker_loses_no_job(stack: Stack, report: Document) -> None:
    job = stack.client.submit(question(report))
    events = stack.client.follow(job.id)
    until(events, EventType.PROGRESS, EventType.DELTA)
    stack.worker.kill()
    stack.worker.wait()
    stack.new_worker()
    queued = until(events, EventType.QUEUED)[-1].data
    assert (queued["attempt"], queued["reason"]) == (2, "worker_lost")
    until(events, EventType.SUCCEEDED)
