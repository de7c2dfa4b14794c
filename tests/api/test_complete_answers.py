"""Answers that are complete stay, whatever becomes of their job; the next attempt owes the others alone."""

from __future__ import annotations

from typing import Any

import pytest
from api_rig import Api, FakeWorker, eventually, output
from sqlalchemy import func, select, update
from test_events import stream

from api.models import Job, JobOutput, WebhookDelivery
from jobs import EventType, Output, Result

DATABASES = ("sqlite", "postgresql")
QUESTIONS = ["Who?", "When?", "Where?", "Why?"]
LOST = {"code": "engine_crashed", "detail": "it died"}


def answered(index: int, text: str | None = None) -> dict[str, Any]:
    return output(index, text or f"Answer {index}.", QUESTIONS[index])


def begin(api: Api, worker: FakeWorker, *done: int, **spec: Any) -> str:
    """A running job of which some questions are answered."""
    job_id = str(api.submit(type="ask", questions=QUESTIONS, **spec)["id"])
    assert worker.take().owed is None
    worker.be_there(job_id, 1)
    worker.say(job_id, 1, EventType.STARTED)
    for index in done:
        worker.say(job_id, 1, EventType.OUTPUT, answered(index))
    api.wait_state(job_id, "running")
    eventually(lambda: api.job(job_id)["num_done"] == len(done))
    return job_id


def end(api: Api, worker: FakeWorker, job_id: str, state: str) -> None:
    if state == "cancelled":
        api.http.post(f"/v1/jobs/{job_id}/cancel")
        worker.say(job_id, 1, EventType.CANCELLED)
    elif state == "expired":
        with api.services.database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(expires_at=1.0))
        eventually(lambda: (control := api.control(job_id)) and control.cancel)
        worker.say(job_id, 1, EventType.CANCELLED)
    elif state == "failed":
        worker.say(job_id, 1, EventType.FAILED, {"code": "memory_exceeded", "detail": "too much"})
    api.wait_state(job_id, state)


def rest(*indices: int) -> dict[str, Any]:
    """What a worker sends at the end of an attempt that owed these."""
    outputs = [Output.model_validate(answered(index)) for index in indices]
    return Result.of("ask", "tiny", outputs, len(QUESTIONS)).model_dump(mode="json")


def num_kept(api: Api, job_id: str) -> int:
    with api.services.database.read() as session:
        return session.scalar(select(func.count()).where(JobOutput.job_id == job_id)) or 0


@pytest.mark.parametrize("state", ["cancelled", "expired", "failed"])
def test_a_job_that_ends_early_has_its_complete_answers_for_its_result(
    api: Api, worker: FakeWorker, state: str
) -> None:
    job_id = begin(api, worker, 2, 0)
    end(api, worker, job_id, state)
    answer = api.http.get(f"/v1/jobs/{job_id}/result")
    found = answer.json()
    assert (answer.status_code, found["complete"], found["num_outputs"]) == (200, False, 4)
    assert [(o["index"], o["question"], o["text"]) for o in found["outputs"]] == [
        (0, "Who?", "Answer 0."),
        (2, "Where?", "Answer 2."),
    ]
    assert (found["usage"]["output_tokens"], found["timing"]["decode_s"]) == (4, 1.0)
    job = api.job(job_id)
    assert (job["num_done"], job["num_outputs"]) == (2, 4)
    if state != "cancelled":
        assert "2 of its 4 answers are complete" in job["error"]["detail"]
    again = api.http.get(f"/v1/jobs/{job_id}/result", headers={"If-None-Match": answer.headers["ETag"]})
    assert again.status_code == 304


def test_a_job_without_a_complete_answer_has_no_result(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker)
    worker.say(job_id, 1, EventType.DELTA, {"output_index": 0, "text": "Ans"})
    end(api, worker, job_id, "failed")
    answer = api.http.get(f"/v1/jobs/{job_id}/result")
    assert (answer.status_code, answer.json()["code"]) == (409, "job_failed")
    assert api.job(job_id)["error"]["detail"] == "too much"


def test_a_running_job_has_no_result_yet(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker, 0)
    answer = api.http.get(f"/v1/jobs/{job_id}/result")
    assert (answer.status_code, answer.json()["code"]) == (409, "job_unfinished")


@pytest.mark.parametrize("kind", [EventType.LOST, EventType.RELEASED])
def test_the_next_attempt_owes_only_what_is_missing(api: Api, worker: FakeWorker, kind: EventType) -> None:
    job_id = begin(api, worker, 3, 1)
    worker.say(job_id, 1, kind, LOST)
    request = eventually(lambda: worker.take() if api.queued() else None)
    assert (request.attempt, request.owed) == (2, [0, 2])
    worker.be_there(job_id, 2)
    worker.say(job_id, 2, EventType.STARTED)
    worker.say(job_id, 2, EventType.OUTPUT, answered(0))
    worker.say(job_id, 2, EventType.SUCCEEDED, rest(0, 2))
    job = api.wait_state(job_id, "succeeded")
    assert (job["num_done"], job["num_outputs"]) == (4, 4)
    whole = api.http.get(f"/v1/jobs/{job_id}/result").json()
    assert (whole["complete"], [o["text"] for o in whole["outputs"]]) == (
        True, ["Answer 0.", "Answer 1.", "Answer 2.", "Answer 3."],
    )  # fmt: skip
    assert [o["question"] for o in whole["outputs"]] == QUESTIONS
    assert (whole["usage"]["output_tokens"], whole["usage"]["prompt_tokens"]) == (8, 20)
    assert (whole["timing"]["decode_s"], whole["timing"]["time_to_first_token_s"]) == (2.0, 0.1)
    assert stream(api, job_id)[-1][2] == whole
    assert num_kept(api, job_id) == 0


def test_a_retry_asks_only_what_is_missing_and_a_second_end_keeps_more(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker, 0)
    end(api, worker, job_id, "failed")
    retried = api.http.post(f"/v1/jobs/{job_id}/retry").json()
    assert (retried["num_done"], retried["error"]) == (1, None)
    request = worker.take()
    assert (request.attempt, request.owed) == (2, [1, 2, 3])
    worker.say(job_id, 2, EventType.STARTED)
    worker.say(job_id, 2, EventType.OUTPUT, answered(2))
    worker.say(job_id, 2, EventType.FAILED, {"code": "broken", "detail": "it broke"})
    api.wait_state(job_id, "failed")
    found = api.http.get(f"/v1/jobs/{job_id}/result").json()
    assert [o["index"] for o in found["outputs"]] == [0, 2]


def test_a_job_that_was_lost_with_all_its_answers_needs_none_again(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker, 0, 1, 2, 3)
    worker.say(job_id, 1, EventType.LOST, LOST)
    request = eventually(lambda: worker.take() if api.queued() else None)
    assert request.owed == []
    worker.say(job_id, 2, EventType.SUCCEEDED, rest())
    api.wait_state(job_id, "succeeded")
    assert len(api.http.get(f"/v1/jobs/{job_id}/result").json()["outputs"]) == 4


def test_an_answer_is_kept_once_and_the_first_stands(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker, 1)
    worker.say(job_id, 1, EventType.OUTPUT, answered(1, "Another."))
    worker.say(job_id, 1, EventType.OUTPUT, answered(2))
    eventually(lambda: api.job(job_id)["num_done"] == 2)
    end(api, worker, job_id, "failed")
    events = [(seq, data) for seq, kind, data in stream(api, job_id) if kind == "output.done"]
    assert events == [
        (3, {"output_index": 1, "finish_reason": "stop", "num_done": 1, "num_outputs": 4}),
        (4, {"output_index": 2, "finish_reason": "stop", "num_done": 2, "num_outputs": 4}),
    ]
    found = api.http.get(f"/v1/jobs/{job_id}/result").json()
    assert [o["text"] for o in found["outputs"]] == ["Answer 1.", "Answer 2."]


def test_an_answer_of_an_old_attempt_or_of_no_question_is_not_kept(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker)
    worker.say(job_id, 1, EventType.LOST, LOST)
    worker.say(job_id, 1, EventType.OUTPUT, answered(0))
    worker.say(job_id, 2, EventType.OUTPUT, answered(0) | {"index": 4})
    worker.say(job_id, 2, EventType.OUTPUT, {"index": 1, "text": "no more fields"})
    worker.say(job_id, 2, EventType.OUTPUT, answered(3))
    eventually(lambda: api.job(job_id)["num_done"])
    with api.services.database.read() as session:
        kept = session.scalars(select(JobOutput.output_index).where(JobOutput.job_id == job_id)).all()
    assert list(kept) == [3]


def test_a_result_without_an_answer_that_is_owed_fails_the_job(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker, 0)
    worker.say(job_id, 1, EventType.SUCCEEDED, rest(1, 2))
    job = api.wait_state(job_id, "failed", "succeeded")
    assert (job["state"], job["error"]["code"]) == ("failed", "invalid_result")
    assert len(api.http.get(f"/v1/jobs/{job_id}/result").json()["outputs"]) == 1


def test_a_callback_says_how_many_answers_there_are(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker, 2, callback_url="http://nowhere.invalid/")
    end(api, worker, job_id, "failed")
    with api.services.database.read() as session:
        body = session.scalars(select(WebhookDelivery.body).where(WebhookDelivery.job_id == job_id)).one()
    assert '"num_outputs":4,"num_done":1' in body


def test_a_deleted_job_leaves_no_answer(api: Api, worker: FakeWorker) -> None:
    job_id = begin(api, worker, 0, 1)
    end(api, worker, job_id, "cancelled")
    assert num_kept(api, job_id) == 2
    assert api.http.delete(f"/v1/jobs/{job_id}").status_code == 204
    assert num_kept(api, job_id) == 0
