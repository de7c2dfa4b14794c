from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from stored_blocks import Array, disk_usage, files_in, make_chain, put

from cache_store import BadBlock, BlockKey, Section, SnapshotStore

KEY, OTHER = make_chain(2).keys
META = {"first_token": 0, "tenant": "anna"}
DAY_S = 86_400


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path, 1 << 20, 0)


def layer_array(layer: int, key: BlockKey = KEY) -> Array:
    return np.random.default_rng([*key.digest, layer]).integers(0, 1 << 32, (3, 2, 50), dtype=np.uint32)


def hidden_arrays(layer: int, key: BlockKey = KEY) -> list[Array]:
    rng = np.random.default_rng([*key.digest, layer, 1])
    return [rng.random((tokens, 16)).astype(np.float16) for tokens in (64, 64, 7)]


def sections(arrays: list[Array]) -> list[Section]:
    return [Section(f"part.{i}", str(a.dtype), a.shape, a.data) for i, a in enumerate(arrays)]


def save(store: SnapshotStore, first: int, layer: int, key: BlockKey = KEY) -> bool:
    """A checkpoint at a layer, of which the layers before `first` are stored already."""
    layers = [
        store.checkpoints.save_layer(key, n, sections([layer_array(n, key)]), META)
        for n in range(first, layer)
    ]
    return all(layers) and store.checkpoints.save_hidden(
        key, layer, sections(hidden_arrays(layer, key)), META
    )


def restored_at(store: SnapshotStore, key: BlockKey = KEY) -> int:
    """The layer at which prefill goes on, everything before it read and compared; 0 where nothing is."""
    at = store.checkpoints.resume(key)
    if at is None:
        return 0
    try:
        for n in range(at.layer):
            tiles = np.zeros_like(layer_array(n, key))
            store.checkpoints.read_layer(key, n, [tiles.data])
            assert np.array_equal(tiles, layer_array(n, key)), "wrong tiles"
        chunks = [np.zeros(section.shape, section.dtype) for section in at.hidden]
        store.checkpoints.read_hidden(key, at.layer, [chunk.data for chunk in chunks])
    except BadBlock:
        return 0
    wanted = hidden_arrays(at.layer, key)
    assert all(map(np.array_equal, chunks, wanted)), "wrong hidden states"
    assert at.meta == META
    return at.layer


def parts(folder: Path) -> list[str]:
    return sorted(path.name[33:] for path in (folder / "checkpoints").iterdir())


def test_a_prefill_goes_on_from_its_last_checkpoint(store: SnapshotStore, tmp_path: Path) -> None:
    assert restored_at(store) == 0
    assert save(store, 0, 2)
    assert restored_at(store) == 2
    assert save(store, 2, 3)
    assert restored_at(SnapshotStore(tmp_path, 1 << 20, 0)) == 3
    assert restored_at(store, OTHER) == 0
    assert store.checkpoints.remove(KEY) == 5
    assert restored_at(store) == 0
    assert files_in(tmp_path) == []
    assert store.total_bytes == 0


def test_a_layer_is_written_once(store: SnapshotStore, tmp_path: Path) -> None:
    assert save(store, 0, 2)
    before = {path: path.stat().st_ino for path in files_in(tmp_path)}
    assert save(store, 0, 2)
    assert {path: path.stat().st_ino for path in files_in(tmp_path)} == before


def test_hidden_states_take_the_place_of_those_of_the_save_before_the_last(
    store: SnapshotStore, tmp_path: Path
) -> None:
    def hidden() -> dict[str, int]:
        return {path.name[33:45]: path.stat().st_ino for path in (tmp_path / "checkpoints").glob("*hidden*")}

    assert save(store, 0, 2)
    assert save(store, 2, 3)
    before = hidden()
    assert save(store, 3, 4)
    assert hidden() == {"hidden-00003": before["hidden-00003"], "hidden-00004": before["hidden-00002"]}
    assert restored_at(store) == 4


def test_where_the_last_save_is_torn_the_one_before_stands(store: SnapshotStore, tmp_path: Path) -> None:
    assert save(store, 0, 2)
    assert save(store, 2, 3)
    path = tmp_path / "checkpoints" / f"{KEY}.hidden-00003.llkv"
    path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    assert restored_at(store) == 0
    assert restored_at(store) == 2
    assert save(store, 2, 3)
    assert restored_at(store) == 3


def test_layers_beyond_the_hidden_states_do_not_count(store: SnapshotStore) -> None:
    assert save(store, 0, 2)
    assert store.checkpoints.save_layer(KEY, 2, sections([layer_array(2)]), META)
    assert restored_at(store) == 2


def test_hidden_states_without_every_layer_before_them_are_refused(store: SnapshotStore) -> None:
    assert save(store, 0, 1)
    assert not store.checkpoints.save_hidden(KEY, 3, sections(hidden_arrays(3)), META)
    assert restored_at(store) == 1


@pytest.mark.parametrize("part", ["hidden-00002", "layer-00000", "layer-00001"])
def test_a_damaged_part_ends_the_checkpoint_and_can_be_written_again(
    store: SnapshotStore, tmp_path: Path, part: str
) -> None:
    rng = np.random.default_rng(5)
    for _ in range(60):
        assert save(store, 0, 2)
        path = tmp_path / "checkpoints" / f"{KEY}.{part}.llkv"
        raw = bytearray(path.read_bytes())
        if rng.integers(2):
            raw[rng.integers(len(raw))] ^= 1 << int(rng.integers(8))
        else:
            del raw[int(rng.integers(len(raw))) :]
        path.write_bytes(raw)
        assert restored_at(store) == 0
    assert save(store, 0, 2)
    assert restored_at(store) == 2


def test_a_part_under_the_name_of_another_is_no_part(store: SnapshotStore, tmp_path: Path) -> None:
    assert save(store, 0, 2)
    folder = tmp_path / "checkpoints"
    first, second = (folder / f"{KEY}.layer-0000{n}.llkv" for n in range(2))
    first.write_bytes(second.read_bytes())
    assert restored_at(store) == 0
    (folder / f"{OTHER}.layer-00000.llkv").write_bytes(second.read_bytes())
    assert restored_at(store, OTHER) == 0


def test_checkpoints_count_and_go_before_any_block_the_oldest_first(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 20 * 4096, 0)
    assert save(store, 0, 1)
    assert save(store, 0, 1, OTHER)
    for path in (tmp_path / "checkpoints").glob(f"{OTHER}*"):
        os.utime(path, (0, 0))
    assert store.total_bytes == disk_usage(tmp_path) == sum(store.checkpoints.keys().values()) > 4 * 4096
    number = 0
    while restored_at(store, OTHER):
        assert put(store, make_chain(1, number), 0)
        number += 1
    assert restored_at(store) == 1
    while restored_at(store):
        assert put(store, make_chain(1, number), 0)
        number += 1
    assert len(store.entries()) == number
    assert disk_usage(tmp_path) <= 20 * 4096


def test_a_checkpoint_does_not_push_out_its_own_parts(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 4 * 8192, 0)
    assert save(store, 0, 2)
    assert not save(store, 2, 9)
    assert restored_at(store) == 2
    assert disk_usage(tmp_path) <= 4 * 8192


def test_hidden_states_need_no_room_beside_those_whose_place_they_take(tmp_path: Path) -> None:
    num_bytes = 4 * 8192 + 2 * 12288  # a block, three layers, twice the hidden states
    store = SnapshotStore(tmp_path, num_bytes, 0)
    assert put(store, make_chain(1), 0)
    for layer in range(3):
        assert save(store, layer, layer + 1)
    assert disk_usage(tmp_path) == num_bytes
    assert len(store.entries()) == 1


@pytest.mark.parametrize("days", [4, -4])
def test_an_abandoned_checkpoint_expires_at_the_next_start(tmp_path: Path, days: int) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    assert save(store, 0, 2)
    assert save(store, 0, 2, OTHER)
    for path in (tmp_path / "checkpoints").glob(f"{KEY}*"):
        when = path.stat().st_mtime - days * DAY_S
        os.utime(path, (when, when))
    again = SnapshotStore(tmp_path, 1 << 20, 0)
    assert restored_at(again) == 0
    assert restored_at(again, OTHER) == 2
    assert set(again.checkpoints.keys()) == {OTHER}


def test_one_part_that_was_added_lately_keeps_the_whole_checkpoint(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, 1 << 20, 0)
    assert save(store, 0, 2)
    os.utime(tmp_path / "checkpoints" / f"{KEY}.layer-00000.llkv", (0, 0))
    assert store.checkpoints.remove_expired() == 0
    assert restored_at(store) == 2


def test_a_checkpoint_is_no_block(store: SnapshotStore) -> None:
    assert save(store, 0, 2)
    chain = make_chain(2)
    assert store.entries() == []
    assert store.match(chain.keys, chain.blocks) == 0
    assert store.info(KEY) is None


def test_a_tenants_checkpoints_are_deleted_with_it(store: SnapshotStore, tmp_path: Path) -> None:
    assert save(store, 0, 2)
    assert store.checkpoints.save_layer(OTHER, 0, sections([layer_array(0)]), {"tenant": "ben"})
    assert store.remove_tenant("anna") == 0
    assert parts(tmp_path) == ["layer-00000.llkv"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_costs_the_checkpoint_alone(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert save(store, 0, 1)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fail)
        assert not save(store, 1, 2)
    assert restored_at(store) == 1
    assert save(store, 1, 2)
    assert restored_at(store) == 2
