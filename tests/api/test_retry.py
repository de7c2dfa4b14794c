"""POST /v1/jobs/{id}/retry: an ended job is worked on again, with a clean record."""

from __future__ import annotations

import pytest
from api_rig import Api, FakeWorker, result
from test_events import stream
from test_jobs import run_to

from jobs import EventType, run_id


@pytest.mark.parametrize("state", ["failed", "cancelled"])
def test_an_ended_job_is_queued_again(api: Api, worker: FakeWorker, state: str) -> None:
    job_id = run_to(api, worker, state)
    worker.be_there()
    old = api.http.get(f"/v1/jobs/{job_id}")
    answer = api.http.post(f"/v1/jobs/{job_id}/retry")
    job = answer.json()
    assert (answer.status_code, job["state"], job["attempt"]) == (202, "queued", 2)
    assert (job["num_failures"], job["error"], job["finished_at"]) == (0, None, None)
    assert answer.headers["ETag"] != old.headers["ETag"]
    assert api.queued() == [run_id(job_id, 2)]
    control = api.control(job_id)
    assert control is not None
    assert (control.cancel, control.min_attempt) == (False, 2)


def test_the_events_go_on_with_the_next_number(api: Api, worker: FakeWorker) -> None:
    job_id = run_to(api, worker, "failed")
    assert [kind for _, kind, _ in stream(api, job_id)] == ["job.queued", "job.started", "job.failed"]
    api.http.post(f"/v1/jobs/{job_id}/retry")
    worker.take()
    worker.say(job_id, 2, EventType.STARTED)
    worker.say(job_id, 2, EventType.SUCCEEDED, result())
    api.wait_state(job_id, "succeeded")
    kinds = ["job.queued", "job.started", "job.failed", "job.queued", "job.started", "job.succeeded"]
    everything = stream(api, job_id)
    assert [(seq, kind) for seq, kind, _ in everything] == list(enumerate(kinds, start=1))
    assert everything[3][2] == {"attempt": 2, "reason": "retry"}
    assert stream(api, job_id, 3) == everything[3:]
    assert api.http.get(f"/v1/jobs/{job_id}/result").json() == result()


def test_three_lost_attempts_are_forgiven(api: Api, worker: FakeWorker) -> None:
    job_id = str(api.submit()["id"])
    for attempt in (1, 2, 3):
        worker.say(job_id, attempt, EventType.LOST, {"code": "engine_crashed", "detail": "it died"})
    assert api.wait_state(job_id, "failed")["num_failures"] == 3
    assert api.http.post(f"/v1/jobs/{job_id}/retry").json()["num_failures"] == 0
    worker.say(job_id, 4, EventType.LOST, {"code": "engine_crashed", "detail": "it died"})
    worker.say(job_id, 5, EventType.STARTED)
    job = api.wait_state(job_id, "running")
    assert (job["attempt"], job["num_failures"]) == (5, 1)


def test_what_the_old_attempt_says_is_ignored(api: Api, worker: FakeWorker) -> None:
    job_id = run_to(api, worker, "failed")
    api.http.post(f"/v1/jobs/{job_id}/retry")
    worker.say(job_id, 1, EventType.SUCCEEDED, result("too late"))
    worker.say(job_id, 2, EventType.STARTED)
    assert api.wait_state(job_id, "running", "succeeded")["state"] == "running"


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("queued", "job_unfinished"),
        ("running", "job_unfinished"),
        ("cancelling", "job_unfinished"),
        ("succeeded", "job_finished"),
    ],
)
def test_other_jobs_are_not_retried(api: Api, worker: FakeWorker, state: str, code: str) -> None:
    job_id = run_to(api, worker, state)
    before = api.job(job_id)
    answer = api.http.post(f"/v1/jobs/{job_id}/retry")
    assert (answer.status_code, answer.json()["code"]) == (409, code)
    assert answer.json()["params"] == {"state": state}
    assert api.job(job_id) == before


def test_a_job_whose_document_is_deleted_is_not_retried(api: Api, worker: FakeWorker) -> None:
    kept, gone = api.upload("kept"), api.upload("gone")
    job_id = api.submit(documents=[kept, gone])["id"]
    api.http.post(f"/v1/jobs/{job_id}/cancel")
    api.http.delete(f"/v1/documents/{gone}")
    answer = api.http.post(f"/v1/jobs/{job_id}/retry")
    assert (answer.status_code, answer.json()["code"]) == (409, "document_gone")
    assert answer.json()["params"] == {"document": gone}
    assert api.job(job_id)["state"] == "cancelled"


def test_a_retry_of_no_job_is_not_found(api: Api) -> None:
    answer = api.http.post("/v1/jobs/job_none/retry")
    assert (answer.status_code, answer.json()["code"]) == (404, "job_not_found")
