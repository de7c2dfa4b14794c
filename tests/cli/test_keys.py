"""`longleaf keys`, on a database, and `--key`, on what is sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.fake_api import JOB, Request, fake_api
from tests.cli.test_command import longleaf


def test_a_key_is_shown_once_then_listed_and_revoked(tmp_path: Path) -> None:
    made = longleaf(tmp_path, "keys", "create", "--tenant", "team", "--scope", "read", "--name", "laptop")
    assert made.returncode == 0, made.stderr
    plain = made.stdout.strip()
    assert plain.startswith("llk_")
    key_id = made.stderr.split(":")[0]
    listed = longleaf(tmp_path, "keys", "list").stdout
    assert [word in listed for word in (key_id, "team", "read", "laptop", "valid")] == [True] * 5
    assert plain not in listed
    assert longleaf(tmp_path, "keys", "revoke", key_id).returncode == 0
    assert "revoked 20" in longleaf(tmp_path, "keys", "list").stdout


def test_a_key_that_is_not_there_cannot_be_revoked(tmp_path: Path) -> None:
    done = longleaf(tmp_path, "keys", "revoke", "key_none")
    assert done.returncode == 2
    assert "longleaf keys list" in done.stderr


def test_the_key_is_sent_and_the_option_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str | None] = []

    def answer(request: Request) -> None:
        shown.append(request.headers.get("Authorization"))
        request.reply(202, JOB)

    monkeypatch.setenv("LONGLEAF_API_KEY", "llk_env\n")
    with fake_api(answer) as url:
        assert longleaf(tmp_path, "retry", "job_1", api=url).stdout == "job_1: queued\n"
        longleaf(tmp_path, "--key", "llk_option", "cancel", "job_1", api=url)
    assert shown == ["Bearer llk_env", "Bearer llk_option"]


def test_priority_and_expiry_are_part_of_what_is_submitted(tmp_path: Path) -> None:
    sent: list[dict[str, object]] = []

    def answer(request: Request) -> None:
        sent.append(json.loads(request.body))
        request.reply(202, JOB)

    with fake_api(answer) as url:
        done = longleaf(tmp_path, "submit", "doc_1", "--expires-after", "60", "--priority", "high", api=url)
        refused = longleaf(tmp_path, "submit", "doc_1", "--priority", "urgent", api=url)
    assert done.returncode == 0, done.stderr
    assert (sent[0]["expires_after"], sent[0]["priority"]) == (60, "high")
    assert (refused.returncode, len(sent)) == (2, 1)
    assert "priority" in refused.stderr
