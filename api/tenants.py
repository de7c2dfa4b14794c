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


def webhook_keys(tenant: Tenant, now: float) -> list[bytes]:
    """What signs the tenant's callbacks, 32 bytes each: the present key, then the last one while it holds."""
    keys = [_webhook_key(tenant, tenant.num_rotations)]
    if tenant.old_key_until is not None and now < tenant.old_key_until:
        keys.append(_webhook_key(tenant, tenant.num_rotations - 1))
    return keys


def _webhook_key(tenant: Tenant, number: int) -> bytes:
    return bytes.fromhex(_derive(tenant.secret, f"webhooks {number}" if number else "webhooks"))


def _derive(secret: str, use: str) -> str:
    return hmac.new(bytes.fromhex(secret), use.encode(), hashlib.sha256).hexdigest()
