"""A child that grows over its limit is ended: the job that did it fails, the next one has a fresh child."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import EventType
from tests.worker.rig import Rig, make_rig, wait_gone
from worker.process_memory import resident_bytes
from worker.settings import Settings

LIMIT = 400_000_000
"""Several times what the fake child has at first."""
GROWTH = 500_000_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield from make_rig(tmp_path)


@pytest.mark.parametrize("ending", ["until_stop", "deaf"])
def test_a_job_under_which_the_child_grows_fails_and_the_next_has_a_fresh_child(
    rig: Rig, ending: str
) -> None:
    rig.enqueue(["delta", "x"], ["grow", GROWTH], [ending])
    rig.enqueue(["end"], job_id="job_2")
    rig.start(LONGLEAF_ENGINE_MEMORY_BYTES=str(LIMIT))
    child = rig.child_pid()
    events = rig.until(EventType.FAILED, "job_1")
    problem = events[-1].data
    assert problem["code"] == "memory_exceeded"
    assert problem["params"]["limit_bytes"] == LIMIT
    assert problem["params"]["held_bytes"] > LIMIT
    assert "LONGLEAF_ENGINE_MEMORY_BYTES" in problem["detail"]
    assert not {event.type for event in events} & {EventType.LOST, EventType.CANCELLED}
    rig.until(EventType.SUCCEEDED, "job_2")
    assert wait_gone(child)


def test_a_child_that_has_grown_is_replaced_after_its_job(rig: Rig) -> None:
    rig.enqueue(["grow", GROWTH], ["end"])
    rig.start(LONGLEAF_ENGINE_MEMORY_BYTES=str(LIMIT))
    child = rig.child_pid()
    rig.until(EventType.SUCCEEDED, "job_1")
    assert wait_gone(child)
    rig.enqueue(["end"], job_id="job_2")
    rig.until(EventType.SUCCEEDED, "job_2")


def test_without_a_limit_a_child_may_grow(rig: Rig) -> None:
    rig.enqueue(["grow", GROWTH], ["end"])
    rig.start()
    child = rig.child_pid()
    rig.until(EventType.SUCCEEDED, "job_1")
    rig.enqueue(["end"], job_id="job_2")
    rig.until(EventType.SUCCEEDED, "job_2")
    assert rig.child_pid() == child


def test_a_model_that_takes_more_than_the_limit_stops_the_start(rig: Rig) -> None:
    parent = rig.start(LONGLEAF_ENGINE_MEMORY_BYTES="1000")
    assert parent.wait(30) == 1
    assert parent.stderr is not None
    assert "raise LONGLEAF_ENGINE_MEMORY_BYTES" in parent.stderr.read()


def test_the_limit_follows_the_memory_that_the_model_may_take() -> None:
    given = Settings(memory_bytes=8_000_000_000)  # type: ignore[arg-type]
    assert given.engine_limit_bytes == 11_000_000_000
    both = Settings(memory_bytes=8_000_000_000, engine_memory_bytes=9_000_000_000)  # type: ignore[arg-type]
    assert both.engine_limit_bytes == 9_000_000_000
    assert Settings().engine_limit_bytes is None


def test_memory_of_a_process_is_counted_and_that_of_a_gone_one_is_none() -> None:
    # In a process of its own: this one may have as much to spare from earlier tests.
    program = "kept = b'x' * 50_000_000; print(flush=True); input()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert resident_bytes(process.pid) > 50_000_000
        process.communicate(b"\n")
    assert resident_bytes(process.pid) == 0
