"""The life of a job over HTTP, with a scripted worker on the other side of Redis."""

from __future__ import annotations

import threading

import pytest
from api_rig import MODEL, Api, FakeWorker, card, progress, result
from rq.job import Job as RQJob
from rq.serializers import JSONSerializer

from jobs import RUN_FUNCTION, EventType, run_id


def run_to(api: Api, worker: FakeWorker, state: str) -> str:
    """A job in the given state."""
    job_id = str(api.submit()["id"])
    if state == "queued":
        return job_id
    if state == "cancelled":
        api.http.post(f"/v1/jobs/{job_id}/cancel")
        return job_id
    worker.take()
    worker.be_there(job_id, 1)
    worker.say(job_id, 1, EventType.STARTED)
    api.wait_state(job_id, "running")
    if state == "cancelling":
        api.http.post(f"/v1/jobs/{job_id}/cancel")
    elif state == "succeeded":
        worker.say(job_id, 1, EventType.SUCCEEDED, result())
    elif state == "failed":
        worker.say(job_id, 1, EventType.FAILED, {"code": "broken", "detail": "it broke"})
    api.wait_state(job_id, state)
    return job_id


@pytest.mark.parametrize(
    ("said", "status"),
    [((False,), 422), ((False, False), 422), ((False, None), 202), ((True,), 202), ((), 202)],
)
def test_thinking_is_refused_where_every_worker_says_that_its_model_cannot(
    api: Api, said: tuple[bool | None, ...], status: int
) -> None:
    for number, can_think in enumerate(said):
        worker = FakeWorker(api.redis, f"w{number}")
        worker.be_there(card=card().model_copy(update={"can_think": can_think}))
    body = {"documents": [api.upload()], "thinking": True}
    for path, job in (("/v1/jobs", {"type": "summarize", "max_output_tokens": 8}), ("/v1/prefixes", {})):
        answer = api.http.post(path, json=body | job)
        assert answer.status_code == status
        if status == 422:
            assert (answer.json()["code"], answer.json()["param"]) == ("cannot_think", "thinking")
            assert MODEL in answer.json()["detail"]


def test_a_job_goes_from_accepted_to_succeeded(api: Api, worker: FakeWorker) -> None:
    job = api.submit()
    assert job["state"] == "queued"
    request = worker.take()
    worker.be_there(job["id"], 1)
    worker.say(job["id"], 1, EventType.STARTED)
    worker.say(job["id"], 1, EventType.PROGRESS, progress(3))
    running = api.wait_state(job["id"], "running")
    assert (running["attempt"], running["num_failures"]) == (1, 0)
    worker.say(job["id"], 1, EventType.SUCCEEDED, result())
    done = api.wait_state(job["id"], "succeeded")
    assert request.spec.model == done["model"] == MODEL
    assert done["created_at"] <= done["started_at"] <= done["finished_at"]
    assert done["progress"]["num_done"] == 3
    answer = api.http.get(done["links"]["result"])
    assert (answer.status_code, answer.json()) == (200, result())


def test_the_queue_entry_is_what_the_contract_says(api: Api) -> None:
    document = api.upload("Four words are here.")
    job = api.submit(document, type="ask", questions=["Why?"])
    name = run_id(job["id"], 1)
    assert api.queued() == [name]
    entry = RQJob.fetch(name, connection=api.redis, serializer=JSONSerializer)
    assert (entry.func_name, entry.timeout, entry.result_ttl, entry.failure_ttl) == (
        RUN_FUNCTION,
        -1,
        60,
        3600,
    )
    request = entry.kwargs["request"]
    assert set(entry.kwargs) == {"request"}
    assert (request["job_id"], request["attempt"]) == (job["id"], 1)
    assert request["documents"][0]["num_chars"] == 20
    shown = api.http.get(f"/v1/documents/{document}").json()
    assert request["documents"][0]["text_sha256"] == shown["text_sha256"]


def test_documents_reach_the_worker_in_the_order_of_the_spec(api: Api, worker: FakeWorker) -> None:
    first, second = api.upload("first"), api.upload("second")
    api.submit(documents=[second, first, second])
    assert [document.id for document in worker.take().documents] == [second, first, second]


@pytest.mark.parametrize(
    ("state", "status", "after"),
    [
        ("queued", 202, "cancelled"),
        ("running", 202, "cancelling"),
        ("cancelling", 202, "cancelling"),
        ("cancelled", 202, "cancelled"),
        ("succeeded", 409, "succeeded"),
        ("failed", 409, "failed"),
    ],
)
def test_cancel_in_each_state(api: Api, worker: FakeWorker, state: str, status: int, after: str) -> None:
    job_id = run_to(api, worker, state)
    answer = api.http.post(f"/v1/jobs/{job_id}/cancel")
    assert answer.status_code == status
    assert api.job(job_id)["state"] == after
    if status == 409:
        assert answer.json()["code"] == "job_finished"
    else:
        control = api.control(job_id)
        assert control is not None
        assert control.cancel


def test_a_cancelled_queued_job_is_off_the_queue(api: Api) -> None:
    kept, gone = api.submit(), api.submit()
    api.http.post(f"/v1/jobs/{gone['id']}/cancel")
    assert api.queued() == [run_id(kept["id"], 1)]


def test_a_job_that_ends_while_it_is_cancelled_keeps_its_end(api: Api, worker: FakeWorker) -> None:
    job_id = run_to(api, worker, "cancelling")
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    api.wait_state(job_id, "succeeded")
    assert api.http.get(f"/v1/jobs/{job_id}/result").status_code == 200


@pytest.mark.parametrize(
    ("state", "status", "code"),
    [
        ("queued", 409, "job_unfinished"),
        ("running", 409, "job_unfinished"),
        ("cancelled", 409, "job_cancelled"),
        ("failed", 409, "job_failed"),
    ],
)
def test_a_result_that_is_not_there_says_why(
    api: Api, worker: FakeWorker, state: str, status: int, code: str
) -> None:
    job_id = run_to(api, worker, state)
    answer = api.http.get(f"/v1/jobs/{job_id}/result")
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    if state == "failed":
        assert answer.json()["error"] == {"code": "broken", "detail": "it broke", "params": {}}
        assert api.job(job_id)["error"]["code"] == "broken"


@pytest.mark.parametrize(
    ("state", "status"), [("queued", 409), ("running", 409), ("cancelling", 409), ("succeeded", 204)]
)
def test_only_a_finished_job_is_deleted(api: Api, worker: FakeWorker, state: str, status: int) -> None:
    job_id = run_to(api, worker, state)
    assert api.http.delete(f"/v1/jobs/{job_id}").status_code == status
    expected = 404 if status == 204 else 200
    assert api.http.get(f"/v1/jobs/{job_id}").status_code == expected
    if status == 204:
        for path in ("result", "events"):
            assert api.http.get(f"/v1/jobs/{job_id}/{path}").status_code == 404
        assert api.services.jobs.events(job_id, 0, 10) == []


def test_an_unchanged_job_is_not_sent_again(api: Api, worker: FakeWorker) -> None:
    job_id = run_to(api, worker, "running")
    tag = api.http.get(f"/v1/jobs/{job_id}").headers["ETag"]
    for given in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = api.http.get(f"/v1/jobs/{job_id}", headers={"If-None-Match": given})
        assert (answer.status_code, answer.content, answer.headers["ETag"]) == (304, b"", tag)
    worker.say(job_id, 1, EventType.PROGRESS, progress(1))
    news = api.http.get(f"/v1/jobs/{job_id}", params={"wait": 10}, headers={"If-None-Match": tag})
    assert (news.status_code, news.json()["progress"]["num_done"]) == (200, 1)
    assert news.headers["ETag"] != tag


def test_a_waiting_request_is_answered_by_the_change(api: Api, worker: FakeWorker) -> None:
    job_id = run_to(api, worker, "running")
    answers = []

    def wait() -> None:
        answers.append(api.http.get(f"/v1/jobs/{job_id}", params={"wait": 60}).json()["state"])

    thread = threading.Thread(target=wait)
    thread.start()
    while api.services.notifier.num_waiters == 0:
        pass
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    thread.join(10)
    assert answers == ["succeeded"]


def test_waiting_for_a_finished_job_answers_at_once(api: Api, worker: FakeWorker) -> None:
    job_id = run_to(api, worker, "succeeded")
    tag = api.http.get(f"/v1/jobs/{job_id}", params={"wait": 60}).headers["ETag"]
    again = api.http.get(f"/v1/jobs/{job_id}", params={"wait": 60}, headers={"If-None-Match": tag})
    assert again.status_code == 304


def test_a_wait_without_a_change_runs_out(api: Api) -> None:
    job_id = api.submit()["id"]
    first = api.http.get(f"/v1/jobs/{job_id}", params={"wait": 0.05})
    assert (first.status_code, first.json()["state"]) == (200, "queued")
    tag = {"If-None-Match": first.headers["ETag"]}
    assert api.http.get(f"/v1/jobs/{job_id}", params={"wait": 0.05}, headers=tag).status_code == 304


def test_lists_go_from_new_to_old_in_pages(api: Api) -> None:
    document = api.upload()
    ids = [api.submit(document)["id"] for _ in range(5)]
    seen, after = [], None
    while True:
        params = {"limit": 2} | ({"after": after} if after else {})
        answer = api.http.get("/v1/jobs", params=params).json()
        seen.append([job["id"] for job in answer["data"]])
        after = answer["next"]
        assert answer["has_more"] is (after is not None)
        if not answer["has_more"]:
            break
    assert [len(part) for part in seen] == [2, 2, 1]
    # Ids sort by time; within one millisecond by chance.
    assert [job_id for part in seen for job_id in part] == sorted(ids, reverse=True)


def test_lists_can_be_narrowed_to_a_state(api: Api) -> None:
    kept, gone = api.submit(), api.submit()
    api.http.post(f"/v1/jobs/{gone['id']}/cancel")
    listed = api.http.get("/v1/jobs", params={"state": "cancelled"}).json()["data"]
    assert [job["id"] for job in listed] == [gone["id"]]
    listed = api.http.get("/v1/jobs", params={"state": "queued"}).json()["data"]
    assert [job["id"] for job in listed] == [kept["id"]]
