"""Who made and deleted what: a row in the transaction that does it, and a line in the log after it.

Ids alone are kept, no name and no text, and nothing refers to them: a row outlives what it speaks of, for
`LONGLEAF_AUDIT_DAYS`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal

import anyio.to_thread
from sqlalchemy import delete, event, select
from sqlalchemy.orm import Session

from api.db import Database
from api.models import AuditEntry, new_id
from api.repeat import repeat
from jobs import logs

log = logging.getLogger("api.audit")

DAY_S = 86_400.0
PRUNE_EVERY_S = 3600.0

RETENTION = "retention"
"""In the place of a key: what was deleted by its age."""

Action = Literal["created", "deleted", "revoked", "rotated"]
What = Literal["document", "job", "prefix", "key", "tenant", "webhook_secret"]


def note(session: Session, action: Action, what: What, item_id: str, tenant: str, key_id: str | None) -> None:
    """Write down what the caller's transaction does to something of a tenant.

    `key_id` is the key that it is done with; None for this machine: a request without a key, or a command;
    `RETENTION` for what has been kept for long enough.
    """
    request_id = logs.request_id.get()
    session.add(
        AuditEntry(
            id=new_id("aud"),
            at=time.time(),
            action=action,
            what=what,
            item_id=item_id,
            tenant_id=tenant,
            key_id=key_id,
            request_id=request_id,
        )
    )
    fields = {"event": action, "what": what, "id": item_id, "tenant": tenant, "key": key_id}

    def tell(_session: Session) -> None:
        by = key_id or "this machine, without a key"
        words = (what, item_id, tenant, action, by)
        log.info("%s %s of the tenant %s was %s by %s", *words, extra={"fields": fields})

    event.listen(session, "after_commit", tell, once=True)


class Audit:
    def __init__(self, database: Database, keep_days: float) -> None:
        self._database = database
        self._keep_s = keep_days * DAY_S

    def page(self, limit: int, after: str | None) -> Sequence[AuditEntry]:
        """Of all tenants, newest first, at most `limit`, older than the entry `after`."""
        query = select(AuditEntry).order_by(AuditEntry.id.desc()).limit(limit)
        if after is not None:
            query = query.where(AuditEntry.id < after)
        with self._database.read() as session:
            return session.scalars(query).all()

    def note(self, action: Action, what: What, item_id: str, tenant: str, key_id: str | None) -> None:
        """The same as a transaction of its own, for what is done elsewhere than in the database."""
        with self._database.write() as session:
            note(session, action, what, item_id, tenant, key_id)

    def was_retired(self, what: What, item_id: str, tenant: str) -> bool:
        """Whether something of a tenant was deleted by its age, as far as that is kept."""
        same = (AuditEntry.item_id == item_id, AuditEntry.tenant_id == tenant, AuditEntry.what == what)
        with self._database.read() as session:
            query = select(AuditEntry.id).where(*same, AuditEntry.key_id == RETENTION)
            return session.scalar(query.limit(1)) is not None

    def prune(self, now: float) -> None:
        """Drop what is older than it is kept."""
        with self._database.write(synced=False) as session:
            session.execute(delete(AuditEntry).where(AuditEntry.at < now - self._keep_s))

    async def run(self) -> None:
        """Prune until cancelled."""

        async def prune() -> None:
            await anyio.to_thread.run_sync(self.prune, time.time())

        waits, failed = "old entries are kept for now", "old entries could not be dropped"
        await repeat(prune, PRUNE_EVERY_S, log, waits, failed)
