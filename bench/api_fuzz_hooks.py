"""What `bench.api_fuzz` gives to schemathesis: ids of what is there, without which nearly all is a 404.

Of the calls that name a document, a job or a prefix three in four are given one that is there. Documents are
uploaded where none is left, jobs are those that were accepted. What is not a list of documents stays as it
was generated. A callback is taken out: it would leave this machine. So is every other Idempotency-Key: few
are generated, and with another body a known one is refused. A worker signs on with a worker's token,
and speaks the API's protocol.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import Any

import httpx
import schemathesis

from bench.api_process import MODEL
from jobs import PROTOCOL

URL, KEY, WORKER, PREFIXES = "LL_FUZZ_URL", "LL_FUZZ_KEY", "LL_FUZZ_WORKER", "LL_FUZZ_PREFIXES"
"""Variables: where the API is, a key, a worker's token, and ids of prefixes with commas between."""
SUBMITTING = ("/v1/jobs", "/v1/quote", "/v1/prefixes")

_calls, _texts = itertools.count(1), itertools.count(1)
_documents: deque[str] = deque(maxlen=8)
_jobs: deque[str] = deque(maxlen=32)
_prefixes = deque(filter(None, os.environ.get(PREFIXES, "").split(",")))


def _document() -> str:
    if not _documents:
        body = {"name": "a", "text": f"Text {next(_texts)} of {os.getpid()}."}
        headers = {"Authorization": f"Bearer {os.environ[KEY]}"}
        answer = httpx.post(f"{os.environ[URL]}/v1/documents", json=body, headers=headers)
        _documents.append(answer.raise_for_status().json()["id"])
    return _rotated(_documents)


def _rotated(ids: deque[str]) -> str:
    ids.rotate(1)
    return ids[0]


def _has_documents(spec: dict[str, Any]) -> bool:
    return isinstance(spec.get("documents"), list) and bool(spec["documents"])


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    number, body, path, given = next(_calls), case.body, case.operation.path, case.path_parameters
    joins = case.method == "POST" and path == "/v1/workers"
    case.headers["Authorization"] = f"Bearer {os.environ[WORKER if joins else KEY]}"
    if number % 4 == 0:
        return
    if joins and isinstance(body, dict) and isinstance(body.get("protocol"), int):
        case.body = body | {"protocol": PROTOCOL}
    if case.method == "POST" and path in SUBMITTING and isinstance(body, dict) and _has_documents(body):
        changes: dict[str, Any] = {"documents": [_document()]}
        if isinstance(body.get("model"), str):
            changes["model"] = MODEL
        case.body = {name: value for name, value in body.items() if name != "callback_url"} | changes
        if number % 2:
            case.headers.pop("Idempotency-Key", None)
    if "document_id" in given:
        given["document_id"] = _document()
    elif "job_id" in given and _jobs:
        given["job_id"] = _rotated(_jobs)
    elif "prefix_id" in given and _prefixes:
        given["prefix_id"] = _rotated(_prefixes)


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    if case.method == "POST" and case.operation.path in SUBMITTING[::2] and response.status_code == 202:
        _jobs.append(response.json()["id"])
    elif case.method == "DELETE" and response.status_code == 204:
        for gone in case.path_parameters.values():
            for ids in (_documents, _jobs):
                if gone in ids:
                    ids.remove(gone)
