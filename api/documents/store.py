"""Documents in the database: content-addressed, with their text, pages and token counts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Select, func, select

from api import audit
from api.db import Database
from api.documents.pages import Page
from api.documents.text import Extracted
from api.limits import OverLimit
from api.models import Document, DocumentText, Job, JobDocument, TokenCount, new_id
from jobs import TERMINAL


class InUse(Exception):
    """A job that is not finished reads the document; the text is the job's id."""


UNNAMED = "document"
"""The name of a document that came without one."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A document after an upload."""

    document: Document
    is_new: bool
    former_name: str | None = None
    """What the same content was named until this upload."""


class DocumentStore:
    def __init__(self, database: Database) -> None:
        self._database = database

    def get(self, tenant: str, document_id: str) -> Document | None:
        with self._database.read() as session:
            return cast(Document | None, session.scalar(_owned(tenant, document_id)))

    def uploaded_again(self, tenant: str, sha256: str, name: str | None) -> Kept | None:
        """The document that has this content already, under the name given now; its time begins anew."""
        with self._database.read() as session:
            if session.scalar(_with_content(tenant, sha256)) is None:
                return None
        with self._database.write(synced=False) as session:
            same = session.scalar(_with_content(tenant, sha256))
            return None if same is None else _renewed(same, name)

    def page(self, tenant: str, limit: int, after: str | None) -> Sequence[Document]:
        """Newest first, at most `limit`, older than the document `after`."""
        query = select(Document).where(Document.tenant_id == tenant).order_by(Document.id.desc()).limit(limit)
        if after is not None:
            query = query.where(Document.id < after)
        with self._database.read() as session:
            return session.scalars(query).all()

    def text(self, tenant: str, document_id: str) -> str | None:
        with self._database.read() as session:
            return cast(str | None, session.scalar(_owned(tenant, document_id, DocumentText.text)))

    def pages(self, tenant: str, document_id: str) -> list[Page] | None:
        with self._database.read() as session:
            return cast(list[Page] | None, session.scalar(_owned(tenant, document_id, DocumentText.pages)))

    def add(
        self,
        tenant: str,
        name: str | None,
        sha256: str,
        num_bytes: int,
        found: Extracted,
        max_bytes: int | None = None,
    ) -> Kept:
        """Keep a document; a tenant's same bytes are kept once, under the last name that was given.

        Raises:
            OverLimit: the tenant's documents would have more than `max_bytes`; nothing was kept.
        """
        with self._database.write() as session:
            same = session.scalar(_with_content(tenant, sha256))
            if same is not None:
                return _renewed(same, name)
            if max_bytes is not None:
                held = session.scalar(
                    select(func.sum(Document.num_bytes)).where(Document.tenant_id == tenant)
                )
                if (held or 0) + num_bytes > max_bytes:
                    raise OverLimit(max_bytes, (held or 0) + num_bytes)
            now = time.time()
            document = Document(
                id=new_id("doc"),
                tenant_id=tenant,
                name=name or UNNAMED,
                media_type=found.media_type,
                num_bytes=num_bytes,
                num_chars=len(found.text),
                num_pages=len(found.pages) or None,
                sha256=sha256,
                text_sha256=hashlib.sha256(found.text.encode()).hexdigest(),
                created_at=now,
                uploaded_at=now,
                warnings=[dict(item) for item in found.warnings],
            )
            session.add(document)
            session.flush()
            session.add(DocumentText(document_id=document.id, text=found.text, pages=found.pages))
        return Kept(document, is_new=True)

    def delete(self, tenant: str, document_id: str, key_id: str | None = None) -> None:
        """Delete a document, with the key by which that is asked.

        Raises LookupError (no such document) and InUse.
        """
        with self._database.write() as session:
            document = session.scalar(_owned(tenant, document_id))
            if document is None:
                raise LookupError(document_id)
            users = (
                select(Job.id)
                .join(JobDocument, JobDocument.job_id == Job.id)
                .where(JobDocument.document_id == document_id, Job.state.not_in(TERMINAL))
            )
            if (user := session.scalar(users.limit(1))) is not None:
                raise InUse(user)
            session.delete(document)
            audit.note(session, "deleted", "document", document_id, tenant, key_id)

    def tenant_at_work(self, document_id: str) -> str | None:
        """Whose the document is, where a job that has not ended reads it; else None."""
        query = (
            select(Job.tenant_id)
            .join(JobDocument, JobDocument.job_id == Job.id)
            .where(JobDocument.document_id == document_id, Job.state.not_in(TERMINAL))
        )
        with self._database.read() as session:
            return session.scalar(query.limit(1))

    def token_counts(self, document_ids: Sequence[str]) -> dict[tuple[str, str], int]:
        """The known counts of these documents by (document id, tokenizer sha256)."""
        with self._database.read() as session:
            rows = session.scalars(select(TokenCount).where(TokenCount.document_id.in_(document_ids)))
            return {(row.document_id, row.tokenizer_sha256): row.num_tokens for row in rows}

    def keep_token_count(self, document_id: str, tokenizer_sha256: str, num_tokens: int) -> None:
        with self._database.write() as session:
            if session.get(Document, document_id) is None:
                return  # deleted while it was counted
            if session.get(TokenCount, (document_id, tokenizer_sha256)) is None:
                counted = {"document_id": document_id, "tokenizer_sha256": tokenizer_sha256}
                session.add(TokenCount(**counted, num_tokens=num_tokens))


def _owned(tenant: str, document_id: str, what: Any = Document) -> Select[Any]:
    """One query whatever there is: another tenant's document takes as long to miss as none."""
    query = select(what).where(Document.id == document_id, Document.tenant_id == tenant)
    return query if what is Document else query.join(Document, Document.id == DocumentText.document_id)


def _renewed(same: Document, name: str | None) -> Kept:
    """The same content once more. What came without a name leaves the name as it is."""
    same.uploaded_at = time.time()
    former = same.name
    if name is None or name == former:
        return Kept(same, is_new=False)
    same.name = name
    return Kept(same, is_new=False, former_name=former)


def _with_content(tenant: str, sha256: str) -> Select[Any]:
    return select(Document).where(Document.tenant_id == tenant, Document.sha256 == sha256)
