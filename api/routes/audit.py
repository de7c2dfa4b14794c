"""/v1/audit: who made and deleted what, whosever it was."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from api.gate import AdminOnly
from api.models import AuditEntry
from api.routes.paging import After, Limit, iso, page
from api.services import ServicesDep

router = APIRouter(prefix="/v1/audit", tags=["audit"], dependencies=[AdminOnly])


@router.get("")
def list_entries(services: ServicesDep, limit: Limit = 50, after: After = None) -> dict[str, Any]:
    """Newest first. `key` is null for this machine: a request without a key, or a command; or `retention`."""
    return page(services.audit.page(limit + 1, after), limit, _view)


def _view(entry: AuditEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "at": iso(entry.at),
        "action": entry.action,
        "what": entry.what,
        "item": entry.item_id,
        "tenant": entry.tenant_id,
        "key": entry.key_id,
        "request_id": entry.request_id,
    }
