"""The tables. Times are seconds since the epoch; ids sort by the time at which they were made."""

from __future__ import annotations

import secrets
import time
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

BIG = BigInteger().with_variant(Integer, "sqlite")
"""64 bits, as every integer of SQLite has."""
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str) -> str:
    """`prefix_` + 9 characters of milliseconds + 11 random ones (55 bits)."""
    number, stamp = time.time_ns() // 1_000_000, ""
    for _ in range(9):
        number, digit = divmod(number, 32)
        stamp = _ALPHABET[digit] + stamp
    return f"{prefix}_{stamp}{''.join(secrets.choice(_ALPHABET) for _ in range(11))}"


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 (SQLAlchemy reads it from the class)
        float: Double,
        dict[str, Any]: JSON(none_as_null=True),
        list[dict[str, Any]]: JSON(none_as_null=True),
        list[str]: JSON(none_as_null=True),
    }


class Tenant(Base):
    """Whom documents and jobs belong to. What its secret is for is in tenants.py."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    secret: Mapped[str]
    """32 bytes in hexadecimal."""
    created_at: Mapped[float]
    num_rotations: Mapped[int] = mapped_column(default=0, server_default="0")
    """How often the key that signs its callbacks was exchanged for the next one."""
    old_key_until: Mapped[float | None]
    """Until then the key before signs as well."""


class ApiKey(Base):
    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str]
    """What its owner calls it."""
    scopes: Mapped[list[str]]
    sha256: Mapped[str] = mapped_column(unique=True)
    """Of the key, which itself is kept nowhere."""
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
    requests_per_minute: Mapped[int | None]
    max_queued_jobs: Mapped[int | None]
    max_document_bytes: Mapped[int | None] = mapped_column(BIG)
    """These are limits of the key; what is counted for the last two is the tenant's."""


class Document(Base):
    __tablename__ = "documents"
    __table_args__ = (
        # The same content is the same document, for one tenant: another one must not learn that it is there.
        UniqueConstraint("tenant_id", "sha256"),
        Index("ix_documents_tenant_id_id", "tenant_id", "id"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    name: Mapped[str]
    media_type: Mapped[str]
    num_bytes: Mapped[int] = mapped_column(BIG)
    num_chars: Mapped[int] = mapped_column(BIG)
    num_pages: Mapped[int | None]
    """None where the text has no page marks."""
    sha256: Mapped[str]
    """Of the bytes as uploaded."""
    text_sha256: Mapped[str]
    """Of the normalised text in UTF-8; the worker checks it."""
    created_at: Mapped[float]
    uploaded_at: Mapped[float] = mapped_column(server_default="0")
    """When the content last came; retention counts from it."""
    warnings: Mapped[list[dict[str, Any]] | None]
    """[{code, detail, params}], what the text lacks; None where it was stored before that was looked for."""


class DocumentText(Base):
    """Apart from `documents`, so that listing documents reads no text."""

    __tablename__ = "document_texts"

    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), primary_key=True)
    text: Mapped[str] = mapped_column(Text)
    pages: Mapped[list[dict[str, Any]]]
    """[{number, start, end}], character offsets into the text; they cover it without gaps."""


class TokenCount(Base):
    __tablename__ = "token_counts"

    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), primary_key=True)
    tokenizer_sha256: Mapped[str] = mapped_column(primary_key=True)
    num_tokens: Mapped[int]


class Job(Base):
    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_state_id", "state", "id"),
        Index("ix_jobs_tenant_id_id", "tenant_id", "id"),
        Index("ix_jobs_state_rank", "state", "rank"),
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"))
    type: Mapped[str]
    state: Mapped[str]
    model: Mapped[str]
    spec: Mapped[dict[str, Any]]
    attempt: Mapped[int] = mapped_column(default=1)
    """Grows whenever the job is handed out again; events of older attempts are ignored."""
    num_failures: Mapped[int] = mapped_column(default=0)
    rank: Mapped[float] = mapped_column(default=0.0, server_default="0")
    """Queued jobs are handed out by it, the lowest first; what it is made of is in moves.py."""
    worker: Mapped[str | None]
    """Who runs this attempt; None until it started."""
    handed_out: Mapped[bool] = mapped_column(default=False)
    """Whether this attempt was put on the queue."""
    not_before: Mapped[float | None]
    """A queued attempt is not handed out earlier; None where it is due."""
    version: Mapped[int] = mapped_column(default=1)
    """Grows with every change a client can see: the ETag."""
    last_seq: Mapped[int] = mapped_column(default=0)
    num_outputs: Mapped[int] = mapped_column(default=0, server_default="0")
    num_done: Mapped[int] = mapped_column(default=0, server_default="0")
    """Outputs that are complete, whichever attempt they are of."""
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    """First start of any attempt."""
    finished_at: Mapped[float | None] = mapped_column(index=True)
    expires_at: Mapped[float | None]
    expiring: Mapped[bool] = mapped_column(default=False, server_default=false())
    """Whether a running attempt is told to stop because the job's time is over."""
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    error: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class IdempotencyKey(Base):
    """A submitter's own name for a job, one of its tenant's; it lives as long as the job."""

    __tablename__ = "idempotency_keys"

    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id", ondelete="CASCADE"), primary_key=True)
    key: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), unique=True)
    body_sha256: Mapped[str]
    """Of the body that came with it: the same key with another body is a mistake."""


class JobResult(Base):
    """Apart from `jobs`, so that polling a job reads no answer."""

    __tablename__ = "job_results"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    result: Mapped[dict[str, Any]]


class JobOutput(Base):
    """A complete answer of a job that has no result yet; the result takes them over (outputs.py)."""

    __tablename__ = "job_outputs"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    output_index: Mapped[int] = mapped_column(primary_key=True)
    output: Mapped[dict[str, Any]]


class JobDocument(Base):
    __tablename__ = "job_documents"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), index=True)
    name: Mapped[str | None]
    """The document's when the job was accepted: prompts over several documents have it. None in old rows."""


class HeldDocument(Base):
    """A worker's snapshot store that has the KV of what a prompt begins with."""

    __tablename__ = "held_documents"

    store: Mapped[str] = mapped_column(primary_key=True)
    lead: Mapped[str] = mapped_column(primary_key=True, index=True)
    """Of these documents in this order, for one tenant and model (`jobs.dispatch`)."""
    document_id: Mapped[str] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), index=True)
    """The last of them."""
    model: Mapped[str]
    at: Mapped[float]
    """When an attempt at them last started there."""


class JobEvent(Base):
    __tablename__ = "job_events"
    # Scoped to the job: a flushed Redis with a clock set back may give an id a second time.
    __table_args__ = (UniqueConstraint("job_id", "entry_id"),)

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    """From 1, without gaps when written; the SSE id."""
    type: Mapped[str]
    attempt: Mapped[int]
    at: Mapped[float]
    data: Mapped[dict[str, Any]]
    entry_id: Mapped[str | None]
    """The stream entry it came from: applied once, however often it is delivered."""


class WebhookDelivery(Base):
    """One end of a job that is to be told to its `callback_url`; a deleted job's are dropped with it."""

    __tablename__ = "webhook_deliveries"

    id: Mapped[str] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id", ondelete="CASCADE"), index=True)
    url: Mapped[str]
    body: Mapped[str] = mapped_column(Text)
    """What is signed and sent, byte by byte the same at each attempt."""
    attempts: Mapped[list[dict[str, Any]]]
    """[{at, status, error}]: status is None where there was no answer."""
    created_at: Mapped[float]
    next_at: Mapped[float | None] = mapped_column(index=True)
    """When the next attempt is due; None when it was taken or given up."""
    delivered_at: Mapped[float | None]


class AuditEntry(Base):
    """Something made or deleted. No foreign keys: what it speaks of may be gone."""

    __tablename__ = "audit_entries"

    id: Mapped[str] = mapped_column(primary_key=True)
    at: Mapped[float] = mapped_column(index=True)
    action: Mapped[str]
    what: Mapped[str]
    item_id: Mapped[str] = mapped_column(index=True)
    tenant_id: Mapped[str]
    """Whose it was."""
    key_id: Mapped[str | None]
    """By which key; None for this machine, by a request without one or a command; `retention` by its age."""
    request_id: Mapped[str | None]
