"""Jobs on a real stack to which everything happens that may happen to one, compared with an undisturbed run.

    python -m bench.chaos [--jobs 200] [--rounds 2] [--seed 1] [--json bench/results/chaos.json]

Redis with its append-only file, the API and two workers of the needle model, which a supervisor starts again
when they die. A caller uploads documents and asks about them with a key of its own for each job, again and
again until it has an answer. Meanwhile come all kinds of faults in random order, each at a worker that has a
job in hand where it is about workers, with new jobs during it:

- rounds: each kind once, the next one when every job has ended and both workers are back
- storm: each kind once more, the next one after at most 3 s, with stopped processes among them

Where a job's third attempt is lost it fails, as documented, and the caller retries it. At the end, with
everything stopped, the database must hold every job exactly once, with one end, one result and a reason for
each attempt, and answers that are those of the undisturbed run, token counts included; and in the
rounds no process may have ended but those that were told to. Prints a table, and exits with 1 where something
is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.chaos_caller import Asked, Caller, make_jobs
from bench.chaos_faults import Faults
from bench.chaos_ledger import Ledger, read
from bench.chaos_stack import API, ROLES, Stack
from bench.machine import commit, cpu_name
from bench.needle.documents import is_right
from jobs import VERSION

STOP_S = 22.0
"""Longer than a worker's lease of 15 s and what bridges a flushed Redis, 5 s."""
HOLD_S = 10.0
STORM_GAP_S = 3.0
PATIENCE_S = 300.0
SIZES = (1024, 2048, 4096, 8192)
"""Tokens of the documents."""


@contextmanager
def running() -> Iterator[tuple[Stack, Caller]]:
    """A stack with both workers ready; stopped at the end, its files still there for a moment."""
    with tempfile.TemporaryDirectory(prefix="ll-chaos-", dir="/tmp") as name:
        stack = Stack(Path(name))
        try:
            stack.start()
            caller = Caller(stack.url)
            wait("the service", caller.is_ready, stack)
            yield stack, caller
        finally:
            stack.stop()
            stack.remove_disks()


def wait(what: str, check: Any, stack: Stack, limit_s: float = PATIENCE_S) -> float:
    """Seconds until `check` holds."""
    began = time.monotonic()
    while not check():
        if time.monotonic() - began > limit_s:
            logs = "\n".join(f"--- {role}\n{stack.log(role)[-4000:]}" for role in ROLES)
            raise SystemExit(f"{what}: not so after {limit_s:g} s\n{logs}")
        time.sleep(0.05)
    return time.monotonic() - began


def portions(jobs: list[Asked], num: int) -> Iterator[list[Asked]]:
    """The jobs in `num` parts of about the same size, the larger ones first."""
    for part in np.array_split(np.arange(len(jobs)), num):
        yield [jobs[i] for i in part]


def undisturbed(jobs: list[Asked], num_portions: int) -> tuple[Ledger, list[float]]:
    """The ledger of a run without faults, and the seconds that each portion of it took."""
    with running() as (stack, caller):
        seconds = []
        for part in portions(jobs, num_portions):
            for asked in part:
                caller.ask(asked)
            seconds.append(wait("the undisturbed jobs", caller.is_done, stack))
        stack.stop()
        return read(stack.disk(API), caller.accepted), seconds


def disturbed(
    jobs: list[Asked],
    seed: int,
    num_rounds: int,
    stop_s: float = STOP_S,
    hold_s: float = HOLD_S,
    gap_s: float = STORM_GAP_S,
) -> tuple[Ledger, dict[str, Any]]:
    """The ledger of a run with faults, and what they were; those of the storm begin within `gap_s`."""
    order = random.Random(seed)
    with running() as (stack, caller):
        faults = Faults(stack, seed, stop_s, hold_s)
        plan = [order.sample(sorted(faults.kinds), len(faults.kinds)) for _ in range(num_rounds + 1)]
        parts = portions(jobs, sum(map(len, plan)))
        done: list[dict[str, Any]] = []
        for kinds in plan[:-1]:
            for kind in kinds:
                done.append(strike(stack, caller, faults, kind, next(parts)))
                print(json.dumps(done[-1]), flush=True)
        storm = weather(stack, caller, faults, plan[-1], parts, [order.uniform(0, gap_s) for _ in plan[-1]])
        starts = dict(stack.num_starts)
        stack.stop()
        ledger = read(stack.disk(API), caller.accepted)
        told = {
            "faults": done,
            "storm": storm,
            "not_done": faults.not_done,
            "starts": starts,
            "submit_tries": caller.num_tries,
            "retried_by_the_caller": caller.num_retried,
        }
        return ledger, told


def strike(stack: Stack, caller: Caller, faults: Faults, kind: str, part: list[Asked]) -> dict[str, Any]:
    """One fault with jobs before and during it, until all is as before."""
    for asked in part[: (len(part) + 1) // 2]:
        caller.ask(asked)
    give_up_at = time.monotonic() + 5
    while not faults.busy() and time.monotonic() < give_up_at:
        time.sleep(0.002)
    was_busy = bool(faults.busy())
    for asked in part[(len(part) + 1) // 2 :]:
        caller.ask(asked)
    starts = Counter(stack.num_starts)
    began = time.monotonic()
    victim = faults.kinds[kind]()
    lasted = time.monotonic() - began
    wait(f"the end of all jobs after {kind}", caller.is_done, stack)
    jobs_s = time.monotonic() - began
    wait(f"the service after {kind}", caller.is_ready, stack)
    return {
        "kind": kind,
        "victim": victim,
        "found_a_busy_worker": was_busy,
        "lasted_s": round(lasted, 1),
        "jobs_ended_s": round(jobs_s, 1),
        "all_well_s": round(time.monotonic() - began, 1),
        "started_again": dict(stack.num_starts - starts),
        "ended_by_themselves": sorted(set(stack.num_starts - starts) - faults.ended_by(kind, victim)),
    }


def weather(
    stack: Stack,
    caller: Caller,
    faults: Faults,
    kinds: list[str],
    parts: Iterator[list[Asked]],
    gaps_s: list[float],
) -> dict[str, Any]:
    """All kinds soon after one another, those that last beside the others."""
    began = time.monotonic()
    threads = []
    for kind, gap_s in zip(kinds, gaps_s, strict=True):
        for asked in next(parts):
            caller.ask(asked)
        time.sleep(gap_s)
        threads.append(threading.Thread(target=faults.kinds[kind]))
        threads[-1].start()
    for thread in threads:
        thread.join()
    over = time.monotonic()
    wait("the end of all jobs after the storm", caller.is_done, stack)
    wait("the service after the storm", caller.is_ready, stack)
    return {
        "kinds": kinds,
        "lasted_s": round(over - began, 1),
        "all_well_after_s": round(time.monotonic() - over, 1),
    }


def verdict(jobs: list[Asked], calm: Ledger, ledger: Ledger) -> dict[str, Any]:
    """How the two ledgers compare."""
    differing = [
        asked.name
        for asked in jobs
        if asked.name not in ledger.answers or ledger.answers[asked.name] != calm.answers.get(asked.name)
    ]
    right = [
        is_right(question, answer.text)
        for asked in jobs
        for question, answer in zip(asked.questions, ledger.answers.get(asked.name, ()), strict=False)
    ]
    return {
        "jobs": len(jobs),
        "succeeded": len(ledger.answers),
        "faults_in_the_ledger": ledger.faults,
        "answers": sum(len(asked.questions) for asked in jobs),
        "jobs_that_answer_otherwise": differing,
        "right_answers": sum(right),
        "attempts": sum(ledger.attempts.values()),
        "most_attempts_of_a_job": max(ledger.attempts.values()),
        "why_attempts_were_repeated": dict(sorted(ledger.reasons.items())),
        "jobs_with_gaps_in_their_streamed_text": ledger.num_gaps,
        "undisturbed": {"faults_in_the_ledger": calm.faults, "attempts": sum(calm.attempts.values())},
    }


def table(done: list[dict[str, Any]]) -> str:
    """Each kind with the seconds from its beginning until all jobs had ended and all was well again."""
    lines = ["| fault | times | at | lasts, s | jobs ended, s: median, most | all well, s: median, most |"]
    lines.append("|---|---|---|---|---|---|")
    for kind in sorted({fault["kind"] for fault in done}):
        these = [fault for fault in done if fault["kind"] == kind]
        ended, well = ([f[name] for f in these] for name in ("jobs_ended_s", "all_well_s"))
        victims = ", ".join(sorted({f["victim"] for f in these}))
        lasts = max(f["lasted_s"] for f in these)
        lines.append(
            f"| {kind} | {len(these)} | {victims} | {lasts} | {median(ended):.1f}, {max(ended)} "
            f"| {median(well):.1f}, {max(well)} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    load_before = os.getloadavg()[0]
    jobs = make_jobs(given.seed, given.jobs, SIZES)
    calm, calm_s = undisturbed(jobs, given.jobs // 4)
    ledger, told = disturbed(jobs, given.seed, given.rounds)
    found = verdict(jobs, calm, ledger)
    report = {
        "bench": "chaos",
        "command": f"python -m bench.chaos --jobs {given.jobs} --rounds {given.rounds} --seed {given.seed}",
        "commit": commit(),
        "seed": given.seed,
        **found,
        "portion_of_4_jobs_undisturbed_s": {
            "median": round(median(calm_s), 1),
            "most": round(max(calm_s), 1),
        },
        **told,
        "longleaf": VERSION,
        "python": platform.python_version(),
        "machine": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
    }
    print(table(told["faults"]))
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    ended = [fault for fault in told["faults"] if fault["ended_by_themselves"]]
    is_sound = not (calm.faults or ledger.faults or found["jobs_that_answer_otherwise"] or ended)
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
