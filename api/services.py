"""What the running API is made of: built once at start, handed to the routes as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, cast

import anyio
from fastapi import Depends, Request
from redis.exceptions import RedisError

from api.audit import Audit
from api.db import Database
from api.documents.store import DocumentStore
from api.documents.tokens import ModelFolder, ModelFolders
from api.keys import KeyStore
from api.models import Document
from api.notifier import Notifier
from api.prefixes import Prefixes
from api.queue import JobQueue
from api.rates import RequestRates
from api.settings import Settings
from api.store import JobStore
from api.webhooks import Webhooks
from jobs import WorkerStatus


@dataclass(frozen=True, slots=True)
class Services:
    settings: Settings
    database: Database
    keys: KeyStore
    rates: RequestRates
    documents: DocumentStore
    jobs: JobStore
    audit: Audit
    queue: JobQueue
    webhooks: Webhooks
    prefixes: Prefixes
    folders: ModelFolders
    notifier: Notifier
    readers: anyio.CapacityLimiter
    """Uploads that are read at the same time: each PDF may take `extract_memory_bytes`."""

    def workers(self) -> list[WorkerStatus]:
        """The live workers; none while Redis is away."""
        try:
            return list(self.queue.workers().values())
        except (RedisError, OSError):
            return []

    def num_tokens(self, document: Document, folder: ModelFolder) -> int:
        """Tokens of a document by a model's tokenizer, counted once and then kept."""
        known = self.documents.token_counts([document.id]).get((document.id, folder.tokenizer_sha256))
        if known is not None:
            return known
        text = self.documents.text(document.tenant_id, document.id) or ""
        num_tokens = self.folders.prompts(folder).count(text)
        self.documents.keep_token_count(document.id, folder.tokenizer_sha256, num_tokens)
        return num_tokens


def get_services(request: Request) -> Services:
    return cast(Services, request.app.state.services)


ServicesDep = Annotated[Services, Depends(get_services)]
