from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from stored_blocks import (
    Chain,
    arrays_of,
    files_in,
    get,
    make_chain,
    path_of,
    put,
    reseal,
    same,
    sections_of,
    which,
)

from cache_store import (
    BadBlock,
    Keyring,
    KeyringError,
    NoKey,
    SnapshotStore,
    Tier,
    attach,
    attached,
    export_prefixes,
    import_prefixes,
    stored_prefixes,
)
from cache_store.transfer import BadExport

BUDGET = 64 << 20
GOLDEN = Path(__file__).parent / "golden" / "v2.llkv"
GOLDEN_KEY = bytes(range(32))
CHAIN = make_chain(3)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "keys"
    folder.mkdir()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture
def store(folder: Path, keys: Path) -> SnapshotStore:
    store = SnapshotStore(folder, BUDGET, 0, keyring=Keyring(keys))
    for tenant in ("anna", "ben"):
        store.salt(tenant, b"")
    return store


def chain_of(store: SnapshotStore, tenant: str, num_blocks: int = 3) -> Chain:
    """The same document for every tenant."""
    return make_chain(num_blocks, salt=store.salt(tenant, tenant.encode()))


def put_all(store: SnapshotStore, tenant: str) -> Chain:
    chain = chain_of(store, tenant)
    for index in range(len(chain.keys)):
        assert put(store, chain, index, tenant=tenant)
    return chain


def test_an_encrypted_block_comes_back_as_it_was_written(store: SnapshotStore) -> None:
    chain = put_all(store, "anna")
    assert store.match(chain.keys, chain.blocks) == 3
    for index, key in enumerate(chain.keys):
        info = store.info(key)
        assert info is not None
        assert info.is_sealed
        assert (info.num_tokens, info.meta) == (chain.blocks[index].size, {"index": index, "tenant": "anna"})
        assert info.parent == (chain.keys[index - 1] if index else None)
        assert same(get(store, key), arrays_of(key))


def test_a_payload_of_many_pieces_comes_back(store: SnapshotStore, folder: Path) -> None:
    chain = chain_of(store, "anna")
    assert put(store, chain, 0, pad_bytes=3 * (512 << 10) + 17, tenant="anna")
    assert which(get(store, chain.keys[0]), chain.keys[0]) == "exact"
    raw = path_of(folder, chain.keys[0]).read_bytes()
    assert store.read_file(chain.keys[0]) == raw


def test_nothing_of_a_document_is_readable_on_disk(store: SnapshotStore, folder: Path) -> None:
    chain = chain_of(store, "anna")
    secret = {"index": 0, "tenant": "anna", "said": "a word of the document"}
    arrays = arrays_of(chain.keys[0])
    assert store.write(chain.keys[0], None, chain.blocks[0], sections_of(arrays), True, secret)
    assert attach(store, chain.keys[0], "logits", sections_of(arrays), {"said": "a word of the document"})
    assert store.checkpoints.save_hidden(
        chain.keys[0], 0, sections_of(arrays), {"tenant": "anna", "said": "a word of the document"}
    )
    written = [path.read_bytes() for path in files_in(folder)]
    assert len(written) == 3
    ids = chain.blocks[0].tobytes()
    tokens = [ids[at : at + 8] for at in range(0, len(ids) - 8, 4)]
    values = [array.tobytes()[:16] for array in arrays if array.nbytes > 4]
    for piece in [b"a word", b"layers.", *tokens, *values]:
        assert not any(piece in raw for raw in written), piece


def test_a_file_is_what_the_format_says(store: SnapshotStore, folder: Path, keys: Path) -> None:
    chain = put_all(store, "anna")
    plain = SnapshotStore(folder.parent / "plain", BUDGET, 0)
    plain_raw = b""
    for index in range(2):
        assert put(plain, chain, index, tenant="anna")
        plain_raw = path_of(plain.folder, chain.keys[index]).read_bytes()
    raw = path_of(folder, chain.keys[1]).read_bytes()
    data_key = bytes.fromhex((keys / "tenant-anna.key").read_text())
    assert decrypted(raw, data_key) == plain_raw
    assert raw[8:12] == b"\2\0\0\0"
    assert raw[56:88] == plain_raw[56:88]  # key and parent
    label = raw[176 : 176 + int.from_bytes(raw[48:56], "little")]
    assert json.loads(label) == {"tenant": "anna"}


def decrypted(raw: bytes, data_key: bytes) -> bytes:
    """The plain file inside, by the offsets of FORMAT.md alone."""
    from hashlib import blake2b

    def u64(at: int) -> int:
        return int.from_bytes(raw[at : at + 8], "little")

    header_bytes, payload_offset, label_bytes = u64(16), u64(24), u64(48)
    key_id, salt, tag, label = raw[128:144], raw[144:160], raw[160:176], raw[176 : 176 + label_bytes]
    assert key_id == blake2b(key=data_key, digest_size=16, person=b"longleaf-key-id").digest()
    cipher = AESGCM(blake2b(salt, key=data_key, digest_size=32, person=b"longleaf-file").digest())
    header = cipher.decrypt(
        bytes(12), raw[176 + label_bytes : header_bytes] + tag, raw[:112] + key_id + salt + label
    )
    payload = cipher.decrypt(bytes(11) + b"\1", raw[payload_offset:], tag)
    return header.ljust(-(-len(header) // 4096) * 4096, b"\0") + payload


def test_the_golden_encrypted_block_is_read(tmp_path: Path, folder: Path, keys: Path) -> None:
    (keys / "tenant-anna.key").write_text(GOLDEN_KEY.hex() + "\n")
    store = SnapshotStore(folder, BUDGET, 0, keyring=Keyring(keys))
    key = CHAIN.keys[0]
    path_of(folder, key).parent.mkdir(parents=True)
    path_of(folder, key).write_bytes(GOLDEN.read_bytes())
    assert store.match(CHAIN.keys[:1], CHAIN.blocks[:1]) == 1
    assert same(get(store, key), arrays_of(key))
    assert decrypted(GOLDEN.read_bytes(), GOLDEN_KEY)[:12] == b"LLKV\r\n\x1a\n\1\0\0\0"


def test_the_same_block_is_never_encrypted_the_same_way_twice(store: SnapshotStore, folder: Path) -> None:
    chain = chain_of(store, "anna")
    images = []
    for _ in range(2):
        assert put(store, chain, 0, pad_bytes=5000, tenant="anna")
        images.append(path_of(folder, chain.keys[0]).read_bytes()[4096:])
        store.remove(chain.keys[0])
    pieces = [{image[at : at + 16] for at in range(len(image) - 16)} for image in images]
    assert not pieces[0] & pieces[1]


def test_without_the_key_no_name_of_a_document_can_be_made(store: SnapshotStore, keys: Path) -> None:
    salts = {store.salt("anna", b"salt"), store.salt("anna", b"other"), store.salt("ben", b"salt")}
    assert len(salts) == 3
    assert store.salt("anna", b"salt") in salts
    (keys / "tenant-anna.key").unlink()
    assert store.salt("anna", b"salt") not in salts
    assert SnapshotStore(keys.parent / "plain", BUDGET, 0).salt("anna", b"salt") == b"salt"


def test_deleting_a_tenants_key_makes_its_blocks_misses_and_no_others(
    store: SnapshotStore, folder: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    anna, ben = put_all(store, "anna"), put_all(store, "ben")
    assert attach(store, anna.keys[2], "logits", sections_of([]), {})
    assert store.checkpoints.save_hidden(anna.keys[2], 0, [], {"tenant": "anna"})
    assert Keyring(keys).remove("anna")
    for again in (store, SnapshotStore(folder, BUDGET, 0, keyring=Keyring(keys))):
        assert again.match(anna.keys, anna.blocks) == 0
        assert again.info(anna.keys[0]) is None
        assert attached(again, anna.keys[2], "logits") is None
        assert again.checkpoints.resume(anna.keys[2]) is None
        with pytest.raises(NoKey, match="tenant anna"):
            again.read(anna.keys[0], [])
        assert again.match(ben.keys, ben.blocks) == 3
        # Nothing was wrong with the files: they are listed, and go when room is needed.
        assert {p.tenant: p.readable for p in stored_prefixes(again)} == {"anna": False, "ben": True}
    assert not (folder / "quarantine").exists()
    assert caplog.records == []
    assert not put(store, anna, 0, tenant="anna")
    small = SnapshotStore(folder, store.total_bytes, 0, keyring=Keyring(keys))
    assert put(small, chain_of(small, "carl"), 0, pad_bytes=8192, tenant="carl")


def test_a_tenant_whose_key_was_deleted_begins_anew(store: SnapshotStore, keys: Path) -> None:
    before = put_all(store, "anna")
    Keyring(keys).remove("anna")
    after = put_all(store, "anna")
    assert not set(before.keys) & set(after.keys)
    assert store.match(after.keys, after.blocks) == 3
    assert store.match(before.keys, before.blocks) == 0
    assert put(store, before, 0, tenant="anna"), "the place of a block whose key is gone is free"
    assert which(get(store, before.keys[0]), before.keys[0]) == "exact"


def test_deleting_a_tenant_deletes_its_key_with_its_blocks(store: SnapshotStore, keys: Path) -> None:
    put_all(store, "anna")
    ben = put_all(store, "ben")
    assert store.remove_tenant("anna") == 3
    assert sorted(path.name for path in keys.glob("*.key")) == ["tenant-ben.key"]
    assert store.match(ben.keys, ben.blocks) == 3


def test_what_is_plain_is_deleted_and_nothing_else(store: SnapshotStore, folder: Path, keys: Path) -> None:
    """Blocks, what is attached to them, checkpoints, and a bad one that was moved aside."""
    anna = put_all(store, "anna")
    assert attach(store, anna.keys[2], "logits", sections_of([]), {})
    assert store.checkpoints.save_hidden(anna.keys[2], 0, [], {"tenant": "anna"})
    plain = SnapshotStore(folder, BUDGET, 0)
    for index in range(3):
        assert put(plain, CHAIN, index)
    assert attach(plain, CHAIN.keys[2], "logits", sections_of([]), {})
    plain.pin(CHAIN.keys[2])
    bad = path_of(folder, CHAIN.keys[1])
    bad.write_bytes(bad.read_bytes()[:-1] + b"x")
    with pytest.raises(BadBlock):
        get(plain, CHAIN.keys[1])
    other = make_chain(1, salt=b"other")
    assert plain.checkpoints.save_hidden(other.keys[0], 0, [], {})

    assert store.remove_plain() == 3  # two blocks and an attachment; the third lies in quarantine
    assert len(files_in(folder / "checkpoints")) == 1
    assert store.checkpoints.resume(anna.keys[2]) is not None
    assert not list((folder / "quarantine").iterdir())
    assert plain.pins() == set()
    assert {entry.tenant for entry in plain.entries()} == {"anna"}
    assert store.match(anna.keys, anna.blocks) == 3
    assert attached(store, anna.keys[2], "logits") is not None
    assert store.remove_plain() == 0


def test_what_is_plain_goes_from_the_tier_though_it_is_evicted_here(tmp_path: Path, keys: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    url = f"file://{share}"
    plain = SnapshotStore(tmp_path / "a", BUDGET, 0, tier=Tier(url))
    for index in range(3):
        assert put(plain, CHAIN, index)
    assert attach(plain, CHAIN.keys[2], "logits", sections_of([]), {})
    assert plain.wait_pushed(30)
    plain.close()
    store = SnapshotStore(tmp_path / "b", BUDGET, 0, tier=Tier(url), keyring=Keyring(keys))
    anna = put_all(store, "anna")
    assert store.wait_pushed(30)
    unreadable = Path(Tier(url).path(CHAIN.keys[0], CHAIN.keys[0]))
    unreadable.write_bytes(b"x" * 100)
    assert store.remove_plain() == 3
    assert {path.parent.name for path in files_in(share / "v1")} == {key.hex for key in anna.keys}
    assert store.match(anna.keys, anna.blocks) == 3
    store.close()
    again = SnapshotStore(tmp_path / "a", BUDGET, 0, tier=Tier(url))  # told by the notes on the tier
    assert again.wait_pushed(30)
    assert again.entries() == []
    again.close()


def test_another_key_in_its_place_is_a_miss_and_no_damage(
    store: SnapshotStore, folder: Path, keys: Path
) -> None:
    anna = put_all(store, "anna")
    kept = shutil.copy(keys / "tenant-anna.key", keys.parent / "kept")
    shutil.copy(keys / "tenant-ben.key", keys / "tenant-anna.key")
    assert store.match(anna.keys, anna.blocks) == 0
    assert not (folder / "quarantine").exists()
    shutil.copy(kept, keys / "tenant-anna.key")
    assert store.match(anna.keys, anna.blocks) == 3


def changed(at: int) -> Callable[[bytearray], None]:
    def change(raw: bytearray) -> None:
        raw[at] ^= 1

    return change


def other_label(raw: bytearray) -> None:
    at = raw.index(b'"prefill_s":1.5')
    raw[at : at + 15] = b'"prefill_s":9.5'


FORGERIES: dict[str, Callable[[bytearray], None]] = {
    "another parent": changed(72),
    "exact": changed(12),
    "more tokens": changed(40),
    "another salt": changed(144),
    "another tag": changed(160),
    "another label": other_label,
    "another header": changed(400),
    "another payload": changed(-40),
    "another tag of the payload": changed(-1),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_changed_file_under_good_checksums_is_put_apart(
    store: SnapshotStore, folder: Path, name: str
) -> None:
    chain = put_all(store, "anna")
    assert store.remove(chain.keys[1])
    assert put(store, chain, 1, tenant="anna", prefill_s=1.5)
    path = path_of(folder, chain.keys[1])
    raw = bytearray(path.read_bytes())
    FORGERIES[name](raw)
    path.write_bytes(reseal(raw))
    with pytest.raises(BadBlock) as caught:
        store.read(chain.keys[1], [array.data for array in arrays_of(chain.keys[1])])
    assert not isinstance(caught.value, NoKey)
    assert store.match(chain.keys, chain.blocks) == 1
    assert [path.read_bytes() for path in (folder / "quarantine").iterdir()] == [bytes(raw)]


def test_the_payload_of_another_block_of_the_tenant_is_not_taken(store: SnapshotStore, folder: Path) -> None:
    chain = put_all(store, "anna")
    one, other = (path_of(folder, key).read_bytes() for key in chain.keys[1:])
    at = int.from_bytes(one[24:32], "little")
    path_of(folder, chain.keys[1]).write_bytes(one[:at] + other[at:])
    with pytest.raises(BadBlock):
        get(store, chain.keys[1])


def test_a_cut_or_flipped_file_is_a_miss(store: SnapshotStore, folder: Path) -> None:
    chain = chain_of(store, "anna")
    assert put(store, chain, 0, tenant="anna")
    path = path_of(folder, chain.keys[0])
    whole, rng = path.read_bytes(), np.random.default_rng(3)
    lengths = [0, 12, 127, 128, 175, 176, 190, 4095, 4096, len(whole) - 16, len(whole) - 1]
    damaged = [whole[:length] for length in lengths] + [whole + b"\0"]
    for bit in [*range(0, 128 * 8, 5), *map(int, rng.integers(128 * 8, len(whole) * 8, 300))]:
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(raw))
    for raw in damaged:
        path.write_bytes(raw)
        with pytest.raises(BadBlock):
            store.read(chain.keys[0], [array.data for array in arrays_of(chain.keys[0])])
        assert store.match(chain.keys[:1], chain.blocks[:1]) == 0
    path.write_bytes(whole)
    assert store.match(chain.keys[:1], chain.blocks[:1]) == 1


def test_a_plain_block_stays_readable_once_there_are_keys(folder: Path, keys: Path) -> None:
    plain = SnapshotStore(folder, BUDGET, 0)
    assert put(plain, CHAIN, 0)
    store = SnapshotStore(folder, BUDGET, 0, keyring=Keyring(keys))
    assert store.match(CHAIN.keys, CHAIN.blocks) == 1
    assert which(get(store, CHAIN.keys[0]), CHAIN.keys[0]) == "exact"
    assert [prefix.readable for prefix in stored_prefixes(store)] == [True]


def test_a_store_without_keys_leaves_encrypted_blocks_alone(store: SnapshotStore, folder: Path) -> None:
    chain = put_all(store, "anna")
    plain = SnapshotStore(folder, BUDGET, 0)
    assert plain.match(chain.keys, chain.blocks) == 0
    assert [(p.tenant, p.num_tokens, p.readable) for p in stored_prefixes(plain)] == [("anna", 448, False)]
    assert store.match(chain.keys, chain.blocks) == 3


def test_a_folder_of_keys_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeyringError, match="mkdir -m 700"):
        Keyring(tmp_path / "keys")
    assert not (tmp_path / "keys").exists()


def test_a_folder_of_keys_that_goes_away_costs_the_reuse_alone(
    store: SnapshotStore, folder: Path, keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = put_all(store, "anna")
    keys.rename(keys.parent / "unmounted")
    assert store.match(chain.keys, chain.blocks) == 0
    assert store.salt("anna", b"") != store.salt("anna", b"")
    assert not put(store, make_chain(1, salt=store.salt("anna", b"")), 0, tenant="anna")
    assert not keys.exists()
    assert sum("nothing is restored or stored" in record.message for record in caplog.records) == 1
    (keys.parent / "unmounted").rename(keys)
    assert store.match(chain.keys, chain.blocks) == 3


@pytest.mark.parametrize("text", ["", "abc", "0" * 63, "0" * 65, "g" * 64], ids=len)
def test_a_file_that_holds_no_key_is_told_and_left_as_it_is(
    store: SnapshotStore, keys: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys / "tenant-anna.key"
    path.write_text(text)
    keyring = Keyring(keys)
    with caplog.at_level(logging.WARNING):
        assert keyring.get("anna") is None
        assert keyring.get("anna") is None
    assert [record.message for record in caplog.records if str(path) in record.message] != []
    assert len(caplog.records) == 1
    with pytest.raises(KeyringError, match="holds no key"):
        keyring.make("anna")
    assert path.read_text() == text


def test_a_key_is_made_once_and_only_its_owner_may_read_it(keys: Path) -> None:
    rings = [Keyring(keys) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda ring: ring.make("anna").id, rings))
    assert len(set(made)) == 1
    assert (keys / "tenant-anna.key").stat().st_mode & 0o777 == 0o600
    assert sorted(os.listdir(keys)) == ["lock", "tenant-anna.key"]


@pytest.mark.parametrize("tenant", ["../anna", "a/b", ".", "ä", "a" * 65, "default", "ANNA"])
def test_any_name_of_a_tenant_has_a_file_of_its_own_in_the_folder(keys: Path, tenant: str) -> None:
    keyring = Keyring(keys)
    assert keyring.make(tenant).id not in {keyring.make("").id, keyring.make("anna").id}
    assert len(list(keys.glob("*.key"))) == 3
    assert len({path.name.lower() for path in keys.parent.rglob("*.key")}) == 3
    assert keyring.remove(tenant)
    assert keyring.get(tenant) is None


def test_the_shared_tier_holds_nothing_readable_and_serves_who_has_the_key(
    tmp_path: Path, keys: Path
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    tier = f"file://{share}"
    a, b = (
        SnapshotStore(tmp_path / name, BUDGET, 0, tier=Tier(tier, retry_s=0.1), keyring=Keyring(keys))
        for name in "ab"
    )
    anna = put_all(a, "anna")
    assert a.wait_pushed(30)
    for path in files_in(share):
        assert path.read_bytes()[8:12] == b"\2\0\0\0"
    assert b.match(anna.keys, anna.blocks) == 3
    assert [which(get(b, key), key) for key in anna.keys] == ["exact"] * 3
    stranger_keys = tmp_path / "stranger's keys"
    stranger_keys.mkdir()
    c = SnapshotStore(tmp_path / "c", BUDGET, 0, tier=Tier(tier, push=False), keyring=Keyring(stranger_keys))
    assert c.match(anna.keys, anna.blocks) == 0
    assert c.entries() == []
    # Whoever may delete need not be able to read.
    assert c.remove_tenant("anna") == 3
    assert Tier(tier, push=False).blocks() == []
    a.close()
    b.close()


def test_plain_blocks_neither_go_to_the_tier_nor_come_from_it_where_there_are_keys(
    tmp_path: Path, keys: Path
) -> None:
    share = tmp_path / "share"
    share.mkdir()
    tier = f"file://{share}"
    assert put(SnapshotStore(tmp_path / "a", BUDGET, 0), CHAIN, 0)
    a = SnapshotStore(tmp_path / "a", BUDGET, 0, tier=Tier(tier), keyring=Keyring(keys))
    assert a.wait_pushed(30)
    assert files_in(share) == []
    Tier(tier).save(CHAIN.keys[0], CHAIN.keys[0], a.read_file(CHAIN.keys[0]))
    b = SnapshotStore(tmp_path / "b", BUDGET, 0, tier=Tier(tier, push=False), keyring=Keyring(keys))
    assert b.match(CHAIN.keys, CHAIN.blocks) == 0
    a.close()


def test_an_export_is_encrypted_and_needs_the_key_to_be_imported(
    store: SnapshotStore, tmp_path: Path, keys: Path
) -> None:
    chain = put_all(store, "anna")
    file = tmp_path / "anna.tar"
    assert export_prefixes(store, [chain.keys[-1]], file) == 3
    assert chain.blocks[0].tobytes()[:16] not in file.read_bytes()
    there = SnapshotStore(tmp_path / "there", BUDGET, 0, keyring=Keyring(keys))
    assert [stored for _, stored in import_prefixes(there, file)] == [True] * 3
    assert there.match(chain.keys, chain.blocks) == 3
    with pytest.raises(BadExport, match="key of tenant anna"):
        list(import_prefixes(SnapshotStore(tmp_path / "elsewhere", BUDGET, 0), file))
