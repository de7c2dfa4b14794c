"""API keys: made once, kept as a hash, looked up at each request.

A key is 256 random bits, so one round of SHA-256 keeps it as safe as a slow hash would: there is nothing to
guess. A key belongs to a tenant and has scopes; what a scope allows is decided in gate.py.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlalchemy import exists, select

from api.db import Database
from api.limits import NO_LIMITS, Limits
from api.models import ApiKey, Tenant, new_id
from api.tenants import DEFAULT_TENANT, new_secret, opens, token_tenant

Scope = Literal["submit", "read", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "llk_"


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request acts, and what it may do."""

    tenant: str
    scopes: frozenset[str]
    key_id: str | None = None
    """None without a key, and for a worker that reads a document."""
    limits: Limits = NO_LIMITS

    def may(self, scope: Scope) -> bool:
        """`admin` includes the other scopes."""
        return scope in self.scopes or "admin" in self.scopes


ANYONE_HERE = Caller(DEFAULT_TENANT, frozenset(SCOPES))
"""A request without a key, where none is needed."""


class KeyStore:
    def __init__(self, database: Database) -> None:
        self._database = database

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
            row.revoked_at = row.revoked_at or time.time()
        return row

    def any_valid(self) -> bool:
        with self._database.read() as session:
            return bool(session.scalar(select(exists().where(ApiKey.revoked_at.is_(None)))))

    def caller(self, plain: str) -> Caller | None:
        """Who shows this key; None for one that is unknown or revoked."""
        query = select(ApiKey).where(ApiKey.sha256 == _digest(plain), ApiKey.revoked_at.is_(None))
        with self._database.read() as session:
            row = session.scalar(query)
        if row is None:
            return None
        limits = Limits(row.requests_per_minute, row.max_queued_jobs, row.max_document_bytes)
        return Caller(row.tenant_id, frozenset(row.scopes), row.id, limits)

    def document_reader(self, token: str, document_id: str) -> Caller | None:
        """The worker that shows a document token; None where it is not this document's."""
        claimed = token_tenant(token)
        if claimed is None:
            return None
        with self._database.read() as session:
            tenant = session.get(Tenant, claimed)
        return Caller(claimed, frozenset({"read"})) if opens(token, tenant, document_id) else None


def _digest(plain: str) -> str:
    return hashlib.sha256(plain.encode()).hexdigest()
