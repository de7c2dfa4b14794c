"""One line in the log for what cannot be undone: who deleted what. It outlives what was deleted."""

from __future__ import annotations

import logging

from api.keys import Caller

log = logging.getLogger("api.audit")


def deleted(what: str, item_id: str, caller: Caller) -> None:
    """`what` is `document`, `job` or `prefix`."""
    by = caller.key_id or "this machine, without a key"
    fields = {"event": "deleted", "what": what, "id": item_id, "tenant": caller.tenant, "key": caller.key_id}
    log.info(
        "%s %s of the tenant %s was deleted by %s", what, item_id, caller.tenant, by, extra={"fields": fields}
    )
