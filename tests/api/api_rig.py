"""A running API (uvicorn in a thread, real SQLite, real Redis) and a worker's side of the wire."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
from rq import Queue
from rq.serializers import JSONSerializer
from sqlalchemy import update
from tokenizers import Tokenizer, models, pre_tokenizers

from api.__main__ import Server, make_server
from api.models import Job
from api.services import Services
from api.settings import Settings
from jobs import (
    EVENT_STREAM,
    Control,
    Event,
    EventType,
    ModelCard,
    Output,
    Result,
    RunRequest,
    Timing,
    Usage,
    WorkerStatus,
    control_key,
    queue_name,
    worker_key,
)
from jobs.dispatch import own_key
from jobs.listening import listen
from jobs.loopback import in_url
from jobs.prefixes import HeldPrefix, Holdings, holdings_key
from worker.attempts import Attempts

MODEL = "tiny"
FRAME_TOKENS = 17
"""What the template of `write_model_folder` puts around a prompt, the system's words included."""
ASK_TOKENS = 9
"""What is said to the model around a question."""
CONTEXT = 50 + FRAME_TOKENS + ASK_TOKENS


@dataclass
class Api:
    """The running service as a client, with its insides for what HTTP does not show."""

    http: httpx.Client
    services: Services
    server: Server
    redis: redis.Redis

    @property
    def url(self) -> str:
        return str(self.http.base_url).rstrip("/")

    def upload(self, text: str = "One two three.", name: str = "a.txt") -> str:
        answer = self.http.post("/v1/documents", files={"file": (name, text.encode())})
        assert answer.status_code in (200, 201), answer.text
        return str(answer.json()["id"])

    def submit(self, document: str | None = None, **spec: Any) -> dict[str, Any]:
        body = {"type": "summarize", "documents": [document or self.upload()], "max_output_tokens": 8} | spec
        answer = self.http.post("/v1/jobs", json=body)
        assert answer.status_code == 202, answer.text
        return dict(answer.json())

    def job(self, job_id: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/jobs/{job_id}").json())

    def wait_state(self, job_id: str, *states: str) -> dict[str, Any]:
        """The job once it is in one of the states, by long poll."""
        tag = None
        for _ in range(20):
            headers = {"If-None-Match": tag} if tag else {}
            wait = {"wait": 5 if tag else 0}
            answer = self.http.get(f"/v1/jobs/{job_id}", params=wait, headers=headers)
            if answer.status_code == 304:
                continue
            if answer.json()["state"] in states:
                return dict(answer.json())
            tag = answer.headers["ETag"]
        raise AssertionError(f"{job_id} is {self.job(job_id)['state']}, not {states}")

    def queued(self, model: str = MODEL) -> list[str]:
        return self.queue(model).get_job_ids()

    def waiting_for(self, worker: str) -> list[str]:
        """The jobs in the own queue of a worker, the next one first."""
        ids = self.redis.lrange(own_key(MODEL, worker), 0, -1)
        return [name.decode().rpartition("-")[0] for name in ids]

    def queue(self, model: str = MODEL) -> Queue:
        return Queue(queue_name(model), connection=self.redis, serializer=JSONSerializer)

    def end_pause(self, job_id: str) -> None:
        """Let the time of a job's pause be over; what hands it out then is the reconciler."""
        with self.services.database.write() as session:
            session.execute(update(Job).where(Job.id == job_id).values(not_before=0.0))

    def control(self, job_id: str) -> Control | None:
        value = self.redis.get(control_key(job_id))
        return Control.model_validate_json(value) if value else None


@dataclass
class FakeWorker:
    """What a worker puts into Redis, word by word."""

    redis: redis.Redis
    name: str = "w1"
    entry_ids: list[str] = field(default_factory=list)

    def be_there(self, job_id: str | None = None, attempt: int | None = None, **changes: Any) -> None:
        status = WorkerStatus(
            name=self.name,
            pid=1,
            host="here",
            state="busy" if job_id else "idle",
            model=MODEL,
            card=card(),
            job_id=job_id,
            attempt=attempt,
            started_at=0,
            lease_s=15,
        ).model_copy(update=changes)
        self.redis.set(worker_key(self.name), status.model_dump_json())

    def hold(self, *prefixes: HeldPrefix) -> None:
        holdings = Holdings(worker=self.name, prefixes=list(prefixes))
        self.redis.set(holdings_key(self.name), holdings.model_dump_json(), ex=60)

    def go(self) -> None:
        self.redis.delete(worker_key(self.name))

    def take(self, model: str = MODEL) -> RunRequest:
        """Pop the next job as RQ does."""
        queue = Queue(queue_name(model), connection=self.redis, serializer=JSONSerializer)
        rq_id = queue.pop_job_id()
        assert rq_id is not None
        job = queue.fetch_job(rq_id)
        assert job is not None
        return RunRequest.model_validate(job.kwargs["request"])

    def next(self, patience_s: float = 20.0) -> str | None:
        """The job that a worker's own code takes next; None where there is none for it."""
        rq_id = Attempts(self.redis, MODEL, self.name, patience_s).take()
        return rq_id.rpartition("-")[0] if rq_id else None

    def say(self, job_id: str, attempt: int, kind: EventType, data: dict[str, Any] | None = None) -> str:
        event = Event(job_id=job_id, attempt=attempt, type=kind, worker=self.name, at=0.0, data=data or {})
        return self.say_raw({"event": event.model_dump_json()})

    def say_raw(self, fields: dict[str, str | bytes]) -> str:
        entry_id = self.redis.xadd(EVENT_STREAM, fields)
        self.entry_ids.append(entry_id.decode())
        return self.entry_ids[-1]


def card(context_tokens: int = CONTEXT) -> ModelCard:
    return ModelCard(
        id=MODEL,
        architecture="llama",
        context_tokens=context_tokens,
        num_layers=1,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=64,
        kv_format="int4c",
        kv_bytes_per_token=1.0,
        weights_bytes=1,
        fingerprint="f",
        device="cpu",
    )


def held(prefix_id: str, owner: str = "", **changes: Any) -> HeldPrefix:
    return HeldPrefix(
        id=prefix_id,
        model=MODEL,
        owner=owner,
        num_tokens=320,
        disk_bytes=16384,
        own_bytes=8192,
        prefill_s=1.5,
        used_at=1.0,
        pinned=False,
    ).model_copy(update=changes)


def output(index: int, text: str = "An answer.", question: str | None = None) -> dict[str, Any]:
    usage = Usage(prompt_tokens=5, prefilled_tokens=5, output_tokens=2)
    timing = Timing(decode_s=0.5, time_to_first_token_s=0.1 + index)
    made = Output(
        index=index, text=text, question=question, finish_reason="stop", usage=usage, timing=timing,
        prefix="none",
    )  # fmt: skip
    return made.model_dump(mode="json")


def result(text: str = "An answer.") -> dict[str, Any]:
    usage = Usage(prompt_tokens=5, prefilled_tokens=5, output_tokens=2)
    output = Output(text=text, finish_reason="stop", usage=usage, timing=Timing(), prefix="none")
    return Result.of("summarize", MODEL, [output], 1).model_dump(mode="json")


def progress(num_done: int) -> dict[str, Any]:
    return {
        "phase": "prefill",
        "num_done": num_done,
        "num_total": 10,
        "tokens_per_s": 2.0,
        "eta_s": 1.0,
        "cached_tokens": 0,
    }


def write_model_folder(root: Path, model: str = MODEL, context: int = CONTEXT) -> Path:
    """A model folder as the API sees one: a config, a tokenizer of one token per word, and a template."""
    folder = root / model.replace("/", "--")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def make_settings(folder: Path, empty_database: Path, redis_url: str, **changes: Any) -> Settings:
    data = folder / "data %20? #1 é"
    data.mkdir()
    shutil.copy(empty_database, data / "longleaf.db")
    write_model_folder(folder / "models")
    return Settings(
        data=data,
        models=folder / "models",
        model=MODEL,
        port=0,
        redis_url=redis_url,
        max_upload_bytes=200_000,
        reconcile_s=0.05,
    ).model_copy(update=changes)


def eventually(check: Callable[[], Any], limit_s: float = 10.0) -> Any:
    """The first true answer of `check`; for effects that announce themselves nowhere."""
    deadline = time.monotonic() + limit_s
    while not (answer := check()):
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
    return answer


@contextmanager
def running(settings: Settings) -> Iterator[Api]:
    sockets = listen(settings.host, settings.port)
    server = make_server(settings)
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets}, daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert server.started, "the API did not start"
        host, port = sockets[0].getsockname()[:2]
        base = f"http://{in_url(host)}:{port}"
        with (
            httpx.Client(base_url=base, timeout=30) as client,
            redis.Redis.from_url(settings.redis_url) as db,
        ):
            yield Api(client, server._longleaf.state.services, server, db)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive(), "the API did not stop"
