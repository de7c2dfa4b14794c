"""The worker parent, a real process, while its child, Redis, the API or it itself is killed or fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from jobs import RUN_FUNCTION, EventType, Problem
from tests.worker.rig import MODEL, ROOT, Rig, make_rig, open_gate, wait_gone
from worker.redis_server import CannotStart, wait_for_redis
from worker.stop import StopRequest


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield from make_rig(tmp_path)


def types(events: list[Any]) -> list[EventType]:
    return [event.type for event in events]


def test_job_runs_and_its_events_arrive_in_order(rig: Rig) -> None:
    rig.enqueue(["progress", "prefill", 1, 2], ["delta", "a"], ["delta", "b"], ["end"])
    rig.start()
    events = rig.until(EventType.SUCCEEDED)
    assert types(events) == [
        EventType.STARTED,
        EventType.PROGRESS,
        EventType.DELTA,
        EventType.DELTA,
        EventType.SUCCEEDED,
    ]
    assert [event.data["text"] for event in events[2:4]] == ["a", "b"]
    assert events[-1].data["outputs"][0]["text"] == "Some text."


def test_killed_child_is_reported_lost_and_the_next_job_works(rig: Rig) -> None:
    rig.enqueue(["progress", "prefill", 1, 2], ["die", signal.SIGKILL])
    rig.enqueue(["end"], job_id="job_2")
    rig.start()
    lost = rig.until(EventType.LOST)[-1]
    problem = Problem.model_validate(lost.data)
    assert (lost.job_id, problem.code) == ("job_1", "engine_crashed")
    assert "SIGKILL" in problem.detail
    assert types(rig.until(EventType.SUCCEEDED, "job_2")) == [EventType.STARTED, EventType.SUCCEEDED]


def test_exit_code_of_the_child_is_named(rig: Rig) -> None:
    rig.enqueue(["exit", 7])
    rig.start()
    assert "exited with code 7" in rig.until(EventType.LOST)[-1].data["detail"]


@pytest.mark.parametrize(
    "line", ["Traceback (most recent call last):", '{"op":"dance"}', "", '{"op":"event"}']
)
def test_garbage_on_the_pipe_is_a_lost_attempt_and_the_next_job_works(rig: Rig, line: str) -> None:
    rig.enqueue(["say", line], ["deaf"])
    rig.enqueue(["end"], job_id="job_2")
    rig.start()
    assert "unreadable" in rig.until(EventType.LOST)[-1].data["detail"]
    rig.until(EventType.SUCCEEDED, "job_2")


def test_second_end_is_not_taken_for_the_end_of_the_next_job(rig: Rig) -> None:
    rig.enqueue(["end"], ["end"])
    rig.start()
    rig.until(EventType.SUCCEEDED, "job_1")
    rig.enqueue(["delta", "from job 2"], ["end"], job_id="job_2")
    events = rig.until(EventType.SUCCEEDED, "job_2")
    assert EventType.DELTA in types(events)


def test_child_killed_while_idle_is_replaced(rig: Rig) -> None:
    rig.start()
    child = rig.child_pid()
    os.kill(child, signal.SIGKILL)
    assert wait_gone(child)
    rig.enqueue(["end"])
    rig.until(EventType.SUCCEEDED)


def test_sigterm_releases_the_job_and_exits_cleanly(rig: Rig) -> None:
    rig.enqueue(["progress", "prefill", 1, 2], ["until_stop"])
    parent = rig.start()
    child = rig.child_pid()
    rig.until(EventType.PROGRESS)
    parent.send_signal(signal.SIGTERM)
    rig.until(EventType.RELEASED)
    assert parent.wait(20) == 0
    assert wait_gone(child)
    assert rig.status() is None


def test_sigterm_while_idle_exits_cleanly(rig: Rig) -> None:
    parent = rig.start()
    child = rig.child_pid()
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(20) == 0
    assert wait_gone(child)


def test_second_sigterm_kills_a_deaf_child_and_releases_the_job(rig: Rig) -> None:
    rig.enqueue(["progress", "prefill", 1, 2], ["deaf"])
    parent = rig.start()
    child = rig.child_pid()
    rig.until(EventType.PROGRESS)
    parent.send_signal(signal.SIGTERM)
    while (status := rig.status()) is None or status.state != "draining":
        pass
    parent.send_signal(signal.SIGTERM)
    assert wait_gone(child)
    rig.until(EventType.RELEASED)
    assert parent.wait(20) == 0


def test_child_of_a_killed_parent_ends_by_itself(rig: Rig) -> None:
    rig.enqueue(["progress", "prefill", 1, 2], ["deaf"])
    parent = rig.start()
    child = rig.child_pid()
    rig.until(EventType.PROGRESS)
    parent.kill()
    assert wait_gone(child)


def test_cancel_stops_the_job(rig: Rig) -> None:
    rig.enqueue(["progress", "prefill", 1, 2], ["until_stop"])
    rig.enqueue(["end"], job_id="job_2")
    rig.start()
    rig.until(EventType.PROGRESS)
    rig.control(cancel=True)
    assert types(rig.until(EventType.CANCELLED)) == [EventType.CANCELLED]
    rig.until(EventType.SUCCEEDED, "job_2")


def test_job_cancelled_in_the_queue_does_not_start(rig: Rig) -> None:
    rig.enqueue(["end"])
    rig.control(cancel=True)
    rig.start()
    assert types(rig.until(EventType.CANCELLED)) == [EventType.CANCELLED]


def test_cancel_of_an_older_attempt_does_not_stop_a_retried_job(rig: Rig) -> None:
    rig.enqueue(["end"], attempt=2)
    rig.control(cancel=True, min_attempt=1)
    rig.start()
    assert types(rig.until(EventType.SUCCEEDED))[0] == EventType.STARTED


def test_stale_attempt_is_skipped_without_a_word(rig: Rig) -> None:
    rig.enqueue(["end"], attempt=1)
    rig.enqueue(["end"], job_id="job_2")
    rig.control(min_attempt=2)
    rig.start()
    assert {event.job_id for event in rig.until(EventType.SUCCEEDED)} == {"job_2"}


def test_attempt_that_becomes_stale_stops_without_a_word(rig: Rig) -> None:
    rig.enqueue(["progress", "prefill", 1, 2], ["until_stop"])
    rig.enqueue(["end"], job_id="job_2")
    rig.start()
    rig.until(EventType.PROGRESS)
    rig.control(min_attempt=2)
    assert {event.job_id for event in rig.until(EventType.SUCCEEDED)} == {"job_2"}


@pytest.mark.parametrize("function", ["os.system", "worker.run.log", "jobs.run_id"])
def test_forged_job_function_does_not_run(rig: Rig, function: str) -> None:
    trace = rig.folder / "ran"
    rig.queue.enqueue_call(function, args=(f"touch {trace}",), job_id="forged", timeout=-1)
    rig.enqueue(["end"])
    rig.start()
    rig.until(EventType.SUCCEEDED)
    assert not trace.exists()
    forged = rig.queue.fetch_job("forged")
    assert forged is not None
    assert forged.is_failed


def test_forged_callback_and_retry_do_not_run(rig: Rig) -> None:
    trace = rig.folder / "ran"
    rig.enqueue(["end"])
    key = "rq:job:job_1-1"
    rig.redis.hset(
        key,
        mapping={
            "success_callback_name": "os.system",
            "failure_callback_name": "os.system",
            "retries_left": "3",
        },
    )
    rig.enqueue(["end"], job_id="job_2")
    rig.start()
    rig.until(EventType.SUCCEEDED, "job_2")
    assert not trace.exists()


def test_unreadable_queue_entry_does_not_stop_the_worker(rig: Rig) -> None:
    rig.enqueue(["end"])
    rig.redis.hset("rq:job:job_1-1", mapping={"created_at": "yesterday"})
    rig.enqueue(["end"], job_id="job_2")
    rig.start()
    rig.until(EventType.SUCCEEDED, "job_2")


def test_unreadable_request_fails_the_job_that_its_id_names(rig: Rig) -> None:
    rig.put(RUN_FUNCTION, {"request": {"job_id": "job_1"}}, "job_1-1")
    rig.start()
    failed = rig.until(EventType.FAILED)[-1]
    assert (failed.job_id, failed.attempt, failed.data["code"]) == ("job_1", 1, "request_unreadable")


def test_events_made_while_redis_hangs_arrive_once_and_in_order(rig: Rig) -> None:
    first, last = rig.gate("first"), rig.gate("last")
    letters = [["delta", f"{i} "] for i in range(1, 40)]
    rig.enqueue(["delta", "0 "], ["gate", str(first)], *letters, ["gate", str(last)], ["end"])
    rig.start()
    events = rig.until(EventType.DELTA)
    rig.server.process.send_signal(signal.SIGSTOP)
    open_gate(first)
    open_gate(last)
    rig.server.process.send_signal(signal.SIGCONT)
    events += rig.until(EventType.SUCCEEDED)
    said = [event.data["text"] for event in events if event.type == EventType.DELTA]
    assert said == [f"{i} " for i in range(40)]


def test_job_goes_on_while_redis_is_restarted(rig: Rig) -> None:
    first, last = rig.gate("first"), rig.gate("last")
    letters = [["delta", f"{i} "] for i in range(1, 40)]
    rig.enqueue(["delta", "0 "], ["gate", str(first)], *letters, ["gate", str(last)], ["end"])
    rig.start()
    events = rig.until(EventType.DELTA)
    rig.server.kill()
    open_gate(first)
    open_gate(last)
    rig.server.start()
    events += rig.until(EventType.SUCCEEDED)
    said = [event.data["text"] for event in events if event.type == EventType.DELTA]
    assert said == [f"{i} " for i in range(40)]
    rig.enqueue(["end"], job_id="job_2")
    rig.until(EventType.SUCCEEDED, "job_2")


def test_idle_worker_survives_a_restart_of_redis(rig: Rig) -> None:
    rig.start()
    rig.child_pid()
    rig.server.kill()
    rig.server.start()
    rig.enqueue(["end"])
    rig.until(EventType.SUCCEEDED)


def test_deleted_document_fails_the_job(rig: Rig) -> None:
    ref = rig.documents.add("doc_9", "text")
    del rig.documents.texts["doc_9"]
    rig.enqueue(["end"], documents=[ref])
    rig.start()
    assert rig.until(EventType.FAILED)[-1].data["code"] == "document_gone"


def test_changed_document_fails_the_job(rig: Rig) -> None:
    ref = rig.documents.add("doc_9", "text")
    rig.documents.texts["doc_9"] = "another text"
    rig.enqueue(["end"], documents=[ref])
    rig.start()
    assert rig.until(EventType.FAILED)[-1].data["code"] == "document_mismatch"


def test_worker_waits_for_an_api_that_is_down(rig: Rig) -> None:
    rig.documents.status = 503
    rig.enqueue(["end"])
    rig.start()
    assert rig.documents.num_refused.acquire(timeout=30)
    assert rig.documents.num_refused.acquire(timeout=30)
    rig.documents.status = 200
    assert types(rig.until(EventType.SUCCEEDED)) == [EventType.STARTED, EventType.SUCCEEDED]


def test_sigterm_while_the_api_is_down_releases_the_job(rig: Rig) -> None:
    rig.documents.status = 503
    rig.enqueue(["end"])
    parent = rig.start()
    assert rig.documents.num_refused.acquire(timeout=30)
    parent.send_signal(signal.SIGTERM)
    assert types(rig.until(EventType.RELEASED)) == [EventType.RELEASED]
    assert parent.wait(20) == 0


def test_presence_says_what_the_worker_has_in_hand(rig: Rig) -> None:
    gate = rig.gate("gate")
    rig.enqueue(["delta", "x"], ["gate", str(gate)], ["end"])
    rig.start()
    rig.until(EventType.DELTA)
    status = rig.status()
    assert status is not None
    assert (status.state, status.job_id, status.attempt, status.model) == ("busy", "job_1", 1, MODEL)
    open_gate(gate)
    rig.until(EventType.SUCCEEDED)


def test_worker_whose_child_never_loads_exits_with_a_message(rig: Rig) -> None:
    parent = rig.start(FAKE_CHILD_LOAD="die")
    assert parent.wait(30) == 1
    assert parent.stderr is not None
    assert "died 3 times in a row" in parent.stderr.read()


def test_refused_model_ends_the_worker_with_the_reason(rig: Rig) -> None:
    parent = rig.start(FAKE_CHILD_LOAD="refuse")
    assert parent.wait(30) == 1
    assert parent.stderr is not None
    assert "there is no such model" in parent.stderr.read()


def test_bad_setting_names_the_variable_and_what_is_accepted(rig: Rig) -> None:
    parent = rig.start(LONGLEAF_API="localhost:8321")
    assert parent.wait(30) == 1
    assert parent.stderr is not None
    said = parent.stderr.read()
    assert "LONGLEAF_API='localhost:8321' is not accepted: http://HOST:PORT or" in said


def test_parent_never_imports_mlx() -> None:
    code = "import sys, worker.__main__; sys.exit(any(name.split('.')[0] == 'mlx' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_missing_redis_is_named_without_its_password() -> None:
    redis = Redis.from_url("redis://:secret@127.0.0.1:1/0", retry=Retry(NoBackoff(), 0))
    with pytest.raises(CannotStart, match=r"no Redis at redis://127\.0\.0\.1:1/0") as caught:
        wait_for_redis(redis, "redis://:secret@127.0.0.1:1/0", StopRequest(), patience_s=0)
    assert "secret" not in str(caught.value)
