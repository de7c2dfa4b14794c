"""Questions about many documents, put to two workers on two hosts: do they go where the documents' KV is?

    python -m bench.dispatch [--seconds 150] [--steal-after 5] [--json bench/results/dispatch.json]

API and Redis on one host, a worker on each of two others that joined it with `--join` and have nothing in
common but the network: network namespaces where root may make them (`hosts` in the report says). The model
is the needle model, so that an answer is known to be right. The load is mixed: short documents and long
ones, questions about each that come by and by, and eight at once about some. It is put twice, the second
time with a kill -9 of a busy worker after the middle, which comes back with its folder. Reported for each:

- hits: of the questions after the first about a document, those that found its KV with the worker that had it
- waits: the longest, and the longest during which another worker was idle; time in which the same document
  was being prefilled is no such wait
- taken: attempts that another worker took than the one they waited for, since they waited too long or it died
- right answers, jobs that did not end, and those that ended more than once

Prints two tables and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from redis import Redis
from redis.exceptions import RedisError

from bench.dispatch_report import Asked, report
from bench.hosts import Hosts, hosts
from bench.machine import ROOT, commit, cpu_name
from bench.needle import words
from bench.needle.documents import Document, Filler, is_right, make_document, make_facts
from cli.redis_server import find_program

NUM_WORKERS = 2
MODEL = "needle"
MODEL_FOLDER = ROOT / "bench" / "needle" / "model"
SIZES = [1024] * 8 + [2048] * 8 + [4096] * 5 + [8192] * 2 + [16_384]
"""Tokens of each document."""
NUM_QUESTIONS = 6
NUM_AT_ONCE = 8
PATIENCE_S = 300.0
BACK_AFTER_S = 10.0


@dataclass
class Stack:
    """What runs, and where."""

    folder: Path
    where: Hosts
    steal_after_s: float
    port: int = 8321
    redis_port: int = 6399

    def __post_init__(self) -> None:
        self._password = secrets.token_hex(16)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        models = self.folder / "models"
        models.mkdir()
        shutil.copytree(MODEL_FOLDER, models / MODEL)
        self._env = {
            **{k: v for k, v in os.environ.items() if not k.startswith("LONGLEAF_")},
            "PYTHONPATH": str(ROOT),
            "LONGLEAF_MODELS": str(models),
            "LONGLEAF_DATA": str(self.folder / "api"),
            "LONGLEAF_MODEL": MODEL,
            "LONGLEAF_HOST": "0.0.0.0" if self.where.names else "127.0.0.1",
            "LONGLEAF_PORT": str(self.port),
            "LONGLEAF_REQUIRE_KEY": "1",
            "REDIS_URL": f"redis://:{self._password}@127.0.0.1:{self.redis_port}/0",
        }
        self.key = self._make_key("admin")
        self.token = self._make_key("worker")

    @property
    def redis_url(self) -> str:
        return self._env["REDIS_URL"]

    def start(self) -> None:
        redis = [find_program(self.folder), "--port", str(self.redis_port), "--requirepass", self._password]
        redis += ["--bind", "0.0.0.0" if self.where.names else "127.0.0.1", "--dir", str(self.folder)]
        self._start("redis", [*redis, "--save", "", "--maxmemory-policy", "noeviction"], self._env)
        self._start("api", [sys.executable, "-m", "api"], self._env)
        for number in range(NUM_WORKERS):
            self.start_worker(number)

    def start_worker(self, number: int) -> None:
        hub = self.where.hub_seen_from(number)
        env = {
            **{k: v for k, v in self._env.items() if k != "LONGLEAF_MODEL"},
            "LONGLEAF_DATA": str(self.folder / f"worker-{number}"),
            "LONGLEAF_API": f"http://{hub}:{self.port}",
            "LONGLEAF_WORKER_TOKEN": self.token,
            "LONGLEAF_STEAL_AFTER_S": str(self.steal_after_s),
            "REDIS_URL": self.redis_url.replace("127.0.0.1", hub),
        }
        join = self.where.on_spoke(number, sys.executable, "-m", "worker", "--join")
        wait_for_service(self)
        self._start(f"worker-{number}", join, env)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGTERM)
            process.wait(60)

    def _start(self, name: str, command: list[str], env: dict[str, str]) -> None:
        # In the folder of models `needle` is the path of one, for a worker.
        cwd = self.folder / "models"
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=cwd)

    def _make_key(self, scope: str) -> str:
        words = [sys.executable, "-m", "api.key_command", "create", "--scope", scope]
        done = subprocess.run(words, env=self._env, capture_output=True, text=True, check=True)
        return done.stdout.strip()


@contextmanager
def running(where: Hosts, steal_after_s: float) -> Iterator[tuple[Stack, httpx.Client]]:
    """Everything started, with both workers idle."""
    with tempfile.TemporaryDirectory(prefix="longleaf-dispatch-", ignore_cleanup_errors=True) as name:
        stack = Stack(Path(name), where, steal_after_s)
        try:
            stack.start()
            headers = {"Authorization": f"Bearer {stack.key}"}
            with httpx.Client(
                base_url=f"http://127.0.0.1:{stack.port}", headers=headers, timeout=60
            ) as client:
                wait_until(lambda: num_idle(client) == NUM_WORKERS, stack)
                yield stack, client
        finally:
            stack.close()


def wait_for_service(stack: Stack) -> None:
    def answers() -> bool:
        try:
            Redis.from_url(stack.redis_url).ping()
            return httpx.get(f"http://127.0.0.1:{stack.port}/health/live").status_code == 200
        except (RedisError, httpx.TransportError):
            return False

    wait_until(answers, stack)


def wait_until(condition: Any, stack: Stack) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline or any(p.poll() is not None for p in stack.processes.values()):
            raise SystemExit("\n".join(path.read_text() for path in stack.folder.glob("*.log")))
        time.sleep(0.1)


def is_busy(stack: Stack, client: httpx.Client, name: str) -> bool:
    pid = stack.processes[name].pid
    return any(w["pid"] == pid and w["state"] == "busy" for w in client.get("/v1/workers").json())


def num_idle(client: httpx.Client) -> int:
    return sum(worker["state"] == "idle" for worker in client.get("/v1/workers").json())


def make_documents(rng: np.random.Generator) -> list[Document]:
    filler = Filler(rng, 30_000)
    return [make_document(rng, filler, size, make_facts(rng, NUM_AT_ONCE)) for size in SIZES]


def schedule(rng: np.random.Generator, seconds: float) -> list[tuple[float, int, int]]:
    """(seconds from the start, document, question), in the order of time."""
    load = []
    for document in range(len(SIZES)):
        at = rng.uniform(0, seconds * 0.6)
        if document % 6 == 0:  # eight questions at once
            load += [(at, document, question) for question in range(NUM_AT_ONCE)]
            continue
        for question in range(NUM_QUESTIONS):
            load.append((at, document, question))
            at += rng.exponential(seconds / 15)
    return sorted(load)


def put(
    stack: Stack, client: httpx.Client, documents: list[Document], seconds: float, kill: bool
) -> list[Asked]:
    """Put the load and wait for every end; with `kill` a worker dies at its work and comes back."""
    ids = []
    for number, document in enumerate(documents):
        body = {"text": words.text(document.ids), "name": f"{number}.txt"}
        ids.append(client.post("/v1/documents", json=body).raise_for_status().json()["id"])
    began, is_killed, back_at = time.monotonic(), False, float("inf")
    jobs = []
    for at, number, question in schedule(np.random.default_rng(2), seconds):
        while (now := time.monotonic() - began) < at:
            time.sleep(min(0.05, at - now))
            if kill and not is_killed and now > seconds / 2 and is_busy(stack, client, "worker-1"):
                stack.kill("worker-1")
                is_killed, back_at = True, now + BACK_AFTER_S
        if now > back_at:
            stack.start_worker(1)
            back_at = float("inf")
        asked = documents[number].questions[question]
        spec = {"type": "ask", "documents": [ids[number]], "questions": [words.text(asked.ids)]}
        job = client.post("/v1/jobs", json=spec | {"max_output_tokens": 32}).raise_for_status().json()
        jobs.append((job["id"], number, asked))
    found = []
    for job_id, number, asked in jobs:
        deadline = time.monotonic() + PATIENCE_S
        while client.get(f"/v1/jobs/{job_id}").json()["state"] in ("queued", "running"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        answer = client.get(f"/v1/jobs/{job_id}/result")
        result = answer.json() if answer.status_code == 200 else None
        found.append(
            Asked(
                job_id,
                number,
                result["usage"]["cached_tokens"] if result else 0,
                result["usage"]["prompt_tokens"] if result else 0,
                bool(result and is_right(asked, result["outputs"][0]["text"])),
            )
        )
    return found


def events(stack: Stack) -> list[tuple[str, str, int, float, dict[str, Any]]]:
    """(job, type, attempt, time, data) of all that was recorded, in the order in which it was."""
    with closing(sqlite3.connect(stack.folder / "api" / "longleaf.db")) as database:
        rows = database.execute("SELECT job_id, type, attempt, at, data FROM job_events ORDER BY at, seq")
        return [(*row[:4], json.loads(row[4])) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="in which the load is put")
    parser.add_argument("--steal-after", type=float, default=5.0, help="LONGLEAF_STEAL_AFTER_S")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    documents = make_documents(np.random.default_rng(1))
    runs, kind = {}, ""
    for name in ("undisturbed", "a worker killed"):
        with hosts(NUM_WORKERS) as where, running(where, options.steal_after) as (stack, client):
            kind = where.kind
            kill = name == "a worker killed"
            asked = put(stack, client, documents, options.seconds, kill)
            logs = "".join(path.read_text() for path in stack.folder.glob("worker-*.log"))
            runs[name] = report(asked, events(stack), logs, options.steal_after, kill)
    for name, found in runs.items():
        print(f"\n{name}, on {kind}")
        for key, value in found.items():
            print(f"  {key:<32} {value}")
    line = json.dumps(
        {
            "bench": "dispatch",
            "hosts": kind,
            "engine": "real: the needle model on the CPU",
            "num_workers": NUM_WORKERS,
            "steal_after_s": options.steal_after,
            "seconds": options.seconds,
            "document_tokens": SIZES,
            "machine": cpu_name(),
            "num_cpus": os.cpu_count(),
            "load_average": round(os.getloadavg()[0], 1),
            "python": platform.python_version(),
            "commit": commit(),
            "runs": runs,
        }
    )
    print(line)
    if options.json:
        options.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
