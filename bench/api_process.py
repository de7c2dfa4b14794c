"""A real API process on a Redis-compatible server of its own, with a stand-in for a worker."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis import Redis

from cli.redis_server import command, find_program, place_socket
from jobs import (
    EVENT_STREAM,
    Event,
    EventType,
    ModelCard,
    Output,
    Result,
    Timing,
    Usage,
    WorkerStatus,
    queue_name,
    worker_key,
)

ROOT = Path(__file__).parents[1]
MODEL = "tiny"
MODEL_FOLDER = ROOT / "bench" / "needle" / "model"
"""Whose tokens the API counts."""


@dataclass(frozen=True)
class Service:
    url: str
    log: Path
    api: subprocess.Popen[bytes]
    redis: Path
    """Its socket."""


@contextmanager
def running(folder: Path, ends_jobs: bool = True) -> Iterator[Service]:
    """Redis and an API below `folder`; with `ends_jobs` each job ends as soon as it is queued."""
    redis_folder, log = folder / "redis", folder / "api.log"
    redis_folder.mkdir()
    (folder / "models").mkdir()
    (folder / "models" / MODEL).symlink_to(MODEL_FOLDER)
    path = place_socket(redis_folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {
        **os.environ,
        "LONGLEAF_DATA": str(folder / "data"),
        "LONGLEAF_MODELS": str(folder / "models"),
        "LONGLEAF_MODEL": MODEL,
        "LONGLEAF_PORT": str(port),
        "REDIS_URL": f"unix://{path}",
        "LOG_FORMAT": "json",
        # The stand-in shows no job as its own, which must not look like a loss.
        "LONGLEAF_GONE_AFTER_S": "3600",
        "LONGLEAF_LOST_AFTER_S": "3600",
        "PYTHONPATH": str(ROOT),
    }
    redis = subprocess.Popen(
        command(find_program(redis_folder), redis_folder, path), stdout=subprocess.DEVNULL
    )
    with log.open("wb") as file:
        api = subprocess.Popen([sys.executable, "-m", "api"], env=env, stderr=file, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if api.poll() is not None:
                raise SystemExit(log.read_text())
            try:
                httpx.get(f"{url}/health/live")
                break
            except httpx.TransportError:
                time.sleep(0.1)
        show_worker(path)
        ended = threading.Event()
        worker = threading.Thread(target=work, args=(path, ended))
        if ends_jobs:
            worker.start()
        try:
            yield Service(url, log, api, path)
        finally:
            ended.set()
            if ends_jobs:
                worker.join()
    finally:
        for process in (api, redis):
            process.terminate()
            process.wait(30)
        if path.parent != redis_folder:
            shutil.rmtree(path.parent, ignore_errors=True)


def make_key(folder: Path) -> str:
    """A key that may do everything: without one each request would come with a random one."""
    env = {**os.environ, "LONGLEAF_DATA": str(folder / "data"), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "api.key_command", "create", "--scope", "admin"]
    return subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()


def show_worker(path: Path) -> None:
    """An idle worker's presence, which lasts."""
    card = ModelCard(
        id=MODEL,
        architecture="llama",
        context_tokens=8192,
        num_layers=1,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=64,
        kv_format="int4c",
        kv_bytes_per_token=72.0,
        weights_bytes=1,
        fingerprint="f",
        device="cpu",
    )
    status = WorkerStatus(
        name="w", pid=1, host="here", state="idle", model=MODEL, card=card, started_at=0.0, lease_s=3600.0
    )
    with Redis(unix_socket_path=str(path)) as client:
        client.set(worker_key("w"), status.model_dump_json())


def work(path: Path, ended: threading.Event) -> None:
    """End every job as soon as it is queued."""
    with Redis(unix_socket_path=str(path)) as client:
        while not ended.is_set():
            taken = client.blpop([f"rq:queue:{queue_name(MODEL)}"], timeout=1)
            if taken is None:
                continue
            job_id, _, attempt = taken[1].decode().rpartition("-")
            say(client, job_id, EventType.SUCCEEDED, result(), int(attempt))


def result() -> dict[str, Any]:
    """What a job found, as small as it can be."""
    usage = Usage(prompt_tokens=1, prefilled_tokens=1, output_tokens=1)
    output = Output(text="Yes.", finish_reason="stop", usage=usage, timing=Timing(), prefix="none")
    found = Result(type="ask", model=MODEL, outputs=[output], usage=usage, timing=Timing())
    return found.model_dump(mode="json")


def say(client: Redis, job_id: str, kind: EventType, data: dict[str, Any], attempt: int = 1) -> None:
    """An event as a worker reports it."""
    event = Event(job_id=job_id, attempt=attempt, type=kind, worker="w", at=0.0, data=data)
    client.xadd(EVENT_STREAM, {"event": event.model_dump_json()})
