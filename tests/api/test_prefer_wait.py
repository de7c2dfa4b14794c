"""Prefer: wait=N on POST /v1/jobs: the ended job in the same answer, where it ends in time."""

from __future__ import annotations

import threading

import httpx
import pytest
from api_rig import Api, FakeWorker, eventually, result

from api.routes.waiting import preferred_wait_s
from jobs import EventType


def post(api: Api, document: str, **headers: str) -> httpx.Response:
    spec = {"type": "summarize", "documents": [document], "max_output_tokens": 8}
    return httpx.post(f"{api.url}/v1/jobs", json=spec, headers=headers, timeout=70)


def test_a_job_that_ends_in_time_is_in_the_answer(api: Api, worker: FakeWorker) -> None:
    document, answers = api.upload(), []
    thread = threading.Thread(target=lambda: answers.append(post(api, document, Prefer="wait=60")))
    thread.start()
    eventually(api.queued)
    eventually(lambda: api.services.notifier.num_waiters == 1)
    job_id = worker.take().job_id
    worker.say(job_id, 1, EventType.STARTED)
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    thread.join(10)
    (answer,) = answers
    assert (answer.status_code, answer.json()["state"], answer.json()["id"]) == (200, "succeeded", job_id)
    assert answer.headers["Preference-Applied"] == "wait=60"
    assert answer.headers["ETag"] == api.http.get(f"/v1/jobs/{job_id}").headers["ETag"]


def test_a_job_that_does_not_end_in_time_is_accepted(api: Api) -> None:
    answer = post(api, api.upload(), Prefer="wait=0")
    assert (answer.status_code, answer.json()["state"]) == (202, "queued")
    assert answer.headers["Preference-Applied"] == "wait=0"
    assert answer.headers["Location"] == f"/v1/jobs/{answer.json()['id']}"


def test_a_repeated_request_waits_for_the_job_that_is_there(api: Api, worker: FakeWorker) -> None:
    document = api.upload()
    headers = {"Idempotency-Key": "k"}
    job_id = post(api, document, **headers).json()["id"]
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    answer = post(api, document, Prefer="wait=30", **headers)
    assert (answer.status_code, answer.json()["id"], answer.json()["state"]) == (200, job_id, "succeeded")


def test_a_waiting_submission_does_not_hold_up_a_stop(api: Api) -> None:
    document, answers = api.upload(), []
    thread = threading.Thread(target=lambda: answers.append(post(api, document, Prefer="wait=60")))
    thread.start()
    eventually(lambda: api.services.notifier.num_waiters == 1)
    api.server.should_exit = True
    thread.join(10)
    assert [answer.status_code for answer in answers] == [202]


@pytest.mark.parametrize("prefer", ["wait=soon", "wait", "wait=-1", "wait=1.5", "respond-async", "waiting=5"])
def test_a_preference_that_is_not_understood_is_ignored(api: Api, prefer: str) -> None:
    answer = post(api, api.upload(), Prefer=prefer)
    assert answer.status_code == 202
    assert "Preference-Applied" not in answer.headers


@pytest.mark.parametrize(
    ("values", "wait_s"),
    [
        ([], None),
        (["wait=30"], 30),
        (["Wait = 30"], 30),
        (['wait="30"'], 30),
        (["wait=61"], 60),
        (["wait=999999999"], 60),
        (["respond-async, wait=10"], 10),
        (["respond-async", "wait=10"], 10),
        (["handling=lenient;note, wait=10;x=y"], 10),
        (["wait=1, wait=2"], 1),
        (['foo="wait=5"'], None),
    ],
)
def test_the_seconds_are_read_from_any_form_of_the_header(values: list[str], wait_s: int | None) -> None:
    assert preferred_wait_s(values) == wait_s
