"""What a key may use up, and what it is told when it is over: the limit, the value, the next step."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import redis
from api_rig import Api, FakeWorker, make_settings, running

from api.limits import Limits
from api.problems import ApiError
from api.rates import AWAY_S, RATE_KEY, RequestRates
from jobs import EventType


def client(api: Api, limits: Limits, tenant: str) -> httpx.Client:
    key = api.services.keys.create(tenant, ["submit", "read"], "", limits)[1]
    return httpx.Client(base_url=api.url, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def test_a_bucket_is_used_up_and_filled_again_with_time_while_redis_is_away() -> None:
    now = 0.0
    rates = RequestRates(redis.Redis.from_url("unix:///tmp/longleaf-nothing-here.sock"), lambda: now)
    for _ in range(30):
        rates.take("a", 30)
    with pytest.raises(ApiError) as refused:
        rates.take("a", 30)
    assert refused.value.headers == {"Retry-After": "2"}
    rates.take("b", 30)
    now = 1.9
    with pytest.raises(ApiError):
        rates.take("a", 30)
    now = 2.0
    rates.take("a", 30)
    now = 1e6
    for _ in range(30):
        rates.take("a", 30)
    with pytest.raises(ApiError):
        rates.take("a", 30)


def test_a_bucket_in_redis_is_one_for_all_hosts_and_filled_again_with_time(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        hosts = [RequestRates(client), RequestRates(client)]
        for number in range(60):
            hosts[number % 2].take("a", 60)
        client.hset(RATE_KEY + "a", "held", 0)
        with pytest.raises(ApiError) as refused:
            hosts[0].take("a", 60)
        assert refused.value.headers == {"Retry-After": "1"}
        hosts[1].take("b", 60)
        # As if the last request had come ten seconds before it did.
        at = float(client.hget(RATE_KEY + "a", "at"))
        client.hset(RATE_KEY + "a", "at", at - 10)
        for _ in range(10):
            hosts[0].take("a", 60)
        assert 0 < client.ttl(RATE_KEY + "a") <= 60


def test_a_host_asks_redis_again_some_seconds_after_it_was_away(redis_url: str) -> None:
    now = 0.0
    with redis.Redis.from_url(redis_url) as client:
        rates = RequestRates(client, lambda: now)
        client.set(RATE_KEY + "a", "not a bucket")
        rates.take("a", 1)
        client.delete(RATE_KEY + "a")
        with pytest.raises(ApiError):
            rates.take("a", 1)
        now = AWAY_S
        rates.take("a", 1)
        assert client.exists(RATE_KEY + "a")


def test_a_key_that_asks_too_often_is_told_when_to_come_again(shared_api: Api) -> None:
    with client(shared_api, Limits(requests_per_minute=2), "often") as http:
        answers = [http.get("/v1/jobs") for _ in range(3)]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert answers[2].json()["code"] == "rate_limited"
        assert answers[2].json()["params"]["limit"] == 2
        assert 1 <= int(answers[2].headers["Retry-After"]) <= 30
        # The limit is the key's, and this machine has none.
        assert shared_api.http.get("/v1/jobs").status_code == 200


def test_queued_jobs_are_counted_and_started_ones_are_not(
    tmp_path: Path, empty_database: Path, redis_url: str
) -> None:
    with running(make_settings(tmp_path, empty_database, redis_url)) as api:
        shared = api.upload()
        for _ in range(3):
            api.submit(shared)
        with client(api, Limits(max_queued_jobs=2), "queue") as http:
            document = http.post("/v1/documents", json={"name": "a", "text": "b"}).json()["id"]
            body = {"type": "summarize", "documents": [document], "max_output_tokens": 8}
            first, second, third = (http.post("/v1/jobs", json=body) for _ in range(3))
            assert [first.status_code, second.status_code, third.status_code] == [202, 202, 429]
            assert third.json()["code"] == "too_many_jobs"
            assert third.json()["params"] == {"limit": 2, "value": 2}
            assert int(third.headers["Retry-After"]) > 0
            cancelled = http.post(f"/v1/jobs/{second.json()['id']}/cancel")
            assert cancelled.status_code == 202
            assert http.post("/v1/jobs", json=body).status_code == 202
            retried = http.post(f"/v1/jobs/{second.json()['id']}/retry")
            assert (retried.status_code, retried.json()["code"]) == (429, "too_many_jobs")
            api_job = f"/v1/jobs/{first.json()['id']}"
            while (job := http.get(api_job, params={"wait": 1}).json())["state"] == "queued":
                # The attempt may have grown: no worker holds the job, so it is handed out anew.
                FakeWorker(api.redis).say(job["id"], job["attempt"], EventType.STARTED)
            assert http.post("/v1/jobs", json=body).status_code == 202


def test_a_known_idempotency_key_is_answered_over_the_limit_too(shared_api: Api) -> None:
    with client(shared_api, Limits(max_queued_jobs=1), "again") as http:
        document = http.post("/v1/documents", json={"name": "a", "text": "b"}).json()["id"]
        body = {"type": "summarize", "documents": [document], "max_output_tokens": 8}
        first, again = (http.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k"}) for _ in range(2))
        assert first.json()["id"] == again.json()["id"]


def test_documents_are_counted_in_bytes_until_they_are_deleted(shared_api: Api) -> None:
    with client(shared_api, Limits(max_document_bytes=10), "bytes") as http:
        six = http.post("/v1/documents", json={"name": "a", "text": "sixsix"})
        assert six.status_code == 201
        over = http.post("/v1/documents", json={"name": "a", "text": "fives"})
        assert (over.status_code, over.json()["code"]) == (429, "too_many_bytes")
        assert over.json()["params"] == {"limit": 10, "value": 11}
        assert "Retry-After" in over.headers
        assert http.post("/v1/documents", json={"name": "a", "text": "sixsix"}).status_code == 200
        assert http.post("/v1/documents", json={"name": "a", "text": "four"}).status_code == 201
        assert http.delete(f"/v1/documents/{six.json()['id']}").status_code == 204
        assert http.post("/v1/documents", json={"name": "a", "text": "fives"}).status_code == 201
