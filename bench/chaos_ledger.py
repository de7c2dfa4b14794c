"""What the database says after a run, read when everything has stopped: lost, doubled, unexplained jobs.

It knows the tables of the API and nothing of what was done to it.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs import TERMINAL, EventType, State

ENDS = {EventType.SUCCEEDED, EventType.FAILED, EventType.CANCELLED, EventType.EXPIRED}


@dataclass(frozen=True)
class Answer:
    """What must not depend on anything but the job."""

    text: str
    finish_reason: str
    output_tokens: int


@dataclass
class Ledger:
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """By the caller's name of a job, of those that have succeeded."""
    attempts: dict[str, int] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    """Of every attempt after a job's first one, as its event says."""
    faults: list[str] = field(default_factory=list)
    """What is not as it must be, a sentence each; empty for a sound run."""
    num_gaps: int = 0
    """Jobs whose streamed text lacks a part of their result: it was in a Redis that lost its data."""
    prefixes: Counter[str] = field(default_factory=Counter)


def read(data: Path, accepted: Mapping[str, str]) -> Ledger:
    """The ledger of an API's data folder.

    Args:
        accepted: the job id that the API answered, by the caller's name of the job.
    """
    ledger = Ledger()
    with closing(sqlite3.connect(data / "longleaf.db")) as database:
        database.row_factory = sqlite3.Row
        jobs = {row["id"]: row for row in database.execute("SELECT * FROM jobs")}
        results = {
            row["job_id"]: json.loads(row["result"]) for row in database.execute("SELECT * FROM job_results")
        }
        events: dict[str, list[sqlite3.Row]] = defaultdict(list)
        for row in database.execute("SELECT * FROM job_events ORDER BY job_id, seq"):
            events[row["job_id"]].append(row)
        for row in database.execute("PRAGMA integrity_check"):
            if row[0] != "ok":
                ledger.faults.append(f"the database is damaged: {row[0]}")
    names = {job_id: name for name, job_id in accepted.items()}
    if len(names) < len(accepted):
        ledger.faults.append("two jobs of the caller have one id")
    ledger.faults += [f"{names[job_id]} ({job_id}) is lost" for job_id in names if job_id not in jobs]
    ledger.faults += [f"{job_id} was never asked for" for job_id in jobs if job_id not in names]
    for job_id in jobs.keys() & names.keys():
        _read_job(ledger, names[job_id], jobs[job_id], events[job_id], results.get(job_id))
    return ledger


def _read_job(
    ledger: Ledger, name: str, job: sqlite3.Row, events: list[sqlite3.Row], result: dict[str, Any] | None
) -> None:
    def fault(what: str) -> None:
        ledger.faults.append(f"{name} ({job['id']}) {what}")

    state = State(job["state"])
    if state not in TERMINAL:
        fault(f"is {state}")
    kinds = [event["type"] for event in events]
    # A job that failed and was retried has ended before, too.
    retried = [json.loads(e["data"]) for e in events if e["type"] == EventType.QUEUED][1:]
    num_ends = sum(kind in ENDS for kind in kinds)
    if num_ends != 1 + sum(data["reason"] == "retry" for data in retried) or kinds[-1] not in ENDS:
        fault(f"has {num_ends} ends in {kinds}")
    if (result is not None) != (state is State.SUCCEEDED):
        fault(f"is {state} and has {'a' if result else 'no'} result")
    ledger.attempts[name] = job["attempt"]
    ledger.reasons.update(data["reason"] for data in retried)
    if [data["attempt"] for data in retried] != list(range(2, job["attempt"] + 1)):
        fault(f"has attempt {job['attempt']}, and events that name {retried}")
    starts = Counter(event["attempt"] for event in events if event["type"] == EventType.STARTED)
    if any(number > 1 for number in starts.values()):
        fault(f"has attempts that started more than once: {dict(starts)}")
    numbers = [event["seq"] for event in events]
    if numbers != sorted(set(numbers)) or numbers[-1] != job["last_seq"]:
        fault(f"has events {numbers} of {job['last_seq']}")
    if result is None:
        return
    outputs = result["outputs"]
    ledger.answers[name] = [
        Answer(o["text"], o["finish_reason"], o["usage"]["output_tokens"]) for o in outputs
    ]
    ledger.prefixes.update(o["prefix"] for o in outputs)
    told = [""] * len(outputs)
    done: Counter[int] = Counter()
    attempts = [0] * len(outputs)
    for event in events:
        data = json.loads(event["data"])
        if event["type"] == EventType.OUTPUT:
            done[data["output_index"]] += 1
        elif event["type"] == EventType.DELTA:
            index = data["output_index"]
            # An attempt that has to begin an answer anew says all of it.
            if event["attempt"] != attempts[index]:
                told[index], attempts[index] = "", event["attempt"]
            told[index] += data["text"]
    if any(number > 1 for number in done.values()):
        fault(f"has answers that were done more than once: {dict(done)}")
    for text, output in zip(told, outputs, strict=True):
        if len(text) > len(output["text"]):
            fault(f"streamed {text!r} and has the result {output['text']!r}")
    ledger.num_gaps += any(text != output["text"] for text, output in zip(told, outputs, strict=True))
