"""A tenant: whom documents and jobs belong to, and what is derived from its secret.

One random secret per tenant lies in the database and never leaves it. Each derived value has a use of its
own, and none of them tells anything about another one or about the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets

from api.models import Tenant

DEFAULT_TENANT = "default"
"""Whom requests without a key act for, and what was there before there were tenants."""

_TOKEN = re.compile(r"lld_([a-z0-9_]{1,64})\.([0-9a-f]{64})")


def new_secret() -> str:
    """32 random bytes in hexadecimal."""
    return secrets.token_hex(32)


def prefix_salt(tenant: Tenant) -> str:
    """What the tenant's chains of block keys begin with, in hexadecimal.

    With another salt the same document has other keys, so no tenant hits, or times, another one's stored
    prefixes. The default tenant has none: its prefixes outlive a database that is made anew.
    """
    return "" if tenant.id == DEFAULT_TENANT else _derive(tenant.secret, "prefix salt")[:32]


def document_token(tenant: Tenant, document_id: str) -> str:
    """A credential for the text and the pages of one document: what a job gives to its worker."""
    return f"lld_{tenant.id}.{_derive(tenant.secret, f'document {document_id}')}"


def webhook_key(tenant: Tenant) -> bytes:
    """32 bytes that sign the tenant's callbacks."""
    return bytes.fromhex(_derive(tenant.secret, "webhooks"))


def token_tenant(token: str) -> str | None:
    """The id of the tenant that a document token claims; None where it is no document token."""
    match = _TOKEN.fullmatch(token)
    return match[1] if match else None


def opens(token: str, tenant: Tenant | None, document_id: str) -> bool:
    """Whether a token is that of this document. A tenant that is not there takes as long."""
    known = tenant or Tenant(id="", secret="0" * 64)
    return hmac.compare_digest(token, document_token(known, document_id)) and tenant is not None


def _derive(secret: str, use: str) -> str:
    return hmac.new(bytes.fromhex(secret), use.encode(), hashlib.sha256).hexdigest()
