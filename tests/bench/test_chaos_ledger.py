"""The ledger of a chaos run names what is lost, doubled or unexplained, and nothing of a sound run."""

import sqlite3
import time
from contextlib import closing

import pytest

from api.db import Database
from api.documents.store import DocumentStore
from api.documents.text import Extracted
from api.migrate import upgrade
from api.store import JobStore
from api.tenants import DEFAULT_TENANT
from bench.api_process import result
from bench.chaos_ledger import Answer, read
from jobs import Event, EventType, parse_spec

EVENT = "INSERT INTO job_events (job_id, at, seq, type, attempt, data) VALUES (:job, 0, 99"


def event(job_id, kind, data, attempt=1):
    return Event(job_id=job_id, attempt=attempt, type=kind, worker="w", at=time.time(), data=data)


@pytest.fixture
def ledger_of(tmp_path):
    """Makes two jobs that have ended, changes the database by a statement and reads its ledger."""
    upgrade(tmp_path / "longleaf.db")
    database = Database(tmp_path / "longleaf.db")
    store = JobStore(database, lambda job_id: None)
    text = Extracted("A short document.", [], "text/plain")
    document = DocumentStore(database).add(DEFAULT_TENANT, "a", "0" * 64, 17, text).document
    spec = parse_spec({"type": "ask", "documents": [document.id], "questions": ["Yes?"]})
    jobs = [store.create(DEFAULT_TENANT, spec, "tiny").id for _ in range(2)]
    for number, job_id in enumerate(jobs):
        store.hand_out_again(job_id, 1)
        for kind, data in [
            (EventType.STARTED, {}),
            (EventType.DELTA, {"output_index": 0, "text": "Yes."}),
            (EventType.SUCCEEDED, result()),
        ]:
            store.apply([(event(job_id, kind, data, 2), f"{number}-{kind}")])
    database.close()

    def found(statement="SELECT 1", accepted=("a", "b")):
        with closing(sqlite3.connect(tmp_path / "longleaf.db", isolation_level=None)) as connection:
            connection.execute(statement, {"job": jobs[0]} if ":job" in statement else {})
        return read(tmp_path, dict(zip(accepted, jobs, strict=False)))

    return found


def test_a_sound_run_has_answers_and_reasons_and_no_faults(ledger_of):
    ledger = ledger_of()
    assert ledger.faults == []
    assert ledger.answers == {name: [Answer("Yes.", "stop", 1)] for name in "ab"}
    assert ledger.reasons == {"not_in_queue": 2}
    assert ledger.num_gaps == 0


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM jobs WHERE id = :job", "is lost"),
        ("DELETE FROM job_results WHERE job_id = :job", "succeeded and has no result"),
        ("UPDATE jobs SET state = 'running' WHERE id = :job", "is running"),
        ("UPDATE jobs SET attempt = 3 WHERE id = :job", "has attempt 3"),
        ("UPDATE jobs SET last_seq = 9 WHERE id = :job", "has events"),
        (f"{EVENT}, 'job.succeeded', 2, '{{}}')", "has 2 ends"),
        (f"{EVENT}, 'job.started', 2, '{{}}')", "started more than once"),
        (f"""{EVENT}, 'output.delta', 2, '{{"output_index": 0, "text": "Yes."}}')""", "streamed 'Yes.Yes.'"),
    ],
)
def test_what_is_lost_or_doubled_is_named(ledger_of, statement, said):
    faults = ledger_of(statement).faults
    assert any(said in fault for fault in faults), faults


def test_a_job_that_nobody_asked_for_is_named(ledger_of):
    (fault,) = ledger_of(accepted=("a",)).faults
    assert fault.endswith("was never asked for")


def test_streamed_text_with_a_gap_is_counted(ledger_of):
    ledger = ledger_of("DELETE FROM job_events WHERE job_id = :job AND type = 'output.delta'")
    assert (ledger.faults, ledger.num_gaps) == ([], 1)
