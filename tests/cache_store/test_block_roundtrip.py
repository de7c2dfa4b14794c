from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from stored_blocks import Array, arrays_of, files_in, get, make_chain, path_of, put, same, sections_of

from cache_store import BlockKey, MissingBlock, Section, SnapshotStore, chain_keys

GOLDEN = Path(__file__).parent / "golden" / "v1.llkv"


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path, budget_bytes=64 << 20, min_free_bytes=0)


def test_a_block_comes_back_as_it_was_written(store: SnapshotStore) -> None:
    chain = make_chain(3)
    for index in range(3):
        assert put(store, chain, index, exact=index < 2)
    assert store.match(chain.keys, chain.blocks) == 3
    for index, key in enumerate(chain.keys):
        info = store.info(key)
        assert info is not None
        assert (info.key, info.exact, info.num_tokens) == (key, index < 2, chain.blocks[index].size)
        assert info.parent == (chain.keys[index - 1] if index else None)
        assert np.array_equal(info.token_ids, chain.blocks[index])
        assert info.meta == {"index": index}
        assert same(get(store, key), arrays_of(key, index < 2))


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.zeros((0,), np.uint8)],
        [np.array(7, np.int64)],
        [np.arange(24, dtype=np.float32).reshape(1, 2, 1, 3, 1, 4, 1, 1)],
        [np.arange(63, dtype=np.uint8), np.arange(64, dtype=np.uint8), np.arange(65, dtype=np.uint8)],
        [np.zeros((3, 0, 5), np.float16), np.arange(5, dtype=np.uint16), np.zeros(0, bool)],
        [np.random.default_rng(1).integers(0, 256, 3 * (256 << 10) + 17, dtype=np.uint8)],
        [np.arange(i % 7, dtype=np.uint32) for i in range(1500)],
    ],
    ids=[
        "none",
        "empty",
        "scalar",
        "8 dims",
        "around 64",
        "empties between",
        "several pieces",
        "1500 sections",
    ],
)
def test_odd_shapes_come_back(store: SnapshotStore, arrays: Sequence[Array]) -> None:
    chain = make_chain(1)
    sections = [Section(f"s{i}", str(a.dtype), a.shape, a.data) for i, a in enumerate(arrays)]
    assert store.write(chain.keys[0], None, chain.blocks[0], sections, True, {})
    assert store.match(chain.keys, chain.blocks) == 1
    assert same(get(store, chain.keys[0]), arrays)
    info = store.info(chain.keys[0])
    assert info is not None
    assert [(s.name, s.dtype, s.shape) for s in info.sections] == [
        (s.name, s.dtype, s.shape) for s in sections
    ]


def test_a_block_of_no_tokens_and_unicode_metadata_comes_back(store: SnapshotStore) -> None:
    (key,) = chain_keys("m", b"", [np.zeros(0, np.uint32)])
    meta = {"näme": ["雪", None, 1.5, {"a": True}]}
    assert store.write(key, None, np.zeros(0, np.uint32), [], False, meta)
    info = store.info(key)
    assert info is not None
    assert (info.num_tokens, info.meta, info.exact) == (0, meta, False)


@pytest.mark.parametrize("step", [1, 7, 4096])
def test_short_reads_and_writes_are_continued(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    write, read = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: write(fd, [views[0][:step]], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: read(fd, [views[0][:step]], offset))
    chain = make_chain(1)
    assert put(store, chain, 0)
    assert same(get(store, chain.keys[0]), arrays_of(chain.keys[0]))


def golden_arguments() -> tuple[BlockKey, BlockKey, Array, list[Section], dict[str, object]]:
    blocks = [np.arange(5, dtype=np.uint32), np.array([1, 2**32 - 1, 0], np.uint32)]
    parent, key = chain_keys("golden", b"salt", blocks)
    arrays: list[Array] = [
        np.arange(70, dtype=np.uint8).reshape(2, 5, 7),
        np.array([0.5, -2.0, 65504.0], np.float16),
        np.zeros((0, 4), np.float32),
    ]
    return key, parent, blocks[1], sections_of(arrays), {"layers": 2, "name": "ü"}


def test_the_golden_file_of_version_1_reads_back(store: SnapshotStore, tmp_path: Path) -> None:
    key, parent, ids, sections, meta = golden_arguments()
    path = path_of(tmp_path, key)
    path.parent.mkdir(parents=True)
    path.write_bytes(GOLDEN.read_bytes())
    assert store.match([key], [ids]) == 1
    info = store.info(key)
    assert info is not None
    assert (info.parent, info.exact, info.meta) == (parent, True, meta)
    found = [bytearray(section.data.nbytes) for section in sections]
    store.read(key, [memoryview(buffer) for buffer in found])
    assert [bytes(buffer) for buffer in found] == [section.data.tobytes() for section in sections]


def test_writing_the_golden_block_gives_the_golden_bytes(store: SnapshotStore, tmp_path: Path) -> None:
    key, parent, ids, sections, meta = golden_arguments()
    assert store.write(parent, None, np.arange(5, dtype=np.uint32), [], True, {})
    assert store.write(key, parent, ids, sections, True, meta)
    assert path_of(tmp_path, key).read_bytes() == GOLDEN.read_bytes()


@pytest.mark.parametrize(
    ("section", "named"),
    [
        (Section("", "uint8", (1,), memoryview(b"a")), "name"),
        (Section("a\0", "uint8", (1,), memoryview(b"a")), "name"),
        (Section("n" * 49, "uint8", (1,), memoryview(b"a")), "name"),
        (Section("s", "complex64", (1,), memoryview(bytes(8))), "complex64"),
        (Section("s", "uint8", (2,), memoryview(b"a")), "2 contiguous bytes"),
        (Section("s", "uint8", (2,), memoryview(b"abcd")[::2]), "2 contiguous bytes"),
        (Section("s", "uint8", (1,) * 9, memoryview(b"a")), "8 dimensions"),
        (Section("s", "uint8", (-1,), memoryview(b"a")), "8 dimensions"),
    ],
)
def test_a_section_that_does_not_fit_the_format_is_refused(
    store: SnapshotStore, tmp_path: Path, section: Section, named: str
) -> None:
    chain = make_chain(1)
    with pytest.raises(ValueError, match=named):
        store.write(chain.keys[0], None, chain.blocks[0], [section], True, {})
    assert files_in(tmp_path) == []


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": "long" * (5 << 20)}])
def test_metadata_that_does_not_fit_is_refused(store: SnapshotStore, meta: dict[str, object]) -> None:
    chain = make_chain(1)
    with pytest.raises(ValueError, match=r"JSON|header"):
        store.write(chain.keys[0], None, chain.blocks[0], [], True, meta)


def test_reading_what_is_not_there_says_so(store: SnapshotStore) -> None:
    key = make_chain(1).keys[0]
    assert store.info(key) is None
    with pytest.raises(MissingBlock, match=key.hex):
        store.read(key, [])


def test_a_buffer_that_cannot_be_filled_is_the_callers_fault(store: SnapshotStore, tmp_path: Path) -> None:
    chain = make_chain(1)
    put(store, chain, 0)
    with pytest.raises(ValueError, match="writable"):
        store.read(chain.keys[0], [memoryview(b"fixed")])
    assert path_of(tmp_path, chain.keys[0]).exists()


def test_a_block_is_written_once_and_costs_its_size(
    store: SnapshotStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = os.pwritev

    def counting(fd: int, views: Sequence[memoryview], offset: int) -> int:
        written.append(write(fd, views, offset))
        return written[-1]

    monkeypatch.setattr(os, "pwritev", counting)
    chain = make_chain(1)
    assert put(store, chain, 0, pad_bytes=1 << 20)
    assert sum(written) == path_of(tmp_path, chain.keys[0]).stat().st_size < 1.05 * (1 << 20)
    assert put(store, chain, 0, pad_bytes=1 << 20)
    assert put(store, chain, 0, exact=False, pad_bytes=1 << 20)
    assert sum(written) == path_of(tmp_path, chain.keys[0]).stat().st_size
