"""Entries in Redis that no API wrote: they may be lost, but stop no worker and hold up no other job."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from api_rig import Api, FakeWorker, running
from pydantic import ValidationError
from test_queue_dispatch import ask

from api.settings import Settings
from jobs import DocumentRef, RunRequest, Summarize, queue_name
from jobs.dispatch import MAX_META_BYTES, OWNERS_KEY, own_key, shared_key

MODEL = "tiny"
WELL = {"rank": 0, "since": 0, "leads": [], "num_wanted": 0, "num_chars": 0}
METAS: dict[str, str] = {
    "none": "",
    "no json": "{",
    "a list": "[1]",
    "deep": "[" * 5000 + "]" * 5000,
    "deep leads": json.dumps(WELL | {"leads": [[[["a"]]]]}),
    "leads of tables": json.dumps(WELL | {"leads": [{}, {}], "num_wanted": 2}),
    "leads of null": json.dumps(WELL | {"leads": [None], "num_wanted": 1}),
    "leads of truth": json.dumps(WELL | {"leads": [True], "num_wanted": 1}),
    "more wanted than there are": json.dumps(WELL | {"leads": ["a"], "num_wanted": 9, "num_chars": 9}),
    "a rank that is none": '{"rank": NaN, "since": 0, "leads": [], "num_wanted": 0, "num_chars": 0}',
    "a time without end": '{"rank": 1e999, "since": -1e999, "leads": [], "num_wanted": 0, "num_chars": 1}',
    "text for numbers": json.dumps(WELL | {"rank": "0", "since": "0"}),
    "a million leads": json.dumps(WELL | {"leads": ["a"] * 1_000_000}),
    "long": json.dumps(WELL | {"x": "y" * 5_000_000}),
}  # fmt: skip


@pytest.fixture
def slow(settings: Settings) -> Iterator[Api]:
    """An API whose own reconciler passes once, at the start, and then never."""
    with running(settings.model_copy(update={"reconcile_s": 3600.0})) as api:
        yield api


def taken(worker: FakeWorker, patience_s: float = 20.0) -> list[str | None]:
    """All that a worker is given, until there is nothing."""
    found = [worker.next(patience_s)]
    while found[-1] is not None:
        found.append(worker.next(patience_s))
    return found[:-1]


@pytest.mark.parametrize("name", METAS)
@pytest.mark.parametrize("whose", ["shared", "w1", "another's", "a gone one's"])
def test_a_forged_note_of_how_an_attempt_waits_stops_nobody(slow: Api, name: str, whose: str) -> None:
    worker, other = FakeWorker(slow.redis, "w1"), FakeWorker(slow.redis, "w2")
    worker.be_there()
    job_id = ask(slow)
    if whose == "another's":
        other.be_there()
    key = {"shared": shared_key(MODEL), "w1": own_key(MODEL, "w1")}.get(whose, own_key(MODEL, "w2"))
    if "own" not in key:
        slow.redis.sadd(OWNERS_KEY + queue_name(MODEL), key.rpartition(":")[2])
    slow.redis.hset("rq:job:forged-1", "meta", METAS[name])
    slow.redis.lpush(key, "forged-1")
    assert sorted(taken(worker)) == sorted([job_id, "forged"])
    assert sorted(taken(worker)) == []


def test_a_note_that_is_too_long_is_not_read(slow: Api) -> None:
    worker = FakeWorker(slow.redis, "w1")
    worker.be_there()
    waits = json.dumps(WELL | {"rank": time.time() + 1e6})
    slow.redis.hset("rq:job:long-1", "meta", waits + " " * MAX_META_BYTES)
    slow.redis.hset("rq:job:short-1", "meta", waits)
    slow.redis.rpush(own_key(MODEL, "w1"), "short-1")
    slow.redis.rpush(shared_key(MODEL), "long-1")
    assert taken(worker) == ["long", "short"]


@pytest.mark.parametrize("entry", [b"\xff\xfe-1", b"no attempt", b"a" * 100_000, b"../../x-1", b"a\r\nb-1"])
def test_an_entry_that_names_no_attempt_stops_nobody(slow: Api, entry: bytes) -> None:
    worker = FakeWorker(slow.redis, "w1")
    worker.be_there()
    slow.redis.lpush(shared_key(MODEL), entry)
    job_id = ask(slow)
    assert job_id in taken(worker)


def test_a_hash_of_another_type_stops_nobody(slow: Api) -> None:
    worker = FakeWorker(slow.redis, "w1")
    worker.be_there()
    slow.redis.set("rq:job:forged-1", "a string")
    slow.redis.lpush(shared_key(MODEL), "forged-1")
    job_id = ask(slow)
    assert taken(worker) == ["forged", job_id]


FORGED: list[dict[str, Any]] = [
    {"documents": [{"id": "../../jobs?x="}]},
    {"documents": [{"id": "doc_1/../../../metrics#"}]},
    {"documents": [{"id": ""}]},
    {"documents": [{"id": "doc_1\r\nX-Evil: 1"}]},
    {"prefix_salt": "../../../etc"},
    {"prefix_salt": "abc"},
]


@pytest.mark.parametrize("changes", FORGED)
def test_a_forged_request_names_no_path_and_no_other_tenants_salt(changes: dict[str, Any]) -> None:
    ref = DocumentRef(id="doc_1", name="a", text_sha256="0" * 64, num_chars=1)
    spec = Summarize(documents=["doc_1"])
    lawful = RunRequest(job_id="job_1", attempt=1, spec=spec, documents=[ref], prefix_salt="ab" * 16)
    data = lawful.model_dump(mode="json")
    for forged in changes.get("documents", []):
        data["documents"][0] |= forged
    data |= {name: value for name, value in changes.items() if name != "documents"}
    with pytest.raises(ValidationError):
        RunRequest.model_validate(data)
