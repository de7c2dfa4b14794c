from __future__ import annotations

from pathlib import Path

import pytest
from stored_blocks import Chain, files_in, make_chain, path_of, put, sections_of

from cache_store import SnapshotStore, attach, attached

BUDGET = 64 << 20
TENANTS = {"anna": 3, "ben": 2}


def chain_of(tenant: str) -> Chain:
    """The same document for every tenant."""
    return make_chain(3, salt=tenant.encode())


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    store = SnapshotStore(tmp_path, BUDGET, 0)
    for tenant, num_blocks in TENANTS.items():
        for index in range(num_blocks):
            assert put(store, chain_of(tenant), index, tenant=tenant)
    return store


def test_two_tenants_never_match_each_others_blocks(store: SnapshotStore) -> None:
    for tenant, num_blocks in TENANTS.items():
        chain = chain_of(tenant)
        assert store.match(chain.keys, chain.blocks) == num_blocks
    for stranger in ("", "carl", "anna\0", "ann"):
        chain = chain_of(stranger)
        assert store.match(chain.keys, chain.blocks) == 0
    assert not set(chain_of("anna").keys) & set(chain_of("ben").keys)


def test_blocks_are_listed_by_tenant(store: SnapshotStore) -> None:
    for tenant, num_blocks in TENANTS.items():
        keys = {entry.key for entry in store.entries() if entry.tenant == tenant}
        assert keys == set(chain_of(tenant).keys[:num_blocks])


def test_deleting_a_tenant_leaves_nothing_of_it_anywhere(store: SnapshotStore, tmp_path: Path) -> None:
    anna, ben = chain_of("anna"), chain_of("ben")
    assert attach(store, anna.keys[0], "logits", sections_of([]), {})
    assert attach(store, ben.keys[0], "logits", sections_of([]), {})
    store.pin(anna.keys[1])
    store.pin(ben.keys[1])
    payload, header = path_of(tmp_path, anna.keys[2]), path_of(tmp_path, ben.keys[1])
    for path, offset in ((payload, 4100), (header, 130)):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"damage")
    store.match(ben.keys, ben.blocks)
    with pytest.raises(Exception, match="checksum of section"):
        store.read(anna.keys[2], [memoryview(bytearray(n)) for n in (70, 6, 0, 4, 129)])
    assert len(list((tmp_path / "quarantine").iterdir())) == 2
    assert store.remove_tenant("anna") == 3  # two blocks and an attachment; the third lies in quarantine
    # What can't say whose it is goes too: it might be hers.
    assert list((tmp_path / "quarantine").iterdir()) == []
    assert store.match(anna.keys, anna.blocks) == 0
    assert attached(store, anna.keys[0], "logits") is None
    assert {entry.tenant for entry in store.entries()} == {"ben"}
    assert store.pins() == {ben.keys[1]}
    assert not any(b"anna" in path.read_bytes() for path in files_in(tmp_path))
    assert attached(store, ben.keys[0], "logits") is not None
    assert {entry.tenant for entry in SnapshotStore(tmp_path, BUDGET, 0).entries()} == {"ben"}


def test_another_tenants_quarantined_block_stays(store: SnapshotStore, tmp_path: Path) -> None:
    ben = chain_of("ben")
    with path_of(tmp_path, ben.keys[1]).open("r+b") as file:
        file.seek(4100)
        file.write(b"damage")
    with pytest.raises(Exception, match="checksum of section"):
        store.read(ben.keys[1], [memoryview(bytearray(n)) for n in (70, 6, 0, 4, 129)])
    assert store.remove_tenant("anna") == 3
    assert len(list((tmp_path / "quarantine").iterdir())) == 1
    assert store.remove_tenant("ben") == 1
    assert list((tmp_path / "quarantine").iterdir()) == []
