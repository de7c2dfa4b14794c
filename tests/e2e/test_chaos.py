"""The chaos run of `bench/chaos.py` in its short form: every kind of fault once, soon after one another."""

from __future__ import annotations

import pytest

from bench.chaos import disturbed, undisturbed
from bench.chaos_caller import make_jobs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SEED = 5
"""With it Redis' clock is set back behind workers that are dead by then."""


def test_whatever_happens_each_job_ends_once_with_the_undisturbed_answer() -> None:
    jobs = make_jobs(SEED, 12, sizes=(512, 1024))
    calm, _ = undisturbed(jobs, 1)
    assert calm.faults == []
    ledger, _ = disturbed(jobs, SEED, num_rounds=0, stop_s=16.0, hold_s=2.0, gap_s=0.8)
    assert ledger.faults == []
    assert sum(ledger.reasons.values()) > 0, "no fault met a job"
    assert set(ledger.answers) == {asked.name for asked in jobs}
    assert ledger.answers == calm.answers
