"""API keys: made once, kept as a hash, looked up at each request.

A key is 256 random bits, so one round of SHA-256 keeps it as safe as a slow hash would: there is nothing to
guess. A key belongs to a tenant and has scopes; what a scope allows is decided in gate.py.

A worker's key is of the scope `worker` alone. The workers on the API's own data folder show a token that lies
there instead: it is in no table, so a restored database does not shut them out.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sqlalchemy import select

from api import audit
from api.db import Database
from api.limits import NO_LIMITS, Limits
from api.models import ApiKey, Tenant, new_id
from api.tenants import DEFAULT_TENANT, new_secret

Scope = Literal["submit", "read", "admin", "worker"]
WORKER: Scope = "worker"
SCOPES: tuple[Scope, ...] = ("submit", "read", "admin")
"""What a person or a program may be allowed."""
PREFIX = "llk_"


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request acts, and what it may do."""

    tenant: str
    scopes: frozenset[str]
    key_id: str | None = None
    """None without a key, and for a worker on the API's own data folder."""
    limits: Limits = NO_LIMITS

    def may(self, scope: Scope) -> bool:
        """`admin` includes the others of `SCOPES`: a worker reads the documents of every tenant."""
        return scope in self.scopes or ("admin" in self.scopes and scope != WORKER)


ANYONE_HERE = Caller(DEFAULT_TENANT, frozenset(SCOPES))
"""A request without a key, where none is needed."""


class KeyStore:
    def __init__(self, database: Database, local_worker: str | None = None) -> None:
        """`local_worker` is the token of the workers on this host's data folder."""
        self._database = database
        self._local_worker = local_worker

    def create(
        self, tenant: str, scopes: Iterable[Scope], name: str, limits: Limits = NO_LIMITS
    ) -> tuple[ApiKey, str]:
        """A key of the tenant of this name, which is made where there is none.

        Returns its row and the key itself, which is nowhere else from now on.
        """
        plain = PREFIX + secrets.token_urlsafe(32)
        now = time.time()
        with self._database.write() as session:
            owner = session.scalar(select(Tenant).where(Tenant.name == tenant))
            if owner is None:
                owner = Tenant(id=new_id("ten"), name=tenant, secret=new_secret(), created_at=now)
                session.add(owner)
                session.flush()
                audit.note(session, "created", "tenant", owner.id, owner.id, None)
            row = ApiKey(
                id=new_id("key"),
                tenant_id=owner.id,
                name=name,
                scopes=sorted(set(scopes)),
                sha256=_digest(plain),
                created_at=now,
                requests_per_minute=limits.requests_per_minute,
                max_queued_jobs=limits.max_queued_jobs,
                max_document_bytes=limits.max_document_bytes,
            )
            session.add(row)
            audit.note(session, "created", "key", row.id, owner.id, None)
        return row, plain

    def rows(self) -> Sequence[tuple[ApiKey, str]]:
        """Every key with its tenant's name, revoked ones too, oldest first."""
        query = select(ApiKey, Tenant.name).join(Tenant, Tenant.id == ApiKey.tenant_id).order_by(ApiKey.id)
        with self._database.read() as session:
            return [(row, name) for row, name in session.execute(query)]

    def revoke(self, key_id: str) -> ApiKey:
        """End a key; a second time changes nothing. Raises LookupError."""
        with self._database.write() as session:
            row = session.get(ApiKey, key_id)
            if row is None:
                raise LookupError(key_id)
            if row.revoked_at is None:
                row.revoked_at = time.time()
                audit.note(session, "revoked", "key", row.id, row.tenant_id, None)
        return row

    def any_valid(self) -> bool:
        """Whether there is a key with which something can be asked."""
        with self._database.read() as session:
            scopes = session.scalars(select(ApiKey.scopes).where(ApiKey.revoked_at.is_(None)))
            return any(set(of_key) - {WORKER} for of_key in scopes)

    def caller(self, plain: str) -> Caller | None:
        """Who shows this key; None for one that is unknown or revoked."""
        if self._local_worker is not None and hmac.compare_digest(
            _digest(plain), _digest(self._local_worker)
        ):
            return Caller(DEFAULT_TENANT, frozenset({WORKER}))
        query = select(ApiKey).where(ApiKey.sha256 == _digest(plain), ApiKey.revoked_at.is_(None))
        with self._database.read() as session:
            row = session.scalar(query)
        if row is None:
            return None
        limits = Limits(row.requests_per_minute, row.max_queued_jobs, row.max_document_bytes)
        return Caller(row.tenant_id, frozenset(row.scopes), row.id, limits)


def local_worker_token(path: Path) -> str:
    """The token in a file of the data folder, made where there is none.

    Raises:
        OSError: the folder cannot be written, or the file not be read.
    """
    with suppress(FileNotFoundError):
        if kept := path.read_text().strip():
            return kept
    plain = PREFIX + secrets.token_urlsafe(32)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:
        file.write(plain + "\n")
    partial.replace(path)
    return plain


def _digest(plain: str) -> str:
    return hashlib.sha256(plain.encode()).hexdigest()
