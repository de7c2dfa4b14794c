"""Machines that join: what they are asked for and told, and the workers on the API's own data folder."""

from __future__ import annotations

import stat
from typing import Any

import httpx
import pytest
from api_rig import Api, running

from api.__main__ import StartError, check_keys
from api.db import Database
from api.keys import WORKER, KeyStore
from api.settings import Settings
from jobs import PROTOCOL, VERSION

JOINING = {"host": "mac", "version": VERSION, "protocol": PROTOCOL}


def sign_on(api: Api, key: str | None = None, **changes: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return api.http.post("/v1/workers", json=JOINING | changes, headers=headers)


def test_a_worker_learns_the_model_and_finds_the_mark_in_redis(settings: Settings) -> None:
    with running(settings.model_copy(update={"require_key": True})) as api:
        answer = sign_on(api, api.services.keys.create("default", [WORKER], "mac")[1])
        assert answer.status_code == 200
        welcome = answer.json()
        assert (welcome["version"], welcome["protocol"]) == (VERSION, PROTOCOL)
        assert welcome["model"] == settings.model
        assert api.redis.ttl(welcome["mark"]) > 0


def test_without_a_workers_key_nobody_joins_where_keys_are_needed(settings: Settings) -> None:
    with running(settings.model_copy(update={"require_key": True})) as api:
        assert sign_on(api).json()["code"] == "key_required"
        revoked, key = api.services.keys.create("default", [WORKER], "mac")
        api.services.keys.revoke(revoked.id)
        assert sign_on(api, key).json()["code"] == "key_invalid"


def test_on_loopback_a_worker_joins_without_a_key(api: Api) -> None:
    assert sign_on(api).status_code == 200


def test_a_worker_of_another_protocol_is_refused_with_both_versions(api: Api) -> None:
    answer = sign_on(api, protocol=PROTOCOL + 1, version="9.9")
    assert (answer.status_code, answer.json()["code"]) == (409, "protocol_mismatch")
    assert VERSION in answer.json()["detail"]
    assert "'9.9'" in answer.json()["detail"]


@pytest.mark.parametrize("changes", [{"host": ""}, {"protocol": "one"}, {"more": 1}, {"version": "x" * 65}])
def test_a_malformed_sign_on_is_refused(api: Api, changes: dict[str, Any]) -> None:
    assert sign_on(api, **changes).status_code == 422


def test_the_token_of_the_data_folder_is_its_users_alone_and_outlives_a_restart(settings: Settings) -> None:
    tokens = set()
    for _ in range(2):
        with running(settings.model_copy(update={"require_key": True})) as api:
            token = settings.local_worker_token.read_text().strip()
            tokens.add(token)
            assert sign_on(api, token).status_code == 200
            assert api.http.get("/v1/jobs", headers={"Authorization": f"Bearer {token}"}).status_code == 403
    assert len(tokens) == 1
    assert stat.S_IMODE(settings.local_worker_token.stat().st_mode) == 0o600


def test_a_workers_key_alone_does_not_let_the_api_start(settings: Settings) -> None:
    locked = settings.model_copy(update={"require_key": True})
    database = Database(settings.database)
    KeyStore(database).create("default", [WORKER], "mac")
    with pytest.raises(StartError, match="longleaf keys create"):
        check_keys(locked)
    KeyStore(database).create("default", ["read"], "")
    check_keys(locked)
    database.close()
