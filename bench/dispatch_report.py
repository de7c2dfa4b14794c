"""What the events of a dispatch bench say: hits, waits, and attempts that another worker took.

It knows neither how the load was put nor how workers run: only jobs, what was recorded, and workers' logs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

Event = tuple[str, str, int, float, dict[str, Any]]
Span = tuple[float, float]

_ENDS = {"job.succeeded", "job.failed", "job.cancelled", "job.expired"}


@dataclass(frozen=True)
class Asked:
    """One question and what came of it."""

    job_id: str
    document: int
    cached_tokens: int
    prompt_tokens: int
    is_right: bool


@dataclass(frozen=True)
class Run:
    """One attempt that a worker began."""

    job_id: str
    attempt: int
    worker: str
    queued_at: float
    started_at: float
    ended_at: float


def report(
    asked: list[Asked], events: list[Event], logs: str, steal_after_s: float, is_killed: bool
) -> dict[str, Any]:
    """`logs`: what the workers wrote; `is_killed`: whether one of them was."""
    runs = _runs(events)
    document_of = {one.job_id: one.document for one in asked}
    spans: dict[str, list[Run]] = {}
    for run in runs:
        spans.setdefault(run.worker, []).append(run)
    final = {run.job_id: run for run in runs}  # the last attempt of each
    seen: dict[int, set[str]] = {}
    num_later = num_hits = num_cold = 0
    for run in sorted(final.values(), key=lambda found: found.started_at):
        one = next(found for found in asked if found.job_id == run.job_id)
        holders = seen.setdefault(one.document, set())
        is_cached = one.cached_tokens * 2 > one.prompt_tokens
        num_cold += not is_cached
        if holders:
            num_later += 1
            num_hits += is_cached and run.worker in holders
        holders.add(run.worker)

    made: dict[int, list[Span]] = {document: [] for document in seen}
    for one in asked:
        if one.job_id in final and one.cached_tokens * 2 <= one.prompt_tokens:
            made[one.document].append((final[one.job_id].started_at, final[one.job_id].ended_at))
    waits = [run.started_at - run.queued_at for run in runs]
    there = dict.fromkeys(spans, (0.0, float("inf")))
    if is_killed:  # a worker may not have been there before its first attempt and after its last
        there = {
            worker: (min(run.started_at for run in theirs), max(run.ended_at for run in theirs))
            for worker, theirs in spans.items()
        }
    beside_idle = [_beside_idle(run, spans, there, made[document_of[run.job_id]]) for run in runs]
    num_ends = Counter(job_id for job_id, kind, *_ in events if kind in _ENDS)
    return {
        "num_documents": len(set(document_of.values())),
        "num_questions": len(asked),
        "num_later_questions": num_later,
        "num_hits": num_hits,
        "hit_share": round(num_hits / max(1, num_later), 4),
        "num_prefills": num_cold,
        "longest_wait_s": round(max(waits), 2),
        "median_wait_s": round(sorted(waits)[len(waits) // 2], 2),
        "longest_wait_beside_an_idle_worker_s": round(max(beside_idle), 2),
        "num_beyond_the_bound": sum(wait > steal_after_s + 1.0 for wait in beside_idle),
        "num_taken_after_waiting": logs.count(" waited too long for "),
        "num_taken_from_a_gone_worker": logs.count(" waited for the gone "),
        "num_attempts": len(runs),
        "num_right": sum(one.is_right for one in asked),
        "num_not_ended": sum(num_ends[one.job_id] == 0 for one in asked),
        "num_ended_twice": sum(num_ends[one.job_id] > 1 for one in asked),
        "questions_by_worker": sorted(Counter(run.worker for run in runs).values()),
    }


def _runs(events: list[Event]) -> list[Run]:
    queued: dict[str, tuple[int, float]] = {}
    begun: dict[str, tuple[str, float]] = {}
    runs = []
    for job_id, kind, attempt, at, data in events:
        if job_id in begun and (kind == "job.queued" or kind in _ENDS):
            worker, started_at = begun.pop(job_id)
            number, queued_at = queued[job_id]
            runs.append(Run(job_id, number, worker, queued_at, started_at, at))
        if kind == "job.queued":
            queued[job_id] = attempt, at
        elif kind == "job.started":
            begun[job_id] = data["worker"], at
    return runs


def _beside_idle(run: Run, spans: dict[str, list[Run]], there: dict[str, Span], made: list[Span]) -> float:
    """The longest wait beside a worker that did nothing, while nobody prefilled the document."""
    longest = 0.0
    for worker, theirs in spans.items():
        busy = [(other.started_at, other.ended_at) for other in theirs]
        span = max(run.queued_at, there[worker][0]), min(run.started_at, there[worker][1])
        longest = max([longest, *(end - start for start, end in _gaps(span, sorted(busy + made)))])
    return longest


def _gaps(span: Span, covers: list[Span]) -> list[Span]:
    """What of a span none of the others, in order, covers."""
    gaps, at = [], span[0]
    for start, end in covers:
        if start > at:
            gaps.append((at, min(start, span[1])))
        at = max(at, end)
        if at >= span[1]:
            break
    gaps.append((at, span[1]))
    return [(start, end) for start, end in gaps if end > start]
