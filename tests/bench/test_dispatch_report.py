"""The report of the dispatch bench: what counts as a hit, and as a wait that should not have been."""

from __future__ import annotations

from typing import Any

from bench.dispatch_report import Asked, Event, report


def ran(job: str, worker: str, queued: float, started: float, ended: float, attempt: int = 1) -> list[Event]:
    return [
        (job, "job.queued", attempt, queued, {}),
        (job, "job.started", attempt, started, {"worker": worker}),
        (job, "job.succeeded", attempt, ended, {}),
    ]


def asked(job: str, document: int, cached: int) -> Asked:
    return Asked(job, document, cached, 100, True)


def reported(questions: list[Asked], *runs: list[Event]) -> dict[str, Any]:
    events = sorted((event for run in runs for event in run), key=lambda event: event[3])
    return report(questions, events, "", steal_after_s=5.0, is_killed=False)


def test_a_hit_is_a_later_question_that_found_the_document_with_its_worker() -> None:
    questions = [asked("a", 1, 0), asked("b", 1, 90), asked("c", 1, 0), asked("d", 1, 90), asked("e", 2, 0)]
    found = reported(
        questions,
        ran("a", "w1", 0, 0, 1),
        ran("b", "w1", 1, 1, 2),
        ran("c", "w2", 2, 2, 3),  # prefilled a second time
        ran("d", "w2", 3, 3, 4),
        ran("e", "w1", 3, 3, 4),
    )
    assert (found["num_later_questions"], found["num_hits"], found["num_prefills"]) == (3, 2, 3)


def test_a_wait_counts_where_another_worker_did_nothing() -> None:
    questions = [asked("long", 1, 0), asked("short", 2, 90), asked("first", 2, 0), asked("other", 3, 0)]
    found = reported(
        questions,
        ran("first", "w1", 0, 0, 1),
        ran("long", "w1", 1, 1, 21),
        ran("short", "w1", 2, 21, 22),
        ran("other", "w2", 0, 0, 12),
    )
    assert (found["longest_wait_s"], found["longest_wait_beside_an_idle_worker_s"]) == (19, 9)
    assert found["num_beyond_the_bound"] == 1


def test_waiting_for_the_prefill_of_the_same_document_is_no_such_wait() -> None:
    questions = [asked("first", 1, 0), asked("second", 1, 90), asked("other", 2, 0)]
    found = reported(
        questions,
        ran("first", "w1", 0, 0, 30),
        ran("second", "w1", 1, 30, 31),
        ran("other", "w2", 0, 0, 1),
    )
    assert (found["longest_wait_s"], found["num_beyond_the_bound"]) == (29, 0)


def test_jobs_that_did_not_end_or_ended_twice_are_told() -> None:
    questions = [asked("a", 1, 0), asked("b", 2, 0)]
    twice = [*ran("a", "w1", 0, 0, 1), ("a", "job.succeeded", 2, 2.0, {})]
    found = reported(questions, twice, ran("b", "w1", 1, 1, 2)[:2])
    assert (found["num_not_ended"], found["num_ended_twice"]) == (1, 1)
