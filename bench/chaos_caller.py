"""The caller of a chaos run: what it asks, and how it submits each job once through any outage.

It knows HTTP alone, as any client does.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from bench.chaos_stack import WORKERS
from bench.needle import words
from bench.needle.documents import Document, Filler, Question, make_document, make_facts


@dataclass(frozen=True)
class Asked:
    """A job as its caller knows it."""

    name: str
    document: str
    questions: list[Question]


def make_jobs(seed: int, num_jobs: int, sizes: tuple[int, ...]) -> list[Asked]:
    """Jobs with one to four questions, about two to a document of one of the sizes."""
    rng = np.random.default_rng(seed)
    filler = Filler(rng, 4000)
    documents: list[Document] = [
        make_document(
            rng, filler, int(rng.choice(sizes)), make_facts(rng, num_codes=10, num_lists=2, num_hops=2)
        )
        for _ in range(max(1, num_jobs // 2))
    ]
    texts = [words.text(document.ids) for document in documents]
    found = []
    for number in range(num_jobs):
        which = int(rng.integers(len(documents)))
        chosen = rng.choice(len(documents[which].questions), int(rng.integers(1, 5)), replace=False)
        questions = [documents[which].questions[i] for i in chosen]
        found.append(Asked(f"job-{number:03}", texts[which], questions))
    return found


class Caller:
    """Submits jobs one after another in a thread, through any outage, each once."""

    def __init__(self, url: str) -> None:
        self.accepted: dict[str, str] = {}
        self.num_tries = 0
        self.num_retried = 0
        self._http = httpx.Client(base_url=url, timeout=5.0)
        self._asked: queue.Queue[Asked] = queue.Queue()
        self._lock = threading.Lock()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, asked: Asked) -> None:
        self._asked.put(asked)

    def is_done(self) -> bool:
        """Whether all jobs are accepted and have ended; failed ones are retried."""
        if self._asked.unfinished_tasks:
            return False
        try:
            if any(self._ids(state) for state in ("queued", "running", "cancelling")):
                return False
            failed = self._ids("failed")
            for job_id in failed:
                self.num_retried += self._call("POST", f"/v1/jobs/{job_id}/retry").status_code == 202
            return not failed
        except httpx.HTTPError:
            return False

    def is_ready(self) -> bool:
        """Whether the service says that it is, with both workers there."""
        try:
            self._call("GET", "/health/ready")
            workers = self._call("GET", "/v1/workers").json()
        except httpx.HTTPError:
            return False
        return sum(worker["state"] in ("idle", "busy") for worker in workers) == len(WORKERS)

    def _ids(self, state: str) -> list[str]:
        jobs = self._call("GET", "/v1/jobs", params={"state": state, "limit": 100}).json()["data"]
        return [job["id"] for job in jobs]

    def _run(self) -> None:
        while True:
            asked = self._asked.get()
            self.accepted[asked.name] = self._accepted(asked)
            self._asked.task_done()

    def _accepted(self, asked: Asked) -> str:
        while True:
            self.num_tries += 1
            try:
                found = self._call("POST", "/v1/documents", json={"name": "report", "text": asked.document})
                body = {
                    "type": "ask",
                    "documents": [found.json()["id"]],
                    "questions": [words.text(question.ids) for question in asked.questions],
                    "max_output_tokens": 48,
                }
                headers = {"Idempotency-Key": asked.name}
                return str(self._call("POST", "/v1/jobs", json=body, headers=headers).json()["id"])
            except httpx.HTTPError as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                    raise
                time.sleep(0.2)

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        with self._lock:
            answer = self._http.request(method, path, **options)
        answer.raise_for_status()
        return answer
