"""Reads document texts from the API over HTTP, and makes sure that they are the texts the job names."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence

import httpx
from pydantic import TypeAdapter, ValidationError

from jobs import DocumentRef, Problem
from jobs.faults import told
from jobs.transport import http_client, in_words
from worker.protocol import DocumentText, Page

log = logging.getLogger("worker.documents")

PATIENCE_S = 60.0
"""How long an API that is down is waited for."""
NO_TOKEN = ", or is another tenant's, whose this worker cannot read without LONGLEAF_WORKER_TOKEN"
_pages: TypeAdapter[list[Page]] = TypeAdapter(list[Page])


class DocumentFailed(Exception):
    """A document cannot be had, and trying again would not help."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class ApiUnreachable(DocumentFailed):
    """The API gave no answer for `PATIENCE_S`; another worker, or a later try, may have more luck."""


class TokenRefused(Exception):
    """The API does not take this worker for one, whatever the job is. The message says what to do."""


class Interrupted(Exception):
    """The caller's `interrupted` said to give up."""


class DocumentSource:
    def __init__(self, api: str, token: Callable[[], str | None], patience_s: float = PATIENCE_S) -> None:
        """`token` is asked for each job: an API that starts beside the worker may still be making it.

        Raises SettingsError for a proxy of the environment or for certificates that cannot be used.
        """
        self._api = api
        self._token = token
        self._patience_s = patience_s
        self._http = http_client(api, httpx.Timeout(10.0, connect=5.0))

    def fetch(self, refs: Sequence[DocumentRef], interrupted: Callable[[], bool]) -> list[DocumentText]:
        """The documents' texts and page maps, in order.

        Raises:
            DocumentFailed: gone, refused, or not the text that the job names.
            ApiUnreachable: no answer for a minute.
            TokenRefused: the API knows no such worker.
            Interrupted: as soon as `interrupted` says so between two tries.
        """
        token = self._token()
        self._http.headers = httpx.Headers({"Authorization": f"Bearer {token}"} if token else {})
        return [self._fetch_one(ref, interrupted) for ref in refs]

    def close(self) -> None:
        self._http.close()

    def _fetch_one(self, ref: DocumentRef, interrupted: Callable[[], bool]) -> DocumentText:
        text = self._get(ref, "text", interrupted)
        digest = hashlib.sha256(text).hexdigest()
        if digest != ref.text_sha256:
            raise DocumentFailed(
                Problem(
                    code="document_mismatch",
                    detail=f"the text of document {ref.id} ({ref.name}) has the SHA-256 {digest}, but the "
                    f"job was made for {ref.text_sha256}; upload the document again and make a new job",
                    params={"document": ref.id, "expected": ref.text_sha256, "actual": digest},
                )
            )
        body = self._get(ref, "pages", interrupted)
        try:
            pages = _pages.validate_json(body)
        except ValidationError as error:
            raise _refused(ref, f"its page map is unreadable: {told(error.errors()[0])}") from error
        return DocumentText(id=ref.id, name=ref.name, text=text.decode(), pages=pages)

    def _get(self, ref: DocumentRef, what: str, interrupted: Callable[[], bool]) -> bytes:
        give_up_at = time.monotonic() + self._patience_s
        pause_s = 0.25
        while True:
            if interrupted():
                raise Interrupted
            try:
                response = self._http.get(f"/v1/documents/{ref.id}/{what}")
                if response.status_code < 500:
                    break
                trouble, mend = f"it answered {response.status_code}", "its log says why"
            except httpx.TransportError as error:
                trouble, mend = in_words(error), "check LONGLEAF_API on the worker's host"
            if time.monotonic() + pause_s > give_up_at:
                raise ApiUnreachable(
                    Problem(
                        code="api_unreachable",
                        detail=f"the worker could not read document {ref.id} from {self._api} for "
                        f"{self._patience_s:.0f} s ({trouble}); {mend}",
                        params={"document": ref.id, "api": self._api},
                    )
                )
            log.warning("cannot read document %s from %s: %s; trying again", ref.id, self._api, trouble)
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)
        if response.status_code in (401, 403):
            raise TokenRefused(
                f"the API at {self._api} does not let this worker read documents ({_detail(response)}): "
                "on its host `longleaf keys create --scope worker` makes a token for LONGLEAF_WORKER_TOKEN"
            )
        if response.status_code in (404, 410):
            raise DocumentFailed(
                Problem(
                    code="document_gone",
                    detail=f"document {ref.id} ({ref.name}) was deleted before the job read it"
                    f"{'' if self._http.headers.get('Authorization') else NO_TOKEN}; "
                    "upload it again and make a new job",
                    params={"document": ref.id},
                )
            )
        if response.status_code != 200:
            raise _refused(ref, f"the API answered {response.status_code}")
        return response.content


def _detail(response: httpx.Response) -> str:
    try:
        return str(response.json()["detail"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}"


def _refused(ref: DocumentRef, why: str) -> DocumentFailed:
    return DocumentFailed(
        Problem(
            code="document_unreadable",
            detail=f"document {ref.id} ({ref.name}) could not be read: {why}",
            params={"document": ref.id},
        )
    )
