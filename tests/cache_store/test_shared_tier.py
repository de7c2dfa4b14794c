from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from faults import damage
from faulty_tier import FaultyFiles
from stored_blocks import (
    Chain,
    disk_usage,
    files_in,
    get,
    make_chain,
    path_of,
    put,
    sections_of,
    which,
)

from cache_store import SnapshotStore, Tier, TierDown, attach, attached, remove_prefix
from cache_store.doubt import quarantine_chain

BUDGET = 64 << 20
LIMIT_S = 60.0
LOGITS = np.arange(32, dtype=np.float32)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "Shared Disk #1 %20 [x]? é"
    folder.mkdir()
    return folder


OPENED: list[SnapshotStore] = []


@pytest.fixture(autouse=True)
def no_fault_and_no_store_outlives_its_test() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().close()
    FaultyFiles.meet = staticmethod(lambda operation, path: None)
    FaultyFiles.cut_writes = False


def opened(folder: Path, url: str, budget: int = BUDGET, **times: float) -> SnapshotStore:
    patient = {"answer_s": LIMIT_S, "request_s": LIMIT_S, "retry_s": 0.01}
    OPENED.append(SnapshotStore(folder, budget, 0, tier=Tier(url, **(patient | times))))
    return OPENED[-1]


def put_all(store: SnapshotStore, chain: Chain, tenant: str = "", pushed: bool = True) -> None:
    for index in range(len(chain.keys)):
        assert put(store, chain, index, tenant=tenant)
    assert attach(store, chain.keys[-1], "logits", sections_of([LOGITS]), {})
    if pushed:
        assert store.wait_pushed(LIMIT_S)


def check_all(store: SnapshotStore, chain: Chain) -> None:
    assert store.match(chain.keys, chain.blocks) == len(chain.keys)
    assert [which(get(store, key), key) for key in chain.keys] == ["exact"] * len(chain.keys)
    found = attached(store, chain.keys[-1], "logits")
    assert found is not None
    assert bytes(found[1][0]) == LOGITS.tobytes()


def tier_files(shared: Path) -> list[Path]:
    return [path for path in files_in(shared) if path.suffix == ".llkv"]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_what_one_store_computed_another_restores_bit_for_bit(
    tmp_path: Path, shared: Path, kind: str
) -> None:
    url = f"file://{shared}" if kind == "file" else f"memory:/{tmp_path}"
    chain = make_chain(9)
    put_all(opened(tmp_path / "a", url), chain)
    check_all(opened(tmp_path / "b", url), chain)
    for key in chain.keys:
        assert path_of(tmp_path / "a", key).read_bytes() == path_of(tmp_path / "b", key).read_bytes()


def test_a_chain_goes_on_on_the_tier_where_it_ends_here(tmp_path: Path, shared: Path) -> None:
    url, chain = f"file://{shared}", make_chain(6)
    put_all(opened(tmp_path / "a", url), chain)
    b = opened(tmp_path / "b", url)
    b.match(chain.keys[:2], chain.blocks[:2])
    assert len(b.entries()) == 2
    longer = make_chain(8)
    assert longer.keys[:6] == chain.keys
    assert b.match(longer.keys, longer.blocks) == 6


def test_without_a_tier_nothing_is_asked_elsewhere(tmp_path: Path) -> None:
    store, chain = SnapshotStore(tmp_path, BUDGET, 0), make_chain(2)
    assert store.match(chain.keys, chain.blocks) == 0
    assert store.wait_pushed(0)


def test_blocks_stored_before_there_was_a_tier_are_pushed_at_a_start(tmp_path: Path, shared: Path) -> None:
    url, chain = f"file://{shared}", make_chain(3)
    put_all(SnapshotStore(tmp_path / "a", BUDGET, 0), chain)
    assert opened(tmp_path / "a", url).wait_pushed(LIMIT_S)
    check_all(opened(tmp_path / "b", url), chain)


def test_an_address_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(TierDown, match="nosuch://"):
        Tier("nosuch://somewhere")


def test_a_share_that_is_not_mounted_is_not_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, chain = opened(tmp_path / "a", f"file://{tmp_path}/nas/longleaf"), make_chain(2)
    put_all(store, chain, pushed=False)
    assert not store.wait_pushed(0.2)
    assert not (tmp_path / "nas").exists()
    assert sum("mount what it is on" in record.message for record in caplog.records) == 1
    check_all(store, chain)


@pytest.mark.parametrize("operation", ["ls", "pipe", "mv"])
def test_what_could_not_be_pushed_is_logged_once_and_pushed_later(
    tmp_path: Path, shared: Path, caplog: pytest.LogCaptureFixture, operation: str
) -> None:
    num_failed, enough = 0, threading.Event()

    def meet(name: str, path: str) -> None:
        nonlocal num_failed
        if name == operation and num_failed < 5:
            num_failed += 1
            if num_failed == 5:
                enough.set()
            raise ConnectionError("no route to host")

    FaultyFiles.meet = staticmethod(meet)
    with caplog.at_level(logging.WARNING):
        store, chain = opened(tmp_path / "a", f"faulty://{shared}"), make_chain(3)
        put_all(store, chain)
    assert enough.is_set()
    assert sum("no route to host" in record.message for record in caplog.records) == 1
    check_all(opened(tmp_path / "b", f"file://{shared}"), chain)


def test_a_push_that_dies_half_way_leaves_nothing_under_a_blocks_name(tmp_path: Path, shared: Path) -> None:
    FaultyFiles.cut_writes = True
    store, chain = opened(tmp_path / "a", f"faulty://{shared}"), make_chain(3)
    put_all(store, chain, pushed=False)
    assert not store.wait_pushed(0.2)
    assert tier_files(shared) == []
    FaultyFiles.cut_writes = False
    assert store.wait_pushed(LIMIT_S)
    assert len(tier_files(shared)) == 4


@pytest.mark.parametrize("error", [ConnectionError, PermissionError, KeyError, ValueError, AssertionError])
def test_no_error_of_a_driver_reaches_a_match_or_a_write(
    tmp_path: Path, shared: Path, error: type[Exception]
) -> None:
    def meet(name: str, path: str) -> None:
        raise error("of the driver")

    FaultyFiles.meet = staticmethod(meet)
    store, chain = opened(tmp_path / "a", f"faulty://{shared}"), make_chain(3)
    put_all(store, chain, pushed=False)
    longer = make_chain(4)
    assert store.match(longer.keys, longer.blocks) == 3
    FaultyFiles.meet = staticmethod(lambda operation, path: None)
    assert store.wait_pushed(LIMIT_S)
    check_all(opened(tmp_path / "b", f"file://{shared}"), chain)


@pytest.mark.parametrize("operation", ["ls", "cat"])
def test_a_tier_that_is_down_is_a_miss_and_is_left_alone_for_a_while(
    tmp_path: Path, shared: Path, operation: str
) -> None:
    chain, asked = make_chain(3), list[str]()
    put_all(opened(tmp_path / "a", f"file://{shared}"), chain)

    def meet(name: str, path: str) -> None:
        if threading.current_thread().name == "shared-tier-read":
            asked.append(name)
            if name == operation:
                raise ConnectionError("down")

    b = SnapshotStore(tmp_path / "b", BUDGET, 0, tier=Tier(f"faulty://{shared}", retry_s=3600, push=False))
    FaultyFiles.meet = staticmethod(meet)
    assert b.match(chain.keys, chain.blocks) == 0
    num_asked = len(asked)
    assert num_asked
    assert b.match(chain.keys, chain.blocks) == 0
    assert len(asked) == num_asked
    put_all(b, chain)
    check_all(b, chain)


def test_a_tier_that_dies_half_way_through_a_chain_gives_what_came_before(
    tmp_path: Path, shared: Path
) -> None:
    chain = make_chain(8)
    put_all(opened(tmp_path / "a", f"file://{shared}"), chain)

    def meet(name: str, path: str) -> None:
        if name == "cat" and path.endswith(f"{chain.keys[5]}.llkv"):
            raise ConnectionResetError("reset")

    FaultyFiles.meet = staticmethod(meet)
    b = opened(tmp_path / "b", f"faulty://{shared}")
    assert b.match(chain.keys, chain.blocks) == 5
    assert [which(get(b, key), key) for key in chain.keys[:5]] == ["exact"] * 5


def test_a_tier_that_does_not_answer_is_given_up_and_not_asked_while_it_hangs(
    tmp_path: Path, shared: Path
) -> None:
    chain, go_on, num_asked = make_chain(3), threading.Event(), 0
    put_all(opened(tmp_path / "a", f"file://{shared}"), chain)

    def meet(name: str, path: str) -> None:
        nonlocal num_asked
        num_asked += 1
        go_on.wait()

    tier = Tier(f"faulty://{shared}", answer_s=0.05, retry_s=0, push=False)
    b = SnapshotStore(tmp_path / "b", BUDGET, 0, tier=tier)
    FaultyFiles.meet = staticmethod(meet)
    try:
        assert b.match(chain.keys, chain.blocks) == 0
        assert b.match(chain.keys, chain.blocks) == 0
        assert num_asked == 1
    finally:
        go_on.set()


def test_a_request_ends_when_its_time_is_up(tmp_path: Path, shared: Path) -> None:
    chain = make_chain(3)
    put_all(opened(tmp_path / "a", f"file://{shared}"), chain)
    b = opened(tmp_path / "b", f"file://{shared}", request_s=0)
    assert b.match(chain.keys, chain.blocks) == 0
    check_all(opened(tmp_path / "b", f"file://{shared}"), chain)


@pytest.mark.parametrize("kind", ["cut", "bit flipped", "foreign", "later version", "earlier version"])
@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_object_is_a_miss_and_is_replaced_when_its_block_is_computed(
    tmp_path: Path, shared: Path, kind: str, seed: int
) -> None:
    url, chain = f"file://{shared}", make_chain(4)
    put_all(opened(tmp_path / "a", url), chain)
    hit = next(path for path in tier_files(shared) if path.stem == chain.keys[2].hex)
    damage(hit, kind, np.random.default_rng(seed))
    b = opened(tmp_path / "b", url)
    assert b.match(chain.keys, chain.blocks) == 2
    assert [which(get(b, key), key) for key in chain.keys[:2]] == ["exact"] * 2
    assert {entry.key for entry in b.entries()} == set(chain.keys[:2])
    put_all(b, chain)
    check_all(opened(tmp_path / "c", url), chain)


def test_a_block_under_another_blocks_name_is_a_miss(tmp_path: Path, shared: Path) -> None:
    url, chain, other = f"file://{shared}", make_chain(2), make_chain(2, 1)
    put_all(opened(tmp_path / "a", url), chain)
    hit = next(path for path in tier_files(shared) if path.stem == chain.keys[0].hex)
    c = SnapshotStore(tmp_path / "c", BUDGET, 0)
    put_all(c, other)
    hit.write_bytes(path_of(tmp_path / "c", other.keys[0]).read_bytes())
    b = opened(tmp_path / "b", url)
    assert b.match(chain.keys, chain.blocks) == 0
    assert b.entries() == []


def test_foreign_files_on_the_tier_are_neither_read_nor_touched(tmp_path: Path, shared: Path) -> None:
    url, chain = f"file://{shared}", make_chain(3)
    a = opened(tmp_path / "a", url)
    put_all(a, chain, tenant="anna")
    names = [
        "README",
        "v1/notes.txt",
        f"v1/{chain.keys[0].hex[:2]}/{chain.keys[0]}/thumbs.db",
        "removed/x",
        "unfinished/y",
    ]
    for name in names:
        (shared / name).parent.mkdir(parents=True, exist_ok=True)
        (shared / name).write_bytes(b"foreign")
    check_all(opened(tmp_path / "b", url), chain)
    assert a.remove_tenant("anna") == 4
    assert tier_files(shared) == []
    assert all((shared / name).read_bytes() == b"foreign" for name in names)


def test_two_writers_of_one_block_leave_one_whole_block(tmp_path: Path, shared: Path) -> None:
    url, chain = f"file://{shared}", make_chain(6)
    stores = [opened(tmp_path / name, url) for name in "ab"]
    threads = [threading.Thread(target=put_all, args=(store, chain)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tier_files(shared)) == 7
    assert list((shared / "unfinished").iterdir()) == []
    check_all(opened(tmp_path / "c", url), chain)


def test_a_continued_block_does_not_replace_an_exact_one(tmp_path: Path, shared: Path) -> None:
    url, chain = f"file://{shared}", make_chain(1)
    a, b = opened(tmp_path / "a", url), opened(tmp_path / "b", url)
    assert put(a, chain, 0, exact=False)
    assert a.wait_pushed(LIMIT_S)
    assert put(b, chain, 0)
    assert b.wait_pushed(LIMIT_S)
    assert put(opened(tmp_path / "c", url), chain, 0, exact=False)
    d = opened(tmp_path / "d", url)
    assert d.match(chain.keys, chain.blocks) == 1
    assert which(get(d, chain.keys[0]), chain.keys[0]) == "exact"


def test_the_local_budget_holds_while_blocks_are_pulled(tmp_path: Path, shared: Path) -> None:
    url, chain = f"file://{shared}", make_chain(9)
    put_all(opened(tmp_path / "a", url), chain)
    budget = 4 * 8192
    b = opened(tmp_path / "b", url, budget)
    assert b.match(chain.keys, chain.blocks) == 4
    assert disk_usage(tmp_path / "b") <= budget


def test_a_folder_that_cannot_be_written_pulls_nothing(tmp_path: Path, shared: Path) -> None:
    url, chain = f"file://{shared}", make_chain(2)
    put_all(opened(tmp_path / "a", url), chain)
    (tmp_path / "b").write_bytes(b"no folder")
    b = opened(tmp_path / "b", url)
    assert b.read_only
    assert b.match(chain.keys, chain.blocks) == 0


def test_a_removed_prefix_goes_from_the_tier_and_from_other_machines(tmp_path: Path, shared: Path) -> None:
    url, chain, other = f"file://{shared}", make_chain(3), make_chain(2, 1)
    a = opened(tmp_path / "a", url)
    put_all(a, chain)
    put_all(a, other)
    check_all(opened(tmp_path / "b", url), chain)
    check_all(opened(tmp_path / "b", url), other)
    assert remove_prefix(a, chain.keys[-1]) == 3
    assert {path.parent.name for path in tier_files(shared)} == {key.hex for key in other.keys}
    b = opened(tmp_path / "b", url)  # a start: others' deletions come first
    assert b.wait_pushed(LIMIT_S)
    assert {entry.key for entry in b.entries() if not entry.attached} == set(other.keys)
    assert len(tier_files(shared)) == 3


def test_what_is_computed_again_after_its_deletion_is_shared_again(tmp_path: Path, shared: Path) -> None:
    url, chain = f"file://{shared}", make_chain(2)
    a = opened(tmp_path / "a", url)
    put_all(a, chain)
    remove_prefix(a, chain.keys[-1])
    put_all(a, chain)
    check_all(opened(tmp_path / "b", url), chain)
    assert opened(tmp_path / "a", url).wait_pushed(LIMIT_S)
    check_all(a, chain)


def test_a_deleted_tenant_goes_from_the_tier_though_its_blocks_are_evicted_here(
    tmp_path: Path, shared: Path
) -> None:
    url = f"file://{shared}"
    anna, ben = make_chain(3, salt=b"anna"), make_chain(2, salt=b"ben")
    a = opened(tmp_path / "a", url)
    put_all(a, anna, tenant="anna")
    put_all(a, ben, tenant="ben")
    c = SnapshotStore(tmp_path / "c", BUDGET, 0, tier=Tier(url, push=False))
    assert c.remove_tenant("anna") == 3
    assert not any(b"anna" in path.read_bytes() for path in files_in(shared))
    assert {path.parent.name for path in tier_files(shared)} == {key.hex for key in ben.keys}
    again = opened(tmp_path / "a", url)
    assert again.wait_pushed(LIMIT_S)
    assert {entry.tenant for entry in again.entries()} == {"ben"}


def test_nothing_is_deleted_here_while_the_tier_cannot_be_reached(tmp_path: Path, shared: Path) -> None:
    chain = make_chain(2)
    a = opened(tmp_path / "a", f"faulty://{shared}")
    put_all(a, chain, tenant="anna")

    def meet(name: str, path: str) -> None:
        raise ConnectionError("down")

    FaultyFiles.meet = staticmethod(meet)
    for remove in (lambda: a.remove(chain.keys[1]), lambda: a.remove_tenant("anna")):
        with pytest.raises(TierDown, match="down"):
            remove()
    assert a.match(chain.keys, chain.blocks) == 2


def test_a_block_deleted_while_it_is_pushed_does_not_come_back(tmp_path: Path, shared: Path) -> None:
    chain, began, go_on = make_chain(1), threading.Event(), threading.Event()

    def meet(name: str, path: str) -> None:
        if name == "mv" and threading.current_thread().name == "shared-tier":
            began.set()
            go_on.wait()

    FaultyFiles.meet = staticmethod(meet)
    a = opened(tmp_path / "a", f"faulty://{shared}")
    assert put(a, chain, 0)
    assert began.wait(LIMIT_S)
    assert a.remove(chain.keys[0])
    go_on.set()
    assert a.wait_pushed(LIMIT_S)
    assert tier_files(shared) == []


def test_old_notes_and_what_dead_writers_left_are_tidied_away(tmp_path: Path, shared: Path) -> None:
    chain = make_chain(1)
    key = chain.keys[0]
    for name in ("removed", "unfinished"):
        (shared / name).mkdir()
    old = [shared / "removed" / f"{key}.1000", shared / "unfinished" / "1000.0123456789abcdef"]
    young = [
        shared / "removed" / f"{key}.99999999999",
        shared / "unfinished" / "99999999999.0123456789abcdef",
    ]
    for path in old + young:
        path.write_bytes(b"")
    Tier(f"file://{shared}").tidy()
    assert [path.exists() for path in old + young] == [False, False, True, True]


def test_the_file_system_of_the_faults_is_the_one_that_is_used() -> None:
    assert isinstance(fsspec.url_to_fs("faulty:///x")[0], FaultyFiles)


def test_an_exact_block_written_while_its_continued_one_is_pushed_is_pushed_too(
    tmp_path: Path, shared: Path
) -> None:
    chain, began, go_on = make_chain(1), threading.Event(), threading.Event()

    def meet(name: str, path: str) -> None:
        if name == "mv":
            began.set()
            go_on.wait()

    FaultyFiles.meet = staticmethod(meet)
    a = opened(tmp_path / "a", f"faulty://{shared}")
    assert put(a, chain, 0, exact=False)
    assert began.wait(LIMIT_S)
    assert put(a, chain, 0)
    go_on.set()
    assert a.wait_pushed(LIMIT_S)
    b = opened(tmp_path / "b", f"file://{shared}")
    assert b.match(chain.keys, chain.blocks) == 1
    assert which(get(b, chain.keys[0]), chain.keys[0]) == "exact"


def test_a_chain_that_was_found_wrong_does_not_come_back_from_the_tier(tmp_path: Path, shared: Path) -> None:
    url, chain, other = f"file://{shared}", make_chain(3), make_chain(2, 1)
    a = opened(tmp_path / "a", url)
    put_all(a, chain)
    put_all(a, other)
    b = opened(tmp_path / "b", url)
    check_all(b, chain)
    assert quarantine_chain(b, chain.keys[0], "logits", "some", "others") == 4
    assert b.match(chain.keys, chain.blocks) == 0
    check_all(b, other)
    wrong = [path for path in tier_files(shared) if path.stem in map(str, chain.keys)]
    for path in wrong:
        os.utime(path, (0, 0))
    put_all(b, chain)
    assert len(wrong) == 3
    assert all(path.stat().st_mtime > 0 for path in wrong)


def test_what_is_attached_is_not_asked_for_apart_from_its_block(tmp_path: Path, shared: Path) -> None:
    asked: list[str] = []
    chain = make_chain(1)
    tier = Tier(f"faulty://{shared}", push=False)
    store = SnapshotStore(tmp_path / "a", BUDGET, 0, tier=tier)
    assert put(store, chain, 0)
    FaultyFiles.meet = staticmethod(lambda operation, path: asked.append(operation))
    assert attached(store, chain.keys[0], "logits") is None
    assert asked == []
