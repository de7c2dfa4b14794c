"""Idempotency-Key: a request that is sent again makes no second job."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from api_rig import Api, FakeWorker, result

from api.store import KeyTaken
from jobs import EventType, Summarize

DATABASES = ("sqlite", "postgresql")


def post(api: Api, key: str | bytes, **spec: Any) -> httpx.Response:
    return api.http.post("/v1/jobs", json={"type": "summarize"} | spec, headers={"Idempotency-Key": key})


def num_jobs(api: Api) -> int:
    return len(api.http.get("/v1/jobs").json()["data"])


def test_the_same_key_and_body_give_the_same_job(api: Api, worker: FakeWorker) -> None:
    document = api.upload()
    first = post(api, "k", documents=[document], max_output_tokens=8)
    again = post(api, "k", max_output_tokens=8, documents=[document])
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.json() == first.json()
    assert again.headers["Location"] == first.headers["Location"]
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    worker.take()
    worker.say(first.json()["id"], 1, EventType.SUCCEEDED, result())
    api.wait_state(first.json()["id"], "succeeded")
    ended = post(api, "k", documents=[document], max_output_tokens=8)
    assert (ended.status_code, ended.json()["state"]) == (200, "succeeded")
    assert num_jobs(api) == 1


def test_the_same_key_with_another_body_is_refused(api: Api) -> None:
    document = api.upload()
    job_id = post(api, "k", documents=[document], max_output_tokens=8).json()["id"]
    answer = post(api, "k", documents=[document], max_output_tokens=9)
    body = answer.json()
    assert (answer.status_code, body["code"]) == (422, "idempotency_key_reused")
    assert (body["param"], body["params"]) == ("Idempotency-Key", {"key": "k", "job": job_id})
    assert num_jobs(api) == 1


def test_two_requests_at_the_same_moment_make_one_job(api: Api) -> None:
    document = api.upload()
    barrier = threading.Barrier(8)
    answers: list[httpx.Response] = []

    def send() -> None:
        barrier.wait()
        answers.append(post(api, "k", documents=[document], max_output_tokens=8))

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sum("Idempotent-Replayed" not in answer.headers for answer in answers) == 1
    assert num_jobs(api) == 1


def test_the_database_refuses_a_second_job_of_a_key(api: Api) -> None:
    spec = Summarize(documents=[api.upload()])
    api.services.jobs.create("default", spec, "tiny", "k", "digest")
    with pytest.raises(KeyTaken):
        api.services.jobs.create("default", spec, "tiny", "k", "digest")
    assert num_jobs(api) == 1


def test_a_repeated_request_needs_no_document_any_more(api: Api) -> None:
    document = api.upload()
    job_id = post(api, "k", documents=[document], max_output_tokens=8).json()["id"]
    api.http.post(f"/v1/jobs/{job_id}/cancel")
    assert api.http.delete(f"/v1/documents/{document}").status_code == 204
    again = post(api, "k", documents=[document], max_output_tokens=8)
    assert (again.status_code, again.json()["id"]) == (200, job_id)


def test_a_refused_request_leaves_its_key_free(api: Api) -> None:
    document = api.upload()
    assert post(api, "k", documents=["doc_none"], max_output_tokens=8).status_code == 404
    assert post(api, "k", documents=[document], max_output_tokens=8).status_code == 202


def test_a_key_is_free_again_when_its_job_is_deleted(api: Api) -> None:
    document = api.upload()
    job_id = post(api, "k", documents=[document], max_output_tokens=8).json()["id"]
    api.http.post(f"/v1/jobs/{job_id}/cancel")
    api.http.delete(f"/v1/jobs/{job_id}")
    again = post(api, "k", documents=[document], max_output_tokens=9)
    assert again.status_code == 202
    assert again.json()["id"] != job_id


@pytest.mark.parametrize("key", ["x", "x" * 255, "two words", '"quoted"', "!~"])
def test_printable_keys_are_accepted(api: Api, key: str) -> None:
    assert post(api, key, documents=[api.upload()], max_output_tokens=8).status_code == 202


@pytest.mark.parametrize("key", [b"", b"x" * 256, b"a\tb", "schlüssel".encode()])
def test_other_keys_are_refused(api: Api, key: bytes) -> None:
    answer = post(api, key, documents=[api.upload()], max_output_tokens=8)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert answer.json()["param"] == "Idempotency-Key"
    assert "1 to 255 printable ASCII characters" in answer.json()["detail"]
    assert num_jobs(api) == 0


def test_two_keys_on_one_request_are_refused(api: Api) -> None:
    headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
    answer = api.http.post(
        "/v1/jobs", json={"type": "summarize", "documents": [api.upload()]}, headers=headers
    )
    assert (answer.status_code, answer.json()["param"]) == (422, "Idempotency-Key")
