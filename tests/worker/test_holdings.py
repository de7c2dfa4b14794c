"""A worker's listing of its stored prefixes and what it does when it is asked about one, on a real store."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis import Redis

from cache_store import Keyring, SnapshotStore, stored_prefixes
from jobs.prefixes import Holdings, PrefixCommand, commands_key, holdings_key, prefix_owner
from tests.cache_store.stored_blocks import Chain, make_chain, put
from worker import holdings
from worker.engine.snapshots import tenant_name

SALT = "00112233445566778899aabbccddeeff"
OWNER = prefix_owner(SALT)


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "snapshots", 1 << 30, 0)


def fill(store: SnapshotStore) -> tuple[Chain, Chain]:
    """Three blocks of the default tenant and two of another one."""
    ours, theirs = make_chain(3), make_chain(2, seed=1, salt=bytes.fromhex(SALT))
    for i in range(3):
        assert put(store, ours, i, model="m", prefill_s=1.0)
    for i in range(2):
        assert put(store, theirs, i, model="m", tenant=OWNER)
    return ours, theirs


def ask(store: SnapshotStore, op: str, prefix_id: str, owner: str = "") -> None:
    command = PrefixCommand.model_validate({"op": op, "id": prefix_id, "owner": owner})
    holdings.obey(store, command.model_dump_json().encode())


def left(store: SnapshotStore) -> dict[str, bool]:
    return {prefix.key.hex: prefix.pinned for prefix in stored_prefixes(store)}


def test_the_owner_is_who_the_engine_writes_into_blocks() -> None:
    assert tenant_name(bytes.fromhex(SALT)) == OWNER
    assert tenant_name(b"") == prefix_owner("") == ""


def test_a_listing_names_each_prefix_with_its_owner(store: SnapshotStore) -> None:
    ours, theirs = fill(store)
    found = {p.id: p for p in holdings.listed(store, "w").prefixes}
    assert set(found) == {ours.keys[-1].hex, theirs.keys[-1].hex}
    mine = found[ours.keys[-1].hex]
    assert (mine.owner, mine.model, mine.num_tokens, mine.pinned) == ("", "m", 192 + 2 * 128, False)
    assert mine.disk_bytes == mine.own_bytes > 0
    assert found[theirs.keys[-1].hex].owner == OWNER


def test_a_listing_is_bounded_and_says_so(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store)
    monkeypatch.setattr(holdings, "MAX_PREFIXES", 1)
    found = holdings.listed(store, "w")
    assert (len(found.prefixes), found.num_left_out) == (1, 1)


def test_commands_pin_unpin_and_remove(store: SnapshotStore) -> None:
    ours, theirs = fill(store)
    mine, other = ours.keys[-1].hex, theirs.keys[-1].hex
    ask(store, "pin", mine)
    assert left(store) == {mine: True, other: False}
    ask(store, "remove", mine)
    assert left(store) == {mine: True, other: False}
    ask(store, "unpin", mine)
    ask(store, "remove", mine)
    assert left(store) == {other: False}


def test_what_is_forgotten_is_gone_pinned_or_not_with_its_key_and_nothing_elses(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    keyring = Keyring(tmp_path / "keys")
    ours_key, _ = keyring.make("").id, keyring.make(OWNER)
    store = SnapshotStore(tmp_path / "snapshots", 1 << 30, 0, keyring=keyring)
    ours, theirs = fill(store)
    ask(store, "pin", theirs.keys[-1].hex, OWNER)
    ask(store, "forget", "", OWNER)
    assert left(store) == {ours.keys[-1].hex: False}
    assert keyring.get(OWNER) is None
    assert keyring.make("").id == ours_key


def test_a_prefix_without_its_key_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    keyring = Keyring(tmp_path / "keys")
    for owner in ("", OWNER):
        keyring.make(owner)
    store = SnapshotStore(tmp_path / "snapshots", 1 << 30, 0, keyring=keyring)
    ours, _ = fill(store)
    keyring.remove(OWNER)
    assert [p.id for p in holdings.listed(store, "w").prefixes] == [ours.keys[-1].hex]


@pytest.mark.parametrize("op", ["pin", "remove"])
def test_nothing_is_done_to_another_owners_prefix(store: SnapshotStore, op: str) -> None:
    _, theirs = fill(store)
    before = left(store)
    ask(store, op, theirs.keys[-1].hex)
    ask(store, op, theirs.keys[-1].hex, "ffffffffffffffff")
    assert left(store) == before


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"op":"burn","id":"0","owner":""}', b"\xff"])
def test_a_command_that_is_none_does_nothing(store: SnapshotStore, raw: bytes) -> None:
    fill(store)
    before = left(store)
    holdings.obey(store, raw)
    holdings.obey(store, b'{"op":"remove","id":"not hex","owner":""}')
    assert left(store) == before


def test_a_command_through_redis_shows_in_the_next_listing(store: SnapshotStore, redis_url: str) -> None:
    ours, _ = fill(store)
    mine = ours.keys[-1].hex
    with Redis.from_url(redis_url) as redis:
        report = holdings.HoldingsReport(redis, "w", lambda: store)
        try:
            redis.rpush(commands_key("w"), PrefixCommand(op="pin", id=mine, owner="").model_dump_json())
            while mine not in {p.id for p in _listing(redis).prefixes if p.pinned}:
                redis.wait(0, 20)
        finally:
            report.close()
        assert not redis.exists(holdings_key("w"))


def _listing(redis: Redis) -> Holdings:
    value = redis.get(holdings_key("w"))
    return Holdings.model_validate_json(value) if value else Holdings(worker="w", prefixes=[])
