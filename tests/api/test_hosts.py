"""Two API hosts on one PostgreSQL and one Redis: they take turns, and either may end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_rig import Api, FakeWorker, eventually, make_settings, result, running
from sqlalchemy import make_url

from api import leadership
from api.limits import Limits
from api.migrate import upgrade
from api.settings import Settings
from jobs import EventType
from tests.postgres_process import start_postgres

DATABASES = ("postgresql",)


@pytest.fixture(autouse=True)
def quick_handover(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(leadership, "HANDOVER_S", 0.2)


class Hosts:
    """The first one leads; each may be stopped."""

    def __init__(self, first: Settings, second: Settings) -> None:
        self._stacks = [ExitStack(), ExitStack()]
        self.first = self._stacks[0].enter_context(running(first))
        self.second = self._stacks[1].enter_context(running(second))

    def stop_first(self) -> None:
        self._stacks[0].close()

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()


def second_of(settings: Settings) -> Settings:
    data = settings.data.with_name("second")
    data.mkdir()
    return settings.model_copy(update={"data": data, "lost_after_s": 0.2})


@pytest.fixture
def hosts(settings: Settings) -> Iterator[Hosts]:
    found = Hosts(settings, second_of(settings))
    yield found
    found.close()


def take(api: Api) -> FakeWorker:
    worker = FakeWorker(api.redis)
    worker.take()
    return worker


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    barrier, answers = threading.Barrier(len(calls)), []

    def run(call: Callable[[], Any]) -> None:
        barrier.wait()
        answers.append(call())

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_what_one_host_records_wakes_a_request_that_waits_at_the_other(hosts: Hosts) -> None:
    job = hosts.second.submit()
    tag = hosts.second.http.get(f"/v1/jobs/{job['id']}").headers["ETag"]
    worker = take(hosts.first)
    answers: list[httpx.Response] = []
    # Longer than the client's patience: an answer in time comes of being woken.
    ask = threading.Thread(
        target=lambda: answers.append(
            hosts.second.http.get(
                f"/v1/jobs/{job['id']}", params={"wait": 60}, headers={"If-None-Match": tag}
            )
        )
    )
    ask.start()
    eventually(lambda: hosts.second.services.notifier.num_waiters)
    worker.say(job["id"], 1, EventType.SUCCEEDED, result())
    ask.join()
    assert [answer.json()["state"] for answer in answers] == ["succeeded"]


def test_events_are_recorded_once_and_in_their_order(hosts: Hosts) -> None:
    job = str(hosts.second.submit()["id"])
    worker = take(hosts.second)
    worker.say(job, 1, EventType.STARTED)
    for number in range(300):
        worker.say(job, 1, EventType.DELTA, {"output_index": 0, "text": str(number)})
    worker.say(job, 1, EventType.SUCCEEDED, result())
    hosts.second.wait_state(job, "succeeded")
    rows = hosts.second.services.jobs.events(job, 0, 1000)
    assert [row.seq for row in rows] == list(range(1, 304))
    assert [row.data["text"] for row in rows if row.type == EventType.DELTA] == [str(n) for n in range(300)]


def test_when_the_leader_ends_the_other_records_and_hands_out(hosts: Hosts) -> None:
    accepted = str(hosts.first.submit()["id"])
    hosts.second.redis.flushall()
    hosts.stop_first()
    eventually(lambda: hosts.second.queued())
    take(hosts.second).say(accepted, hosts.second.job(accepted)["attempt"], EventType.SUCCEEDED, result())
    hosts.second.wait_state(accepted, "succeeded")


def test_one_key_at_both_hosts_at_once_makes_one_job(hosts: Hosts) -> None:
    document = hosts.first.upload()

    def post(api: Api) -> httpx.Response:
        body = {"type": "summarize", "documents": [document], "max_output_tokens": 8}
        return httpx.post(f"{api.url}/v1/jobs", json=body, headers={"Idempotency-Key": "k"}, timeout=30)

    answers = at_once(*[lambda host=host: post(host) for host in (hosts.first, hosts.second) * 4])
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["id"] for answer in answers}) == 1


def test_a_limit_holds_over_both_hosts(hosts: Hosts) -> None:
    key = hosts.first.services.keys.create("team", ["submit", "read"], "", Limits(max_queued_jobs=3))[1]
    header = {"Authorization": f"Bearer {key}"}
    text = {"name": "a", "text": "b"}
    document = httpx.post(f"{hosts.first.url}/v1/documents", json=text, headers=header).json()["id"]
    body = {"type": "summarize", "documents": [document], "max_output_tokens": 8}

    def post(api: Api) -> int:
        return httpx.post(f"{api.url}/v1/jobs", json=body, headers=header, timeout=30).status_code

    codes = at_once(*[lambda host=host: post(host) for host in (hosts.first, hosts.second) * 6])
    assert sorted(codes) == [202] * 3 + [429] * 9


def test_the_same_document_at_both_hosts_at_once_is_kept_once(hosts: Hosts) -> None:
    made = at_once(*[host.upload for host in (hosts.first, hosts.second) * 4])
    assert len(set(made)) == 1


def test_a_database_that_is_killed_and_started_again_loses_no_job(
    tmp_path: Path, empty_database: Path, redis_url: str
) -> None:
    with start_postgres() as server:
        url = server.new_database()
        upgrade(make_url(url))
        settings = make_settings(tmp_path, empty_database, redis_url, database_url=url)
        found = Hosts(settings, second_of(settings))
        try:
            job = str(found.second.submit()["id"])
            worker = take(found.first)
            server.kill()
            assert found.second.http.get(f"/v1/jobs/{job}").status_code == 503
            worker.say(job, 1, EventType.SUCCEEDED, result())
            server.start()
            eventually(lambda: found.first.http.get(f"/v1/jobs/{job}").status_code == 200)
            found.first.wait_state(job, "succeeded")
        finally:
            found.close()
