from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console
from typer.testing import CliRunner

from cache_store import BlockKey, Keyring, SnapshotStore, Tier
from cli import prefixes
from tests.cli.stored_prefixes import MODEL, make_data, store_chain


class Command:
    def __init__(self, data: Path) -> None:
        self.data = data

    def __call__(self, *words: str, status: int = 0) -> str:
        result: Result = CliRunner().invoke(prefixes.app, [*words, "--data", str(self.data)])
        assert result.exit_code == status, result.output
        return result.output


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def chains(data: Path) -> list[list[BlockKey]]:
    return make_data(data)


@pytest.fixture
def longleaf(data: Path, chains: list[list[BlockKey]]) -> Command:
    return Command(data)


def opened(data: Path) -> SnapshotStore:
    return SnapshotStore(data / "snapshots", 1 << 30, 0)


def block_path(data: Path, key: BlockKey) -> Path:
    return data / "snapshots" / "v1" / key.hex[:2] / f"{key}.llkv"


def damage(data: Path, key: BlockKey) -> None:
    path = block_path(data, key)
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def test_prefixes_are_listed_with_what_they_share(
    longleaf: Command, data: Path, chains: list[list[BlockKey]]
) -> None:
    listed = json.loads(longleaf("list", "--json"))
    found = {
        p["id"]: (p["num_tokens"], p["num_blocks"], p["disk_bytes"], p["own_bytes"])
        for p in listed["prefixes"]
    }
    first, second, other = (chain[-1].hex for chain in chains)
    size = 8192
    assert found == {
        first: (448, 3, 4 * size - 4096, 2 * size - 4096),  # its attachment is of no bytes, and a header
        second: (576, 4, 4 * size, 2 * size),
        other: (192, 1, size, size),
    }
    assert listed["models"][MODEL]["num_blocks"] == 7
    text = longleaf("list")
    assert first[:12] in text
    assert "tenant anna" in text
    assert [p["id"] for p in json.loads(longleaf("list", "--tenant", "anna", "--json"))["prefixes"]] == [
        other
    ]


def test_a_prefix_is_shown_by_the_beginning_of_its_id(
    longleaf: Command, chains: list[list[BlockKey]]
) -> None:
    key = chains[0][-1]
    shown = json.loads(longleaf("show", key.hex[:6], "--json"))
    assert shown["id"] == key.hex
    assert [block["id"] for block in shown["blocks"]] == [k.hex for k in chains[0]]
    assert shown["sections"] == [{"name": "layer.0", "dtype": "uint8", "shape": [2000], "num_bytes": 2000}]
    assert shown["attached"] == {"self-check": 4096}
    assert "448 in 3 blocks" in longleaf("show", key.hex)


@pytest.mark.parametrize("id", ["", "zz", "0" * 32])
def test_an_id_that_names_no_single_prefix_is_refused(longleaf: Command, id: str) -> None:
    for command in ("show", "pin", "rm", "unpin", "verify"):
        assert "not one" in longleaf(command, id, status=2)


def test_pins_are_made_listed_and_taken_back(
    longleaf: Command, data: Path, chains: list[list[BlockKey]]
) -> None:
    key = chains[2][-1]
    longleaf("pin", key.hex)
    assert opened(data).pins() == {key}
    pinned = [p["id"] for p in json.loads(longleaf("list", "--json"))["prefixes"] if p["pinned"]]
    assert pinned == [key.hex]
    longleaf("unpin", key.hex[:8])
    assert opened(data).pins() == set()
    assert "pinned: nothing" in longleaf("unpin", key.hex, status=2)


def test_removing_a_prefix_keeps_what_another_shares(
    longleaf: Command, data: Path, chains: list[list[BlockKey]]
) -> None:
    first, second, _ = chains
    assert "1 block deleted" in longleaf("rm", first[-1].hex)
    assert {e.key for e in opened(data).entries()} == {*second, chains[2][0]}
    assert "shared with another" in longleaf("rm", second[1].hex)
    assert "4 blocks deleted" in longleaf("rm", second[-1].hex)
    assert "1 block deleted" in longleaf("rm", "--tenant", "anna")
    assert opened(data).entries() == []
    for words in ([], ["--plain", "--tenant", "anna"], [first[0].hex, "--plain"]):
        assert "one of them" in longleaf("rm", *words, status=2)


def test_an_export_is_imported_elsewhere_byte_for_byte(
    longleaf: Command, data: Path, chains: list[list[BlockKey]], tmp_path: Path
) -> None:
    file = tmp_path / "prefixes.tar"
    ids = [chain[-1].hex for chain in chains[:2]]
    assert "6 blocks" in longleaf("export", str(file), *ids)
    assert "is there already" in longleaf("export", str(file), *ids, status=2)
    elsewhere = Command(tmp_path / "elsewhere")
    assert "6 blocks stored" in elsewhere("import", str(file))
    for key in {*chains[0], *chains[1]}:
        assert block_path(elsewhere.data, key).read_bytes() == block_path(data, key).read_bytes()
    listed = json.loads(elsewhere("list", "--json"))["prefixes"]
    assert {p["id"] for p in listed} == set(ids)
    assert json.loads(elsewhere("show", ids[0], "--json"))["attached"] == {"self-check": 4096}


def test_a_damaged_export_is_refused_and_stores_no_wrong_block(
    longleaf: Command, data: Path, chains: list[list[BlockKey]], tmp_path: Path
) -> None:
    file, broken = tmp_path / "prefixes.tar", tmp_path / "broken.tar"
    longleaf("export", str(file), chains[1][-1].hex)
    raw = file.read_bytes()
    harms = [raw[: len(raw) // 2], raw[:700], b"", b"no archive at all" * 100]
    for position in range(300, len(raw), 1733):
        flipped = bytearray(raw)
        flipped[position] ^= 16
        harms.append(bytes(flipped))
    refused = 0
    for number, harm in enumerate(harms):
        broken.write_bytes(harm)
        target = tmp_path / f"target {number}"
        result = CliRunner().invoke(prefixes.app, ["import", str(broken), "--data", str(target)])
        assert result.exit_code in (0, 2), result.output
        refused += result.exit_code == 2
        for entry in opened(target).entries():
            # What was stored before the damage was met is right.
            assert block_path(target, entry.key).read_bytes() == block_path(data, entry.key).read_bytes()
        if result.exit_code == 0:  # the harm lies in a name, a date or padding that nothing reads
            assert len(opened(target).entries()) == 4
    assert refused > 12


def test_an_export_of_a_bad_block_is_refused_and_leaves_no_file(
    longleaf: Command, data: Path, chains: list[list[BlockKey]], tmp_path: Path
) -> None:
    damage(data, chains[2][0])
    file = tmp_path / "prefixes.tar"
    assert "checksum" in longleaf("export", str(file), chains[2][0].hex, status=2)
    assert not any(path.name.startswith((".prefixes", "prefixes")) for path in tmp_path.iterdir())


def test_verify_finds_and_puts_away_what_is_bad(
    longleaf: Command, data: Path, chains: list[list[BlockKey]]
) -> None:
    assert "7 blocks read, 0 bad" in longleaf("verify")
    damage(data, chains[1][2])
    assert "3 blocks read, 0 bad" in longleaf("verify", chains[0][-1].hex)
    found = json.loads(longleaf("verify", "--json", status=1))
    assert list(found["bad"]) == [chains[1][2].hex]
    assert not block_path(data, chains[1][2]).exists()
    assert "6 blocks read, 0 bad" in longleaf("verify")
    whole = {p["id"]: p["whole"] for p in json.loads(longleaf("list", "--json"))["prefixes"]}
    assert whole[chains[1][-1].hex] is False


def test_gc_applies_the_budget_and_removes_what_was_left(
    longleaf: Command, data: Path, chains: list[list[BlockKey]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(data)
    store.checkpoints.save_layer(chains[0][-1], 0, [], {})
    (part,) = (data / "snapshots" / "checkpoints").iterdir()
    os.utime(part, (time.time() - 30 * 86_400,) * 2)
    left = block_path(data, chains[0][0]).with_name(f".{chains[0][0]}.1.ab.tmp")
    left.write_bytes(bytes(9000))
    monkeypatch.setenv("LONGLEAF_SNAPSHOTS_BYTES", str(3 * 8192))
    assert "freed" in longleaf("gc")
    assert not part.exists()
    assert not left.exists()
    assert opened(data).total_bytes <= 3 * 8192
    assert len(opened(data).entries()) >= 2


def test_looking_at_a_store_evicts_nothing(
    longleaf: Command, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGLEAF_SNAPSHOTS_BYTES", "1")
    longleaf("list")
    longleaf("verify")
    assert len(opened(data).entries()) == 7


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    for words in (["list"], ["verify"], ["gc"], ["pin", "ab"]):
        assert str(tmp_path / "none" / "snapshots") in Command(tmp_path / "none")(*words, status=2).replace(
            "\n", ""
        )


def test_an_import_without_room_says_so(
    longleaf: Command, chains: list[list[BlockKey]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prefixes.tar"
    longleaf("export", str(file), chains[1][-1].hex)
    monkeypatch.setenv("LONGLEAF_SNAPSHOTS_BYTES", str(2 * 8192))
    output = Command(tmp_path / "small")("import", str(file), status=1)
    assert "2 blocks stored" in output
    assert "2 blocks found no room" in output


def test_continued_prefixes_are_marked(longleaf: Command, data: Path) -> None:
    key = store_chain(opened(data), [50, 51], exact=False)[-1]
    (found,) = (p for p in json.loads(longleaf("list", "--json"))["prefixes"] if p["id"] == key.hex)
    assert found["exact"] is False
    assert "continued" in longleaf("list")


def test_the_pages_examples_give_what_the_page_shows(
    data: Path, chains: list[list[BlockKey]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "prefixes.md").read_text()
    transcripts = re.findall(r"```console\n(.*?)```", page, re.DOTALL)
    assert len(transcripts) > 3
    monkeypatch.setenv("LONGLEAF_DATA", str(data))
    monkeypatch.setattr(prefixes, "console", lambda: Console(width=100))
    monkeypatch.chdir(tmp_path)
    for step in re.split(r"^\$ longleaf prefixes ", "".join(transcripts), flags=re.MULTILINE)[1:]:
        command, _, shown = step.partition("\n")
        output = CliRunner().invoke(prefixes.app, command.split()).output
        assert plain(output) == plain(shown), command


def plain(text: str) -> str:
    """Without what differs from run to run: the seconds since a use, and spaces at the ends of lines."""
    return "\n".join(re.sub(r"\d+ s ago", "0 s ago", line).rstrip() for line in text.strip().splitlines())


def test_prefixes_are_deleted_from_the_shared_tier_too(
    longleaf: Command,
    data: Path,
    chains: list[list[BlockKey]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared = tmp_path / "shared"
    monkeypatch.setenv("LONGLEAF_SHARED_TIER", f"file://{shared}")
    assert str(shared) in longleaf("rm", chains[0][-1].hex, status=2)
    assert opened(data).info(chains[0][-1]) is not None
    shared.mkdir()
    store = SnapshotStore(data / "snapshots", 1 << 30, 0, tier=Tier(f"file://{shared}"))
    assert store.wait_pushed(60)
    store.close()
    num_before = len(list(shared.rglob("*.llkv")))
    longleaf("rm", chains[0][-1].hex)
    assert len(list(shared.rglob("*.llkv"))) < num_before
    assert not list(shared.rglob(f"{chains[0][-1]}.llkv"))


def test_an_encrypted_prefix_is_listed_without_its_key_and_verified_with_it(
    longleaf: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    monkeypatch.setenv("LONGLEAF_SNAPSHOT_KEYS", str(keys))
    assert "mkdir" in longleaf("list", status=2)
    keys.mkdir()
    keyring = Keyring(keys)
    keyring.make("anna")
    num_plain = len(opened(data).entries())
    store = SnapshotStore(data / "snapshots", 1 << 30, 0, keyring=keyring)
    (key,) = store_chain(store, [60], "anna")
    assert f"{num_plain + 1} blocks read, 0 bad" in longleaf("verify")
    assert key.hex in longleaf("show", key.hex)
    monkeypatch.delenv("LONGLEAF_SNAPSHOT_KEYS")
    readable = {p["id"]: p["readable"] for p in json.loads(longleaf("list", "--json"))["prefixes"]}
    assert [key_id for key_id, is_readable in readable.items() if not is_readable] == [key.hex]
    assert f"{num_plain} blocks read, 0 bad, 1 block not read: no key" in longleaf("verify")
    assert "key of tenant anna" in longleaf("show", key.hex, status=2)


def test_deleting_a_tenant_deletes_its_key(
    longleaf: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    monkeypatch.setenv("LONGLEAF_SNAPSHOT_KEYS", str(keys))
    for tenant in ("anna", "ben"):
        Keyring(keys).make(tenant)
    longleaf("rm", "--tenant", "anna")
    assert [path.name for path in keys.glob("*.key")] == ["tenant-ben.key"]


def test_what_is_not_encrypted_is_deleted_once_there_are_keys(
    longleaf: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_plain = len(opened(data).entries())
    assert "every prefix is plain" in longleaf("rm", "--plain", status=2)
    assert len(opened(data).entries()) == num_plain
    keys = tmp_path / "keys"
    keys.mkdir()
    monkeypatch.setenv("LONGLEAF_SNAPSHOT_KEYS", str(keys))
    keyring = Keyring(keys)
    keyring.make("anna")
    (kept,) = store_chain(SnapshotStore(data / "snapshots", 1 << 30, 0, keyring=keyring), [60], "anna")
    assert f"{num_plain} blocks deleted" in longleaf("rm", "--plain")
    assert [entry.key for entry in opened(data).entries()] == [kept]
