"""Who made and deleted what: as rows that an admin reads, and as lines in the log."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest
from api_rig import Api, FakeWorker, held

from api import audit
from api.audit import DAY_S

PREFIX = "1" * 32


def entries(api: Api, **query: Any) -> list[dict[str, Any]]:
    return list(api.http.get("/v1/audit", params=query).json()["data"])


def cancelled(api: Api) -> str:
    job = str(api.submit()["id"])
    api.http.post(f"/v1/jobs/{job}/cancel")
    return job


def test_deletes_are_rows_with_who_what_and_the_request(api: Api, worker: FakeWorker) -> None:
    row, key = api.services.keys.create("default", ["submit"], "a name")
    document, job = api.upload("The text of it.", "secret name.txt"), cancelled(api)
    worker.be_there()
    worker.hold(held(PREFIX))
    for number, path in enumerate((f"documents/{document}", f"jobs/{job}", f"prefixes/{PREFIX}")):
        headers = {"Authorization": f"Bearer {key}", "X-Request-ID": f"req-{number}"}
        assert api.http.delete(f"/v1/{path}", headers=headers).status_code in (202, 204)
    found = [entry for entry in entries(api) if entry["action"] == "deleted"]
    assert {(e["request_id"], e["what"], e["item"]) for e in found} == {
        ("req-0", "document", document),
        ("req-1", "job", job),
        ("req-2", "prefix", PREFIX),
    }
    assert {(e["tenant"], e["key"]) for e in found} == {("default", row.id)}
    text = json.dumps(entries(api))
    assert [word in text for word in ("secret name", "The text", "a name")] == [False] * 3


def test_keys_tenants_and_secrets_are_rows_too_and_a_second_revocation_is_none(api: Api) -> None:
    row, key = api.services.keys.create("team", ["submit", "read"], "")
    api.http.post("/v1/webhooks/secret/rotate", headers={"Authorization": f"Bearer {key}"})
    for _ in range(2):
        api.services.keys.revoke(row.id)
    found = [(e["action"], e["what"], e["item"], e["key"]) for e in entries(api)]
    assert sorted(found, key=str) == [
        ("created", "key", row.id, None),
        ("created", "tenant", row.tenant_id, None),
        ("revoked", "key", row.id, None),
        ("rotated", "webhook_secret", row.tenant_id, row.id),
    ]


def test_what_was_refused_leaves_nothing(api: Api) -> None:
    job = str(api.submit()["id"])
    document = api.job(job)["spec"]["documents"][0]
    assert api.http.delete(f"/v1/jobs/{job}").status_code == 409
    assert api.http.delete(f"/v1/documents/{document}").status_code == 409
    assert api.http.delete("/v1/jobs/job_none").status_code == 404
    assert entries(api) == []


def test_a_cursor_goes_through_all_of_them_once(api: Api) -> None:
    made = [api.services.keys.create("default", ["read"], "")[0].id for _ in range(5)]
    seen: list[str] = []
    after = None
    while True:
        page = api.http.get("/v1/audit", params={"limit": 2} | ({"after": after} if after else {})).json()
        seen += [entry["item"] for entry in page["data"]]
        after = page["next"]
        if not page["has_more"]:
            break
    assert sorted(seen) == sorted(made)
    assert len(seen) == 5


def test_an_entry_is_dropped_when_its_time_is_over(api: Api) -> None:
    api.services.keys.create("default", ["read"], "")
    keep_s = api.services.settings.audit_days * DAY_S
    api.services.audit.prune(time.time() + keep_s - 60)
    assert len(entries(api)) == 1
    api.services.audit.prune(time.time() + keep_s + 60)
    assert entries(api) == []


def test_a_delete_leaves_a_line_that_says_who(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    document, job = api.upload("Delete me."), cancelled(api)
    row, key = api.services.keys.create("default", ["submit"], "")
    with caplog.at_level(logging.INFO, "api.audit"):
        assert api.http.delete(f"/v1/documents/{document}").status_code == 204
        assert api.http.delete(f"/v1/documents/{document}").status_code == 404
        shown = {"Authorization": f"Bearer {key}"}
        assert api.http.delete(f"/v1/jobs/{job}", headers=shown).status_code == 204
    lines = [record.getMessage() for record in caplog.records if record.name == "api.audit"]
    assert lines == [
        f"document {document} of the tenant default was deleted by this machine, without a key",
        f"job {job} of the tenant default was deleted by {row.id}",
    ]


def test_a_transaction_that_is_undone_leaves_neither_row_nor_line(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    def delete_and_fail() -> None:
        with api.services.database.write() as session:
            audit.note(session, "deleted", "job", "job_1", "default", None)
            session.flush()
            raise ZeroDivisionError

    with caplog.at_level(logging.INFO, "api.audit"), pytest.raises(ZeroDivisionError):
        delete_and_fail()
    assert entries(api) == []
    assert [record for record in caplog.records if record.name == "api.audit"] == []
