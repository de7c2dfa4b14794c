from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from stored_blocks import arrays_of, files_in, get, make_chain, path_of, put, reseal, same

from cache_store import BadBlock, SnapshotStore

CHAIN = make_chain(1)
KEY = CHAIN.keys[0]
TABLE = 128 + 4 * CHAIN.blocks[0].size
META = TABLE + 5 * 128
PAYLOAD = 4096
SECTION_EDGES = [4096, 4096 + 70, 4096 + 128, 4096 + 134, 4096 + 192, 4096 + 196, 4096 + 256, 4096 + 385]
PRELUDE_FIELDS = [0, 8, 12, 16, 24, 32, 40, 44, 48, 56, 72, 88, 112, 120, 128]


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path, budget_bytes=64 << 20, min_free_bytes=0)


@pytest.fixture
def whole(store: SnapshotStore, tmp_path: Path) -> bytes:
    """The bytes of the block, as written."""
    assert put(store, CHAIN, 0)
    raw = path_of(tmp_path, KEY).read_bytes()
    assert len(raw) == SECTION_EDGES[-1]
    assert get(store, KEY)
    return raw


def is_refused(store: SnapshotStore, folder: Path, raw: bytes) -> bool:
    """Put these bytes in the block's place; True if nothing reads them, and only BadBlock is raised."""
    path_of(folder, KEY).write_bytes(raw)
    matched = store.match(CHAIN.keys, CHAIN.blocks)
    arrays = arrays_of(KEY)
    filled = [np.empty_like(array) for array in arrays]
    try:
        store.read(KEY, [array.data for array in filled])
    except BadBlock:
        assert store.match(CHAIN.keys, CHAIN.blocks) == 0
        assert store.info(KEY) is None
        return True
    assert matched == 1
    assert same(filled, arrays), "wrong bytes were returned"
    return False


def test_a_block_cut_at_any_edge_is_a_miss(store: SnapshotStore, tmp_path: Path, whole: bytes) -> None:
    edges = [*PRELUDE_FIELDS, TABLE, META, *range(TABLE, META, 128), *SECTION_EDGES, len(whole) // 2]
    lengths = {edge + delta for edge in edges for delta in (-1, 0, 1)} & set(range(len(whole)))
    for length in sorted(lengths):
        assert is_refused(store, tmp_path, whole[:length]), length
        assert not path_of(tmp_path, KEY).exists(), length
    assert len(lengths) > 70


def test_a_block_with_bytes_added_is_a_miss(store: SnapshotStore, tmp_path: Path, whole: bytes) -> None:
    for tail in (b"\0", b"x", bytes(4096), whole):
        assert is_refused(store, tmp_path, whole + tail)


def test_any_flipped_bit_is_a_miss(store: SnapshotStore, tmp_path: Path, whole: bytes) -> None:
    rng = np.random.default_rng(20)
    regions = [(128, TABLE), (TABLE, META), (META, PAYLOAD), (PAYLOAD, len(whole))]
    bits = [*range(128 * 8), *(int(bit) for a, b in regions for bit in rng.integers(a * 8, b * 8, 250))]
    for bit in bits:
        raw = bytearray(whole)
        raw[bit // 8] ^= 1 << bit % 8
        assert is_refused(store, tmp_path, bytes(raw)), f"bit {bit}"


def test_any_overwritten_stretch_is_a_miss(store: SnapshotStore, tmp_path: Path, whole: bytes) -> None:
    rng = np.random.default_rng(21)
    for _ in range(300):
        start, length = int(rng.integers(0, len(whole))), int(rng.integers(1, 600))
        raw = bytearray(whole)
        stretch = len(raw[start : start + length])
        raw[start : start + length] = (
            rng.integers(0, 256, stretch, np.uint8).tobytes() if length % 2 else bytes(stretch)
        )
        if bytes(raw) != whole:
            assert is_refused(store, tmp_path, bytes(raw)), (start, length)


def with_field(offset: int, size: int, value: int) -> Callable[[bytearray], None]:
    def change(raw: bytearray) -> None:
        raw[offset : offset + size] = value.to_bytes(size, "little")

    return change


def grown(offset: int, size: int, value: int, row_bytes: int) -> Callable[[bytearray], None]:
    """A count that lies together with every size that follows from it."""

    def change(raw: bytearray) -> None:
        old = int.from_bytes(raw[offset : offset + size], "little")
        header_bytes = int.from_bytes(raw[16:24], "little") + (value - old) * row_bytes
        raw[offset : offset + size] = value.to_bytes(size, "little")
        raw[16:24] = header_bytes.to_bytes(8, "little")
        raw[24:32] = (-(-header_bytes // 4096) * 4096).to_bytes(8, "little")

    return change


def with_meta(text: bytes) -> Callable[[bytearray], None]:
    def change(raw: bytearray) -> None:
        raw[META:PAYLOAD] = text.ljust(PAYLOAD - META, b"\0")
        raw[48:56] = len(text).to_bytes(8, "little")
        raw[16:24] = (META + len(text)).to_bytes(8, "little")

    return change


def lies() -> Iterator[tuple[str, Callable[[bytearray], None]]]:
    for name, offset, size in [
        ("flags", 12, 4), ("header_bytes", 16, 8), ("payload_bytes", 32, 8),
        ("num_tokens", 40, 4), ("num_sections", 44, 4), ("meta_bytes", 48, 8), ("reserved", 88, 8),
    ]:  # fmt: skip
        for value in (1 << 31, (1 << 8 * size) - 1):
            yield f"{name}={value:#x}", with_field(offset, size, value)
    yield "version 0", with_field(8, 4, 0)
    yield "key of another block", with_field(56, 8, 7)
    yield "4 GiB of tokens", grown(40, 4, 1 << 30, 4)
    yield "sections up to 512 GiB", grown(44, 4, (1 << 32) - 1, 128)
    yield "metadata of 1 TiB", grown(48, 8, 1 << 40, 1)
    yield "one token fewer", with_field(40, 4, CHAIN.blocks[0].size - 1)
    for row in (0, 2, 4):
        at = TABLE + 128 * row
        yield f"row {row}: 9 dims", with_field(at + 64, 4, 9)
        yield f"row {row}: reserved", with_field(at + 68, 4, 1)
        yield f"row {row}: shape", with_field(at + 72, 4, 0xFFFFFFFF)
        yield f"row {row}: shape beyond dims", with_field(at + 100, 4, 1)
        for value in (0, 1, 4096 + 64, 1 << 40, (1 << 64) - 64):
            yield (
                f"row {row}: offset {value}",
                with_field(at + 104, 8, value + (value == 4096 + 64 and row * 999)),
            )
            yield f"row {row}: size {value}", with_field(at + 112, 8, value + (value == 0 and row == 2))
        yield f"row {row}: dtype", with_field(at + 48, 8, 0x6161616161616161)
        yield f"row {row}: name", with_field(at, 2, 0xFFFF)
    for text in (b"", b"[1]", b"{", b'{"a":1}x', b"\xff\xfe", b"[" * 1200, b"null"):
        yield f"meta {text[:8]!r}", with_meta(text)


LIES = dict(lies())


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_under_good_checksums_is_a_miss(
    store: SnapshotStore, tmp_path: Path, whole: bytes, name: str
) -> None:
    raw = bytearray(whole)
    LIES[name](raw)
    tracemalloc.start()
    try:
        assert is_refused(store, tmp_path, reseal(raw))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0" * 8192, b"LLKV", b"LLKV\n\x1a\n" + bytes(8000), b"GGUF\3\0\0\0" + bytes(8000), b"{" * 5000],
    ids=["empty", "zeros", "short", "line ends converted", "gguf", "text"],
)
def test_a_foreign_file_is_a_miss(store: SnapshotStore, tmp_path: Path, whole: bytes, raw: bytes) -> None:
    assert is_refused(store, tmp_path, raw)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_regular_file_is_a_miss(
    store: SnapshotStore, tmp_path: Path, whole: bytes, kind: str
) -> None:
    path = path_of(tmp_path, KEY)
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(elsewhere)
    else:
        os.mkfifo(path)
    assert store.match(CHAIN.keys, CHAIN.blocks) == 0
    assert store.info(KEY) is None
    with pytest.raises(BadBlock):
        store.read(KEY, [])


def test_a_block_under_the_name_of_another_is_a_miss(
    store: SnapshotStore, tmp_path: Path, whole: bytes
) -> None:
    other = make_chain(1, seed=5)
    path = path_of(tmp_path, other.keys[0])
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(whole)
    assert store.match(other.keys, other.blocks) == 0
    assert not path.exists()
    assert store.match(CHAIN.keys, CHAIN.blocks) == 1


def test_a_block_with_other_token_ids_or_another_parent_is_a_miss(
    store: SnapshotStore, tmp_path: Path
) -> None:
    chain = make_chain(3)
    for index in range(3):
        put(store, chain, index)
    wrong = [chain.blocks[0], chain.blocks[1] + np.uint32(1), chain.blocks[2]]
    assert store.match(chain.keys, wrong) == 1
    assert not path_of(tmp_path, chain.keys[1]).exists()
    stranger = make_chain(1, seed=9)
    assert put(store, stranger, 0)
    assert store.write(chain.keys[1], stranger.keys[0], chain.blocks[1], [], True, {})
    assert store.match(chain.keys, chain.blocks) == 1
    assert not path_of(tmp_path, chain.keys[1]).exists()


def test_a_later_format_version_is_a_miss_and_stays(
    store: SnapshotStore, tmp_path: Path, whole: bytes
) -> None:
    raw = bytearray(whole)
    raw[8:12] = (3).to_bytes(4, "little")
    for later in (bytes(raw), reseal(raw), bytes(raw[:40])):
        assert is_refused(store, tmp_path, later)
        assert not put(store, CHAIN, 0)
        assert path_of(tmp_path, KEY).read_bytes() == later
    assert SnapshotStore(tmp_path, 64 << 20, 0).match(CHAIN.keys, CHAIN.blocks) == 0
    assert files_in(tmp_path) == [path_of(tmp_path, KEY)]


def test_buffers_of_other_sizes_than_the_block_are_a_miss(
    store: SnapshotStore, tmp_path: Path, whole: bytes
) -> None:
    with pytest.raises(BadBlock, match="section sizes"):
        store.read(KEY, [memoryview(bytearray(70))])
    assert store.match(CHAIN.keys, CHAIN.blocks) == 0


def test_a_bad_block_is_kept_apart_and_its_place_is_free(
    store: SnapshotStore, tmp_path: Path, whole: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    raw = bytearray(whole)
    raw[4400] ^= 1
    path_of(tmp_path, KEY).write_bytes(raw)
    with pytest.raises(BadBlock) as caught:
        store.read(KEY, [array.data for array in arrays_of(KEY)])
    error = caught.value
    assert error.path == path_of(tmp_path, KEY)
    assert str(error.expected) in str(error)
    assert str(error.found) in str(error)
    assert "layers.1.k" in str(error)
    assert [path.read_bytes() for path in (tmp_path / "quarantine").iterdir()] == [bytes(raw)]
    assert "bad block" in caplog.text
    assert put(store, CHAIN, 0)
    assert same(get(store, KEY), arrays_of(KEY))


def test_quarantine_is_bounded_and_drops_the_oldest(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path, budget_bytes=64 << 20, min_free_bytes=0, quarantine_bytes=5 * 8192)
    keys = []
    for seed in range(9):
        chain = make_chain(1, seed)
        put(store, chain, 0)
        keys.append(chain.keys[0])
        with path_of(tmp_path, keys[-1]).open("r+b") as file:
            file.seek(4100)
            file.write(b"damage")
        with pytest.raises(BadBlock):
            get(store, keys[-1])
    kept = sorted((path.name.split(".")[1], path.name[:32]) for path in (tmp_path / "quarantine").iterdir())
    assert [key for _, key in kept] == [key.hex for key in keys[4:]]


def test_damage_found_while_indexing_is_put_apart(store: SnapshotStore, tmp_path: Path, whole: bytes) -> None:
    path_of(tmp_path, KEY).write_bytes(whole[:-1])
    again = SnapshotStore(tmp_path, budget_bytes=64 << 20, min_free_bytes=0)
    assert again.entries() == []
    assert not path_of(tmp_path, KEY).exists()
    assert again.total_bytes == 8192  # in quarantine, and counted


def test_the_table_of_the_damage_tests_is_where_they_think(whole: bytes) -> None:
    assert whole[TABLE : TABLE + 10] == b"layers.0.k"
    assert json.loads(whole[META:PAYLOAD].rstrip(b"\0")) == {"index": 0}
