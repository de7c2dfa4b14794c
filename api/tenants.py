"""A tenant: whom documents and jobs belong to, and what is derived from its secret.

One random secret per tenant lies in the database and never leaves it. Each derived value has a use of its
own, and none of them tells anything about another one or about the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from api.models import Tenant

DEFAULT_TENANT = "default"
"""Whom requests without a key act for, and what was there before there were tenants."""


def new_secret() -> str:
    """32 random bytes in hexadecimal."""
    return secrets.token_hex(32)


def prefix_salt(tenant: Tenant) -> str:
    """What the tenant's chains of block keys begin with, in hexadecimal.

    With another salt the same document has other keys, so no tenant hits, or times, another one's stored
    prefixes. The default tenant has none: its prefixes outlive a database that is made anew.
    """
    return "" if tenant.id == DEFAULT_TENANT else _derive(tenant.secret, "prefix salt")[:32]


def webhook_key(tenant: Tenant) -> bytes:
    """32 bytes that sign the tenant's callbacks."""
    return bytes.fromhex(_derive(tenant.secret, "webhooks"))


def _derive(secret: str, use: str) -> str:
    return hmac.new(bytes.fromhex(secret), use.encode(), hashlib.sha256).hexdigest()
