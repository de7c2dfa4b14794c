"""A typed client of the HTTP API: `with Client("http://127.0.0.1:8321") as client: ...`."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, ConfigDict, Field

from jobs import TERMINAL, EventType, JobSpec, Problem, Progress, Result, State
from jobs.settings import SettingsError, without_password
from jobs.transport import Proxy, http_client, in_words, proxy_for

SILENCE_S = 40.0
"""An event stream says something every 15 s; after this long it is taken to be held up on its way."""
OUTAGE_S = 30.0
"""How long an API that went away while a job is followed is waited for."""
POLL_WAIT_S = 20


class ApiError(Exception):
    """Base of what a call can raise."""


class Unreachable(ApiError):
    """No answer from the API; `way` is the proxy through which it was asked."""

    def __init__(self, url: str, why: str, way: Proxy | None = None) -> None:
        through = f" through {way}" if way else ""
        mend = (
            "start it with `longleaf up`, or set LONGLEAF_API to where it runs"
            if way is None
            else f"check LONGLEAF_API, or name {urlsplit(url).hostname} in no_proxy to ask it directly"
        )
        super().__init__(f"cannot reach Longleaf at {without_password(url)}{through} ({why}); {mend}")


class Refused(ApiError):
    """The API's own refusal, a problem+json; the message is its detail."""

    def __init__(self, status: int, code: str, detail: str, body: dict[str, Any]) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.body = body


class DocumentWarning(BaseModel):
    """What a document's reader would see and its text has not."""

    code: str
    detail: str


class Document(BaseModel):
    model_config = ConfigDict(protected_namespaces=())

    id: str
    name: str
    media_type: str
    num_bytes: int
    num_chars: int
    num_pages: int | None = None
    num_tokens: dict[str, int | None] = Field(default_factory=dict)
    """By model id, where the API knows the model's tokenizer."""
    warnings: list[DocumentWarning] | None = None


class Job(BaseModel):
    id: str
    type: str
    state: State
    model: str
    attempt: int
    progress: Progress | None = None
    num_outputs: int = 0
    num_done: int = 0
    """Answers that are complete; they are the result of a job that ends early."""
    num_failures: int = 0
    error: Problem | None = None
    spec: dict[str, Any] = Field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL


class Page(BaseModel):
    """A part of a list, as the API writes its items; `next` is the `after` of the part that follows."""

    data: list[dict[str, Any]]
    has_more: bool = False
    next: str | None = None


class WebhookSecret(BaseModel):
    """What signs the callbacks of the key's tenant."""

    secret: str
    old_until: str | None
    """Until when the secret before signs too."""


@dataclass(frozen=True)
class JobEvent:
    """One event of a job; `seq` is None where it was read off a long poll."""

    type: EventType
    data: dict[str, Any]
    seq: int | None = None


class _NoStream(Exception):
    """The event stream cannot be used from here."""


class Client:
    def __init__(self, url: str, timeout_s: float = 30.0, key: str | None = None) -> None:
        """`key` is an API key, from `longleaf keys create`; None where the API asks for none.

        Raises SettingsError for what can be no key, and for a proxy of the environment or certificates that
        cannot be used.
        """
        self.url = url.rstrip("/")
        self._proxy = proxy_for(self.url)
        key = (key or "").strip()
        if not re.fullmatch(r"[\x21-\x7e]*", key):
            # Nothing of it is shown: it may be a good one with a slip in it.
            raise SettingsError(
                "LONGLEAF_API_KEY, or --key, holds no key: one is a word of printable ASCII that begins with "
                "llk_, as `longleaf keys create` prints it"
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = http_client(self.url, httpx.Timeout(timeout_s, connect=5.0), headers)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # Every method raises Unreachable or Refused.

    def upload(self, path: Path) -> Document:
        """Upload a file; the same content gives the same document."""
        with path.open("rb") as file:
            answer = self._call("POST", "/v1/documents", files={"file": (path.name, file)}, timeout=300.0)
        return Document.model_validate(answer.json())

    def upload_file(self, file: BinaryIO, name: str) -> Document:
        """Upload what an open file holds, from its beginning, under a name."""
        # A name on a disk may be in no encoding at all.
        sendable = name.encode("utf-8", "replace").decode()
        answer = self._call("POST", "/v1/documents", files={"file": (sendable, file)}, timeout=300.0)
        return Document.model_validate(answer.json())

    def documents(self, limit: int = 50, after: str | None = None) -> Page:
        """Documents, the newest first; those that come after one of them where `after` names it."""
        return self._page("/v1/documents", {"limit": limit, "after": after})

    def delete_document(self, document_id: str) -> None:
        self._call("DELETE", f"/v1/documents/{document_id}")

    def document(self, document_id: str) -> Document:
        return Document.model_validate(self._call("GET", f"/v1/documents/{document_id}").json())

    def submit(self, spec: JobSpec) -> Job:
        # Counting a very long document's tokens may take the API a while.
        answer = self._call("POST", "/v1/jobs", json=spec.model_dump(mode="json"), timeout=300.0)
        return Job.model_validate(answer.json())

    def warm(self, documents: list[str], model: str | None = None, thinking: bool = False) -> Job:
        """Have documents read and their prefix stored."""
        body = {"documents": documents, "model": model, "thinking": thinking}
        return Job.model_validate(self._call("POST", "/v1/prefixes", json=body, timeout=300.0).json())

    def job(self, job_id: str) -> Job:
        return Job.model_validate(self._call("GET", f"/v1/jobs/{job_id}").json())

    def jobs(self, state: State | None = None, limit: int = 50, after: str | None = None) -> Page:
        """Jobs, the newest first; of one state where it is given."""
        return self._page("/v1/jobs", {"state": state, "limit": limit, "after": after})

    def delete_job(self, job_id: str) -> None:
        """Delete a job that has ended, with its result."""
        self._call("DELETE", f"/v1/jobs/{job_id}")

    def result(self, job_id: str) -> Result:
        return Result.model_validate(self._call("GET", f"/v1/jobs/{job_id}/result").json())

    def cancel(self, job_id: str) -> Job:
        return Job.model_validate(self._call("POST", f"/v1/jobs/{job_id}/cancel").json())

    def retry(self, job_id: str) -> Job:
        """Queue a failed, cancelled or expired job again."""
        return Job.model_validate(self._call("POST", f"/v1/jobs/{job_id}/retry").json())

    def models(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("GET", "/v1/models").json()
        return found

    def webhook_secret(self) -> WebhookSecret:
        return WebhookSecret.model_validate(self._call("GET", "/v1/webhooks/secret").json())

    def rotate_webhook_secret(self, overlap_s: int) -> WebhookSecret:
        """Exchange the secret; the one so far signs as well for these seconds."""
        answer = self._call("POST", "/v1/webhooks/secret/rotate", json={"overlap_s": overlap_s})
        return WebhookSecret.model_validate(answer.json())

    def not_ready(self) -> str | None:
        """Why jobs would not be worked on now; None when they would."""
        try:
            self._call("GET", "/health/ready")
        except ApiError as error:
            return str(error)
        return None

    def follow(self, job_id: str) -> Iterator[JobEvent]:
        """The job's events to its last one, through restarts of the API; polls where there is no stream."""
        seq: int | None = None
        lost_at: float | None = None
        while True:
            try:
                for event in self._stream(job_id, seq):
                    yield event
                    seq, lost_at = event.seq, None
                if self.job(job_id).ended:
                    return
            except _NoStream:
                yield from self._poll(job_id)
                return
            except Unreachable:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > OUTAGE_S:
                    raise
            time.sleep(0.5)

    def wait(self, job_id: str) -> Job:
        """The job when it has ended."""
        for _ in self.follow(job_id):
            pass
        return self.job(job_id)

    def _stream(self, job_id: str, seq: int | None) -> Iterator[JobEvent]:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": str(seq)} if seq is not None else {})}
        timeout = httpx.Timeout(SILENCE_S, connect=5.0)
        path = f"/v1/jobs/{job_id}/events"
        try:
            with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
                if answer.status_code == 204:
                    return
                if answer.status_code != 200:
                    answer.read()
                    raise _refusal(answer, self._proxy)
                if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                    raise _NoStream
                yield from _parse_events(answer.iter_lines())
        except httpx.ReadTimeout as error:
            raise _NoStream from error
        except httpx.TransportError as error:
            raise Unreachable(self.url, in_words(error), self._proxy) from error

    def _poll(self, job_id: str) -> Iterator[JobEvent]:
        etag: str | None = None
        while True:
            headers = {"If-None-Match": etag} if etag else {}
            answer = self._call(
                "GET",
                f"/v1/jobs/{job_id}",
                params={"wait": POLL_WAIT_S if etag else 0},
                headers=headers,
                timeout=POLL_WAIT_S + 15.0,
            )
            if answer.status_code == 304:
                continue
            etag = answer.headers.get("etag")
            job = Job.model_validate(answer.json())
            if job.progress is not None:
                yield JobEvent(EventType.PROGRESS, job.progress.model_dump(mode="json"))
            if job.ended:
                data = job.error.model_dump(mode="json") if job.error else {}
                yield JobEvent(EventType(f"job.{job.state.value}"), data)
                return
            if etag is None:
                time.sleep(1.0)

    def _page(self, path: str, query: dict[str, Any]) -> Page:
        given = {name: value for name, value in query.items() if value is not None}
        return Page.model_validate(self._call("GET", path, params=given).json())

    def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.InvalidURL:
            raise Refused(404, "not_found", f"{path!r} has characters that no id has", {}) from None
        except httpx.TransportError as error:
            raise Unreachable(self.url, in_words(error), self._proxy) from error
        if answer.is_success or answer.status_code == 304:
            return answer
        raise _refusal(answer, self._proxy)


def _refusal(answer: httpx.Response, way: Proxy | None) -> Refused:
    try:
        body = answer.json()
        return Refused(answer.status_code, str(body["code"]), str(body["detail"]), body)
    except (ValueError, KeyError, TypeError):
        through = f"; it was asked through {way}" if way else ""
        url = without_password(str(answer.url))
        detail = f"{url} answered {answer.status_code} without an explanation: is it Longleaf?{through}"
        return Refused(answer.status_code, "unknown", detail, {})


def _parse_events(lines: Iterator[str]) -> Iterator[JobEvent]:
    fields: dict[str, str] = {}
    for line in lines:
        if not line:
            if "event" in fields:
                seq = int(fields["id"]) if "id" in fields else None
                yield JobEvent(EventType(fields["event"]), json.loads(fields.get("data", "{}")), seq)
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
