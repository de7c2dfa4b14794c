"""Which workers' snapshot stores have the KV of which documents: noted when an attempt starts.

It outlives Redis, the API and the workers. What a store has thrown away since is not known here: the worker
that is chosen for nothing prefills, as any other would.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from api.models import HeldDocument
from jobs import RunRequest
from jobs.dispatch import waiting


def note(session: Session, request: RunRequest, store: str) -> None:
    """A worker with this store has begun to read the documents of a request."""
    leads = waiting(request, 0.0, 0.0).leads
    for lead, ref in zip(reversed(leads), request.documents, strict=False):
        session.merge(
            HeldDocument(store=store, lead=lead, document_id=ref.id, model=request.spec.model, at=time.time())
        )


def stores(session: Session, leads: Sequence[str]) -> dict[str, set[str]]:
    """The stores that have each of these leads; a lead that none has is left out."""
    query = select(HeldDocument.lead, HeldDocument.store).where(HeldDocument.lead.in_(leads))
    found: dict[str, set[str]] = {}
    for lead, store in session.execute(query):
        found.setdefault(lead, set()).add(store)
    return found


def document_ids(session: Session, store: str, model: str, limit: int) -> list[str]:
    """The documents whose KV for a model a store has, the last used first."""
    last = func.max(HeldDocument.at)
    query = (
        select(HeldDocument.document_id)
        .where(HeldDocument.store == store, HeldDocument.model == model)
        .group_by(HeldDocument.document_id)
        .order_by(last.desc(), HeldDocument.document_id)
        .limit(limit)
    )
    return list(session.scalars(query))
