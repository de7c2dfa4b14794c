"""Several workers at one API: one prefill for many questions, and nothing lost or doubled whoever dies.

The parents, the API and Redis are real; but for the last test, the engines only count what they have read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from api.settings import Settings
from cli import Client
from jobs import Ask, State, WorkerStatus, worker_key
from jobs.dispatch import own_key
from tests.api.api_rig import Api, eventually, running
from tests.e2e.stack import MODEL as REAL_MODEL
from tests.e2e.stack import REPORT, end, environment, free_port, start, wait_until
from tests.worker.rig import ROOT, open_gate

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = "fake"
PATIENCE_S = 60.0


class Fleet:
    """Worker parents with fake children, each with a data folder of its own."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self.started: list[subprocess.Popen[bytes]] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, redis: Redis, folder: str) -> str:
        """Start a worker and return its name when it is idle."""
        known = set(redis.scan_iter("longleaf:worker:*"))
        process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "worker" / "fake_worker.py")],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "LONGLEAF_DATA": str(self._folder / folder),
                "LONGLEAF_MODELS": str(self._folder / "models"),
                "LONGLEAF_MODEL": MODEL,
                "LONGLEAF_API": f"http://127.0.0.1:{self._settings.port}",
                "REDIS_URL": self._settings.redis_url,
            },
        )

        def name() -> str | None:
            for key in set(redis.scan_iter("longleaf:worker:*")) - known:
                value: Any = redis.get(key)
                status = WorkerStatus.model_validate_json(value) if value else None
                if status is not None and status.pid == process.pid and status.state == "idle":
                    return status.name
            return None

        self.started.append(process)
        found = str(eventually(name, PATIENCE_S))
        self.processes[found] = process
        return found

    def kill(self, redis: Redis, name: str) -> None:
        """kill -9, and the end of its presence as if that had run out."""
        process = self.processes[name]
        process.kill()
        process.wait()
        redis.delete(worker_key(name))

    def gate(self, name: str) -> Path:
        path = self._folder / name
        os.mkfifo(path)
        return path

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> Settings:
    return Settings(
        data=tmp_path / "api",
        models=tmp_path / "models",
        model=MODEL,
        port=free_port(),
        redis_url=redis_url,
        reconcile_s=0.05,
        lost_after_s=1.0,
        gone_after_s=0.5,
    )


@pytest.fixture
def fleet(tmp_path: Path, settings: Settings) -> Iterator[Fleet]:
    found = Fleet(tmp_path, settings)
    yield found
    found.close()


@pytest.fixture
def api(settings: Settings) -> Iterator[Api]:
    with running(settings) as found:
        yield found


def document(api: Api, name: str) -> str:
    return api.upload(f"{name} " * 100, f"{name}.txt")


def submit(api: Api, document_id: str, *steps: list[Any]) -> str:
    return str(api.submit(document_id, type="prompt", instruction=json.dumps([*steps, ["end"]]))["id"])


def ends(api: Api, *jobs: str) -> list[tuple[str, bool, int]]:
    """Of each job its worker, whether it found its document read, and how often it succeeded."""
    found = []
    for job_id in jobs:
        job = api.wait_state(job_id, "succeeded", "failed")
        assert job["state"] == "succeeded", job
        events = api.services.jobs.events(job_id, 0, 1000)
        num_ends = sum(event.type == "job.succeeded" for event in events)
        worker = [event.data["worker"] for event in events if event.type == "job.started"][-1]
        usage = api.http.get(f"/v1/jobs/{job_id}/result").json()["usage"]
        found.append((worker, usage["cached_tokens"] == usage["prompt_tokens"], num_ends))
    return found


def test_eight_questions_that_come_together_cost_one_prefill(api: Api, fleet: Fleet) -> None:
    workers = {fleet.start(api.redis, name) for name in ("one", "two")}
    jobs = [submit(api, document(api, "a")) for _ in range(8)]
    found = ends(api, *jobs)
    assert sorted(was_cached for _, was_cached, _ in found) == [False] + [True] * 7
    assert len({worker for worker, _, _ in found} & workers) == 1


def test_two_documents_are_read_by_two_workers_and_asked_where_they_are(api: Api, fleet: Fleet) -> None:
    for name in ("one", "two"):
        fleet.start(api.redis, name)
    gates = {name: fleet.gate(name) for name in "ab"}
    first = {name: submit(api, document(api, name), ["gate", str(gate)]) for name, gate in gates.items()}
    for job_id in first.values():
        api.wait_state(job_id, "running")
    later = {name: [submit(api, document(api, name)) for _ in range(3)] for name in "ab"}
    for gate in gates.values():
        open_gate(gate)
    whose = {name: ends(api, first[name])[0][0] for name in "ab"}
    assert whose["a"] != whose["b"]
    for name in "ab":
        assert ends(api, *later[name]) == [(whose[name], True, 1)] * 3


def test_what_a_killed_worker_had_and_had_waiting_is_done_once_by_another(api: Api, fleet: Fleet) -> None:
    one = fleet.start(api.redis, "one")
    gate = fleet.gate("gate")
    begun = submit(api, document(api, "a"), ["gate", str(gate)])
    api.wait_state(begun, "running")
    waiting = [submit(api, document(api, "a")) for _ in range(3)]
    assert api.redis.llen(own_key(MODEL, one)) == 3
    two = fleet.start(api.redis, "two")
    fleet.kill(api.redis, one)
    api.wait_state(begun, "queued")
    open_gate(gate)  # for the second attempt
    found = ends(api, begun, *waiting)
    assert {(worker, num_ends) for worker, _, num_ends in found} == {(two, 1)}
    assert sum(not was_cached for _, was_cached, _ in found) == 1
    assert [api.job(job_id)["attempt"] for job_id in (begun, *waiting)] == [2, 1, 1, 1]


def test_a_flushed_redis_loses_nothing_and_doubles_nothing(api: Api, fleet: Fleet) -> None:
    workers = [fleet.start(api.redis, name) for name in ("one", "two")]
    gates = {name: fleet.gate(name) for name in "ab"}
    begun = {name: submit(api, document(api, name), ["gate", str(gate)]) for name, gate in gates.items()}
    for job_id in begun.values():
        api.wait_state(job_id, "running")
    waiting = {name: [submit(api, document(api, name)) for _ in range(2)] for name in "ab"}
    assert sum(api.redis.llen(own_key(MODEL, worker)) for worker in workers) == 4
    api.redis.flushall()
    for gate in gates.values():
        open_gate(gate)
    for name in "ab":
        ((whose, _, _),) = ends(api, begun[name])
        assert ends(api, *waiting[name]) == [(whose, True, 1)] * 2


def test_an_api_that_starts_again_finds_who_holds_what(settings: Settings, fleet: Fleet) -> None:
    with running(settings) as api:
        workers = [fleet.start(api.redis, name) for name in ("one", "two")]
        gate = fleet.gate("gate")
        begun = submit(api, document(api, "a"), ["gate", str(gate)])
        api.wait_state(begun, "running")
        waiting = [submit(api, document(api, "a")) for _ in range(2)]
    with running(settings) as api:
        open_gate(gate)
        ((whose, _, _),) = ends(api, begun)
        assert ends(api, *waiting) == [(whose, True, 1)] * 2
        api.redis.delete(*api.redis.scan_iter("longleaf:holders:*"))
        eventually(lambda: all(api.redis.exists(worker_key(name)) for name in workers), PATIENCE_S)
        assert ends(api, submit(api, document(api, "a"))) == [(whose, True, 1)]


class RealStack:
    """An API and workers of the small model, each worker with a data folder of its own."""

    def __init__(self, folder: Path, redis_url: str, num_workers: int) -> None:
        port = free_port()
        env = {"REDIS_URL": redis_url}
        self.log = folder / "log"
        self.client = Client(f"http://127.0.0.1:{port}")
        self.processes = [start(self.log, environment(folder / "api", port, **env), "api")]
        for number in range(num_workers):
            data = folder / f"worker-{number}"
            self.processes.append(start(self.log, environment(data, port, **env), "worker"))

    def close(self) -> None:
        self.client.close()
        end(*self.processes[::-1])


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_eight_identical_questions_cost_one_real_prefill(
    tmp_path: Path, redis_url: str, num_workers: int
) -> None:
    pulled = subprocess.run(
        [sys.executable, "-m", "worker.models", "pull", REAL_MODEL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert pulled.returncode == 0, pulled.stderr
    stack = RealStack(tmp_path, redis_url, num_workers)
    try:
        client = stack.client
        wait_until(lambda: client.not_ready() is None)
        with Redis.from_url(redis_url) as redis:
            wait_until(lambda: num_idle(redis) == num_workers)
        path = tmp_path / "report.md"
        path.write_text(REPORT)
        document_id = client.upload(path).id
        spec = Ask(documents=[document_id], questions=["Who built the stations?"], max_output_tokens=8)
        jobs = [client.submit(spec).id for _ in range(8)]
        assert {client.wait(job_id).state for job_id in jobs} == {State.SUCCEEDED}
        results = [client.result(job_id) for job_id in jobs]
        cached = [result.usage.cached_tokens for result in results]
        assert sorted(tokens > 0 for tokens in cached) == [False] + [True] * 7
        assert len(set(cached)) == 2
        assert len({result.outputs[0].text for result in results}) == 1
    finally:
        stack.close()


def num_idle(redis: Redis) -> int:
    values: list[Any] = [redis.get(key) for key in redis.scan_iter("longleaf:worker:*")]
    return sum(WorkerStatus.model_validate_json(value).state == "idle" for value in values if value)
