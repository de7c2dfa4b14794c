"""Deletes what has been kept for long enough: ended jobs with all that is theirs, then documents of no job.

A few in each transaction, so that requests which write wait for a few only. What a job or a document takes
with it is said by the foreign keys of the tables.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import anyio.to_thread
from sqlalchemy import exists, select
from sqlalchemy.orm import Session

from api import audit
from api.audit import DAY_S, RETENTION
from api.db import Database
from api.models import Document, Job, JobDocument, WebhookDelivery
from api.repeat import repeat
from jobs import TERMINAL

log = logging.getLogger(__name__)

BATCH = 20
LOOK_EVERY_S = 600.0


class Retention:
    def __init__(self, database: Database, keep_days: float, notify: Callable[[str], None]) -> None:
        """`notify` hears of each job that is deleted."""
        self._database = database
        self._keep_s = keep_days * DAY_S
        self._notify = notify

    async def run(self) -> None:
        """Delete until cancelled."""

        async def delete_all() -> None:
            while await anyio.to_thread.run_sync(self.delete_some, time.time()):
                pass

        old = "old jobs and documents"
        await repeat(delete_all, LOOK_EVERY_S, log, f"{old} are kept for now", f"{old} could not be deleted")

    def delete_some(self, now: float) -> bool:
        """Delete the oldest, `BATCH` at most. Returns whether there may be more."""
        before = now - self._keep_s
        with self._database.read() as session:
            if not _old_jobs(session, before) and not _old_documents(session, before):
                return False
        with self._database.write(synced=False) as session:
            jobs = _old_jobs(session, before)
            # A job gives its documents free, so those come after all jobs.
            documents = [] if jobs else _old_documents(session, before)
            for job in jobs:
                audit.note(session, "deleted", "job", job.id, job.tenant_id, RETENTION)
                session.delete(job)
            for document in documents:
                audit.note(session, "deleted", "document", document.id, document.tenant_id, RETENTION)
                session.delete(document)
        for job in jobs:
            self._notify(job.id)
        return True


def _old_jobs(session: Session, before: float) -> list[Job]:
    """Jobs that ended before that time and have nobody left to tell it to."""
    is_owed = exists().where(WebhookDelivery.job_id == Job.id, WebhookDelivery.next_at.is_not(None))
    query = select(Job).where(Job.finished_at < before, Job.state.in_(TERMINAL), ~is_owed)
    return list(session.scalars(query.order_by(Job.finished_at).limit(BATCH)))


def _old_documents(session: Session, before: float) -> list[Document]:
    """Documents that were last uploaded before that time and that no job reads, ended or not."""
    is_used = exists().where(JobDocument.document_id == Document.id)
    query = select(Document).where(Document.uploaded_at < before, ~is_used)
    return list(session.scalars(query.order_by(Document.uploaded_at).limit(BATCH)))
