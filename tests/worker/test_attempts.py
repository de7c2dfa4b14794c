"""The queues as a worker's parent takes from them, and the name by which its store is known."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import EventType, run_id
from jobs.dispatch import own_key, shared_key
from tests.worker.rig import MODEL, Rig, make_rig, open_gate
from worker.store_name import FILE, store_name


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield from make_rig(tmp_path)


def move_to_own(rig: Rig, worker: str, job_id: str) -> None:
    name = run_id(job_id, 1)
    with rig.redis.pipeline(transaction=True) as pipe:
        pipe.lrem(shared_key(MODEL), 0, name)
        pipe.rpush(own_key(MODEL, worker), name)
        pipe.execute()


def test_an_attempt_in_the_own_queue_wakes_the_worker(rig: Rig) -> None:
    rig.start()
    rig.child_pid()
    status = rig.status()
    assert status is not None
    gate = rig.gate("gate")
    rig.enqueue(["gate", str(gate)], ["end"], job_id="job_first")
    assert rig.next_event().type == EventType.STARTED
    rig.enqueue(["end"], job_id="job_own")
    move_to_own(rig, status.name, "job_own")
    rig.enqueue(["end"], job_id="job_shared")
    open_gate(gate)
    ended = [
        rig.until(EventType.SUCCEEDED, job_id)[-1].job_id for job_id in ("job_first", "job_own", "job_shared")
    ]
    assert ended == ["job_first", "job_own", "job_shared"]


def test_the_start_of_an_attempt_names_the_store(rig: Rig) -> None:
    rig.enqueue(["end"])
    rig.start()
    assert rig.next_event().data == {"store": store_name(rig.folder)}
    status = rig.status()
    assert status is not None
    assert status.store == store_name(rig.folder)


def test_presence_tells_the_phase_of_the_job_in_hand(rig: Rig) -> None:
    gate = rig.gate("gate")
    rig.enqueue(["progress", "prefill", 1, 2], ["delta", "x"], ["gate", str(gate)], ["end"])
    rig.start()
    rig.until(EventType.DELTA)
    status = rig.status()
    assert status is not None
    while status.phase is None:
        status = rig.status()
        assert status is not None
    assert (status.state, status.phase) == ("busy", "prefill")
    open_gate(gate)
    rig.until(EventType.SUCCEEDED)


@pytest.mark.parametrize(("num_chars", "shown"), [(511, None), (512, 1000.0)])
def test_presence_tells_how_fast_the_last_long_prefill_was(
    rig: Rig, num_chars: int, shown: float | None
) -> None:
    gate = rig.gate("gate")
    rig.enqueue(["end"], documents=[rig.documents.add("doc_long", "x" * num_chars)])
    rig.enqueue(["delta", "x"], ["gate", str(gate)], ["end"], job_id="job_2")
    rig.start()
    rig.until(EventType.SUCCEEDED)
    rig.until(EventType.DELTA)
    status = rig.status()
    while status is None or status.job_id != "job_2":
        status = rig.status()
    assert status.prefill_tokens_per_s == shown
    open_gate(gate)
    rig.until(EventType.SUCCEEDED)


def test_a_complete_answer_is_told_before_the_engine_dies(rig: Rig) -> None:
    rig.enqueue(["done", "An answer."], ["die", 9])
    rig.start()
    seen = rig.until(EventType.LOST)
    assert [event.data["text"] for event in seen if event.type is EventType.OUTPUT] == ["An answer."]


def test_the_name_of_a_store_stays(tmp_path: Path) -> None:
    names = {store_name(tmp_path / "data") for _ in range(3)}
    assert len(names) == 1
    assert (tmp_path / "data" / FILE).read_text() in names
    assert [path.name for path in (tmp_path / "data").iterdir()] == [FILE]


def test_two_folders_are_two_stores(tmp_path: Path) -> None:
    assert store_name(tmp_path / "a") != store_name(tmp_path / "b")


def test_a_folder_that_is_none_has_a_name_for_this_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = (store_name(tmp_path / "file" / "data") for _ in range(2))
    assert first != second


def test_a_redis_that_is_full_does_not_end_the_worker(rig: Rig) -> None:
    parent = rig.start()
    rig.child_pid()
    rig.redis.config_set("maxmemory", 1)
    while num_refused(rig, "OOM") < 20 and parent.poll() is None:
        rig.redis.ping()
    rig.redis.config_set("maxmemory", 0)
    rig.enqueue(["end"])
    rig.until(EventType.SUCCEEDED)
    assert parent.poll() is None


def test_a_redis_that_takes_no_writes_ends_no_worker_whatever_it_is_doing(rig: Rig) -> None:
    rig.redis.config_set("min-replicas-to-write", 1)
    parent = rig.start()
    when_refused(rig, parent, 3)
    rig.redis.config_set("min-replicas-to-write", 0)
    gate = rig.gate("gate")
    rig.enqueue(["gate", str(gate)], ["end"])
    rig.until(EventType.STARTED)
    rig.redis.config_set("min-replicas-to-write", 1)
    open_gate(gate)
    when_refused(rig, parent, 3)
    rig.redis.config_set("min-replicas-to-write", 0)
    rig.until(EventType.SUCCEEDED)
    rig.enqueue(["end"], job_id="job_2")
    rig.until(EventType.SUCCEEDED, "job_2")
    assert parent.poll() is None


def when_refused(rig: Rig, parent: subprocess.Popen[str], times: int) -> None:
    """Return when so many more writes were refused, or the worker has ended."""
    least = num_refused(rig, "NOREPLICAS") + times
    while num_refused(rig, "NOREPLICAS") < least and parent.poll() is None:
        rig.redis.ping()


def num_refused(rig: Rig, code: str) -> int:
    errors: Any = rig.redis.info("errorstats")
    return int(errors.get(f"errorstat_{code}", {"count": 0})["count"])


@pytest.mark.parametrize("entry", [b"\xff\xfe-1", b"", b"no attempt", b"../../x-1", b"a" * 5000])
def test_an_entry_that_names_no_attempt_does_not_end_the_worker(rig: Rig, entry: bytes) -> None:
    rig.redis.rpush(shared_key(MODEL), entry, "forged-1")
    rig.redis.hset("rq:job:forged-1", "meta", '{"leads": [{}], "num_wanted": 1}')
    rig.enqueue(["end"])
    rig.start()
    rig.until(EventType.SUCCEEDED)
