"""Several workers: who is given which attempt, and that each is given to one."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from api_rig import Api, FakeWorker, card, eventually, held, result, running
from test_reconciler import Clock, after

from api.reconciler import Reconciler
from api.settings import Settings
from jobs import EventType, queue_name, run_id, worker_key
from jobs.dispatch import IDLE_KEY, NUM_LOOKED_AT, own_key, shared_key
from worker.attempts import Attempts

MODEL = "tiny"


@pytest.fixture
def slow(settings: Settings) -> Iterator[Api]:
    """An API whose own reconciler passes once, at the start, and then never."""
    with running(settings.model_copy(update={"reconcile_s": 3600.0})) as api:
        yield api


@pytest.fixture
def pair(slow: Api) -> tuple[FakeWorker, FakeWorker]:
    """Two workers that are there, neither of which has asked for anything yet."""
    workers = FakeWorker(slow.redis, "w1"), FakeWorker(slow.redis, "w2")
    for worker in workers:
        worker.be_there(store=f"store of {worker.name}")
    return workers


def text(name: str, num_chars: int = 300) -> str:
    """As long as asked for, in few words: the test's model has room for 50."""
    return f"{name} " + "x" * (num_chars - len(name) - 1)


def document(api: Api, name: str = "a", num_chars: int = 300) -> str:
    return api.upload(text(name, num_chars), f"{name}.txt")


def ask(api: Api, *documents: str, **spec: object) -> str:
    return str(api.submit(documents=list(documents) or [document(api)], **spec)["id"])


def start(api: Api, worker: FakeWorker, job_id: str) -> None:
    assert worker.next() == job_id
    worker.be_there(job_id, 1, store=f"store of {worker.name}")
    worker.say(job_id, 1, EventType.STARTED, {"store": f"store of {worker.name}"})
    api.wait_state(job_id, "running")


def read(api: Api, worker: FakeWorker, *documents: str) -> None:
    """Let a worker have read these documents."""
    job_id = ask(api, *documents)
    start(api, worker, job_id)
    worker.say(job_id, 1, EventType.SUCCEEDED, result())
    api.wait_state(job_id, "succeeded")
    worker.be_there(store=f"store of {worker.name}")


def let_wait(api: Api, job_id: str, seconds: float) -> None:
    """Let an attempt have been put into its queue that much earlier."""
    entry = api.queue().fetch_job(run_id(job_id, 1))
    assert entry is not None
    entry.meta["since"] -= seconds
    entry.meta["rank"] -= seconds
    entry.save_meta()


def test_a_question_goes_to_the_worker_that_read_its_document(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    read(slow, second, document(slow, "a"))
    read(slow, first, document(slow, "b"))
    about_a, about_b = ask(slow, document(slow, "a")), ask(slow, document(slow, "b"))
    assert slow.queued() == []
    assert (slow.waiting_for("w1"), slow.waiting_for("w2")) == ([about_b], [about_a])
    assert (first.next(), second.next()) == (about_b, about_a)


def test_eight_questions_that_come_together_wait_for_one_worker(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    for worker in pair:
        assert worker.next() is None  # both are idle
    jobs = [ask(slow) for _ in range(8)]
    waiting = {worker.name: slow.waiting_for(worker.name) for worker in pair}
    assert sorted(waiting.values()) == [[], jobs]


def test_who_takes_the_first_of_eight_takes_the_others_along(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    other = document(slow, "other")
    jobs = [ask(slow), ask(slow), ask(slow, other), *(ask(slow) for _ in range(6))]
    about_other = jobs.pop(2)
    assert len(slow.queued()) == 9  # nobody has asked: it is open who reads it
    assert first.next() == jobs[0]
    assert slow.waiting_for("w1") == jobs[1:]
    late = ask(slow)
    assert slow.waiting_for("w1") == [*jobs[1:], late]
    assert (second.next(), second.next()) == (about_other, None)
    assert [first.next() for _ in range(8)] == [*jobs[1:], late]


def test_a_job_that_nobody_holds_goes_to_an_idle_worker(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    assert pair[1].next() is None
    job_id = ask(slow)
    assert slow.waiting_for("w2") == [job_id]
    next_one = ask(slow, document(slow, "other"))
    assert slow.queued() == [run_id(next_one, 1)]


def test_a_worker_that_was_given_something_is_idle_no_more(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    assert pair[1].next() is None
    job_id = ask(slow)
    slow.redis.lrem(own_key(MODEL, "w2"), 1, run_id(job_id, 1))  # it has it
    next_one = ask(slow, document(slow, "other"))
    assert slow.queued() == [run_id(next_one, 1)]


def test_a_worker_that_has_not_asked_for_long_is_not_taken_for_idle(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    assert pair[1].next() is None
    slow.redis.zincrby(IDLE_KEY + queue_name(MODEL), -4.0, "w2")
    job_id = ask(slow)
    assert slow.queued() == [run_id(job_id, 1)]


@pytest.mark.parametrize("kept", ["nothing of redis", "nothing of redis, by another API"])
def test_what_workers_hold_is_known_from_the_database(
    slow: Api, settings: Settings, pair: tuple[FakeWorker, FakeWorker], kept: str
) -> None:
    read(slow, pair[1], document(slow))
    slow.redis.flushall()
    for worker in pair:
        worker.be_there(store=f"store of {worker.name}")
    if "another API" in kept:
        with running(settings) as other:
            job_id = ask(other)
    else:
        job_id = ask(slow)
    assert slow.waiting_for("w2") == [job_id]


def test_a_restarted_worker_is_known_by_its_store(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    read(slow, pair[1], document(slow))
    pair[1].go()
    FakeWorker(slow.redis, "w3").be_there(store="store of w2")
    job_id = ask(slow)
    assert slow.waiting_for("w3") == [job_id]


def test_a_store_of_another_model_is_of_no_use(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    read(slow, pair[1], document(slow))
    slow.redis.flushall()
    pair[1].be_there(store="store of w2", model="other")
    job_id = ask(slow)
    assert slow.queued() == [run_id(job_id, 1)]


@pytest.mark.parametrize("change", [{"state": "draining"}, {"state": "loading", "card": None}])
def test_a_worker_that_takes_nothing_is_given_nothing(
    slow: Api, pair: tuple[FakeWorker, FakeWorker], change: dict[str, object]
) -> None:
    read(slow, pair[1], document(slow))
    pair[1].be_there(store="store of w2", **change)
    job_id = ask(slow)
    assert slow.queued() == [run_id(job_id, 1)]


def test_of_two_that_hold_it_the_one_with_less_to_do_is_given_it(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    read(slow, first, document(slow))
    job_id = ask(slow)
    let_wait(slow, job_id, 21)
    assert second.next() == job_id  # stolen: both have it
    second.be_there(job_id, 1)
    jobs = [ask(slow) for _ in range(3)]
    assert (slow.waiting_for("w1"), slow.waiting_for("w2")) == (jobs[:2], jobs[2:])


def test_an_idle_worker_takes_what_has_waited_too_long_for_another_one(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    read(slow, first, document(slow, "a"))
    read(slow, first, document(slow, "b"))
    start(slow, first, ask(slow, document(slow, "long")))
    about_a, about_b, more_of_a = (ask(slow, document(slow, name)) for name in "aba")
    let_wait(slow, about_a, 19)
    assert second.next() is None
    let_wait(slow, about_a, 2)
    assert second.next() == about_a
    assert (slow.waiting_for("w1"), slow.waiting_for("w2")) == ([about_b], [more_of_a])


def test_a_worker_that_is_behind_is_relieved_by_a_busy_one(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    read(slow, first, document(slow, "a"))
    read(slow, second, document(slow, "b"))
    near, far, cold, next_cold, behind = (ask(slow, document(slow, name)) for name in "bbcda")
    # The own queue counts as 20 s older, the other one's as 20 s younger.
    waits = {cold: 81.5, near: 61.0, behind: 100.0, far: 59.0, next_cold: 78.5}
    for job_id, seconds in waits.items():
        let_wait(slow, job_id, seconds)
    assert [second.next() for _ in waits] == list(waits)


def test_what_is_long_to_prefill_is_left_to_who_has_it(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    read(slow, first, document(slow, "short"))
    read(slow, first, document(slow, "long", 4000))
    second.be_there(store="store of w2", prefill_tokens_per_s=10.0)
    about_long, about_short = ask(slow, document(slow, "long", 4000)), ask(slow, document(slow, "short"))
    cold = ask(slow, document(slow, "cold"))
    for job_id in (about_long, about_short):
        let_wait(slow, job_id, 100)
    # 4,000 characters are 100 s here: behind what nobody holds, yet before nothing at all.
    assert [second.next() for _ in range(4)] == [about_short, cold, about_long, None]
    # And nothing where they have been read.
    busy = ask(slow, document(slow, "long", 4000))
    slow.redis.lmove(own_key(MODEL, "w2"), own_key(MODEL, "w1"))
    let_wait(slow, busy, 100)
    ask(slow, document(slow, "colder"))
    assert second.next() == busy


def test_what_waits_behind_documents_that_are_being_read_is_taken_too(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    read(slow, first, document(slow, "a"))
    begun, follower, about_a = (ask(slow, document(slow, name)) for name in "bba")
    entry = slow.queue().fetch_job(run_id(begun, 1))
    assert entry is not None
    assert [first.next() for _ in range(2)] == [about_a, begun]
    about_a = ask(slow, document(slow, "a"))
    first.be_there(begun, 1, store="store of w1", phase="prefill", lead=entry.meta["leads"][0])
    for job_id in (follower, about_a):
        let_wait(slow, job_id, 100)
    assert (second.next(), second.next()) == (about_a, None)


def test_the_patience_is_a_setting(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    first, second = pair
    read(slow, first, document(slow, "a"))
    start(slow, first, ask(slow, document(slow, "long")))
    job_id = ask(slow, document(slow, "a"))
    let_wait(slow, job_id, 4)
    assert second.next(patience_s=5) is None
    assert second.next(patience_s=3) == job_id


def test_nothing_is_taken_from_a_worker_that_is_making_its_kv(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    running_job, waiting_job = ask(slow), ask(slow)
    start(slow, first, running_job)
    let_wait(slow, waiting_job, 100)
    entry = slow.queue().fetch_job(run_id(waiting_job, 1))
    assert entry is not None
    busy = {"store": "store of w1", "lead": entry.meta["leads"][0]}
    first.be_there(running_job, 1, phase="prefill", **busy)
    assert second.next() is None
    first.be_there(running_job, 1, phase="decode", **busy)
    assert second.next() == waiting_job


@pytest.mark.parametrize("end", ["dies", "drains"])
def test_what_waits_for_a_gone_worker_is_taken_at_once_and_in_order(
    slow: Api, pair: tuple[FakeWorker, FakeWorker], end: str
) -> None:
    first, second = pair
    read(slow, first, document(slow, "a"))
    read(slow, first, document(slow, "b"))
    read(slow, second, document(slow, "c"))
    jobs = [ask(slow, document(slow, name)) for name in "acba"]
    shared = ask(slow, document(slow, "d"), priority="high")
    if end == "dies":
        first.go()
    else:
        first.be_there(state="draining")
    # Its own one counts as 20 s older; what was left behind comes in its place.
    assert second.next() == shared
    assert [second.next() for _ in range(4)] == [jobs[1], jobs[0], jobs[3], jobs[2]]
    assert second.next() is None


def test_priorities_hold_in_the_own_queue(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    read(slow, pair[0], document(slow))
    low, normal, high = (ask(slow, priority=priority) for priority in ("low", "normal", "high"))
    other = ask(slow, priority="normal")
    assert slow.waiting_for("w1") == [high, normal, other, low]


def test_a_job_that_nobody_holds_is_passed_for_the_patience_alone(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, _ = pair
    read(slow, first, document(slow, "a"))
    cold, next_cold = ask(slow, document(slow, "b")), ask(slow, document(slow, "c"))
    warm = [ask(slow, document(slow, "a")) for _ in range(2)]
    assert first.next() == warm[0]
    let_wait(slow, cold, 21)
    assert [first.next() for _ in range(3)] == [cold, warm[1], next_cold]


def test_a_higher_priority_in_the_shared_queue_goes_before_what_a_worker_holds(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    read(slow, pair[0], document(slow, "a"))
    warm, urgent = ask(slow, document(slow, "a")), ask(slow, document(slow, "b"), priority="high")
    assert [pair[0].next() for _ in range(2)] == [urgent, warm]


@pytest.mark.parametrize("spec", [{"reuse": False}, {}])
def test_what_has_nothing_to_reuse_follows_nobody(
    slow: Api, pair: tuple[FakeWorker, FakeWorker], spec: dict[str, object]
) -> None:
    short = document(slow, "a", 300 if spec else 191)
    job_id = ask(slow, short, **spec)
    start(slow, pair[0], job_id)
    next_one = ask(slow, short, **spec)
    assert slow.queued() == [run_id(next_one, 1)]


def test_documents_that_begin_alike_follow_where_most_of_them_is_held(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    long, short, other = document(slow, "long", 2000), document(slow, "b", 300), document(slow, "c", 300)
    read(slow, first, long, short)
    read(slow, second, short, other)
    mostly_known, hardly_known = ask(slow, long, other), ask(slow, short, long)
    assert slow.waiting_for("w1") == [mostly_known]
    assert slow.queued() == [run_id(hardly_known, 1)]
    # By itself a document stands in the prompt without its name.
    alone = ask(slow, long)
    assert slow.queued() == [run_id(hardly_known, 1), run_id(alone, 1)]


def test_a_cancelled_job_leaves_the_own_queue(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    read(slow, pair[0], document(slow))
    kept, cancelled = ask(slow), ask(slow)
    assert slow.http.post(f"/v1/jobs/{cancelled}/cancel").json()["state"] == "cancelled"
    assert slow.waiting_for("w1") == [kept]


def test_the_reconciler_knows_the_own_queues(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    clock = Clock()
    reconciler = Reconciler(
        slow.services.jobs, slow.services.queue, lost_after_s=10, gone_after_s=5, clock=clock
    )
    read(slow, pair[0], document(slow))
    kept = ask(slow)
    slow.redis.rpush(own_key(MODEL, "w1"), "job_deleted-7")
    after(reconciler, clock, 11)
    assert slow.waiting_for("w1") == [kept]
    assert slow.job(kept)["attempt"] == 1
    slow.redis.delete(own_key(MODEL, "w1"))
    after(reconciler, clock, 11)
    assert slow.waiting_for("w1") == [kept]
    assert slow.job(kept)["attempt"] == 2


def test_own_queues_of_workers_long_gone_are_forgotten(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, second = pair
    read(slow, first, document(slow))
    job_id = ask(slow)
    first.go()
    assert {worker for _, worker in slow.services.queue.lists()} == {"", "w1"}
    assert (second.next(), second.next()) == (job_id, None)
    assert {worker for _, worker in slow.services.queue.lists()} == {""}


def test_an_entry_of_which_nothing_is_known_is_due(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    job_id = ask(slow)
    for name, meta in (("job_a", "{"), ("job_b", "[1]"), ("job_c", '{"rank": "high"}')):
        slow.redis.hset(f"rq:job:{name}-1", "meta", meta)
        slow.redis.lpush(shared_key(MODEL), f"{name}-1")
    assert [pair[0].next() for _ in range(4)] == ["job_c", "job_b", "job_a", job_id]


def test_followers_are_looked_for_up_to_a_bound(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    first_job = ask(slow)
    slow.redis.rpush(shared_key(MODEL), *(f"job_{n}-1" for n in range(NUM_LOOKED_AT)))
    far = ask(slow)
    slow.redis.lmove(shared_key(MODEL), shared_key(MODEL), "RIGHT", "RIGHT")
    assert pair[0].next() == first_job
    assert slow.waiting_for("w1") == []
    assert run_id(far, 1) in slow.queued()


def test_each_attempt_is_taken_once_whoever_asks(slow: Api) -> None:
    names = [f"w{number}" for number in range(4)]
    for name in names:
        FakeWorker(slow.redis, name).be_there(store=name)
    documents = [document(slow, f"d{number}") for number in range(6)]
    taken: list[str] = []
    all_submitted = threading.Event()

    def work(name: str) -> None:
        attempts = Attempts(slow.redis, MODEL, name, patience_s=0.01)
        while (rq_id := attempts.take()) is not None or not all_submitted.is_set():
            taken.extend([rq_id] if rq_id else [])

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    submitted = []
    for number in range(120):
        submitted.append(run_id(ask(slow, documents[number % 6]), 1))
        if number == 60:
            slow.redis.delete(worker_key("w0"))  # it is taken for dead, and goes on
    all_submitted.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert sorted(taken) == sorted(submitted)


def test_workers_show_what_they_do_hold_and_have_waiting(
    slow: Api, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    first, _ = pair
    documents = [document(slow, "a"), document(slow, "b")]
    for read_one in documents:
        read(slow, first, read_one)
    first.hold(held("p1"), held("p2"))
    job_id = ask(slow, documents[0])
    busy = {"phase": "prefill", "eta_s": 7.5, "card": card().model_copy(update={"memory_bytes": 8_000})}
    first.be_there("job_x", 1, store="store of w1", **busy)
    shown = {view["name"]: view for view in slow.http.get("/v1/workers").json()}
    view = shown["w1"]
    assert (view["state"], view["phase"], view["eta_s"], view["num_waiting"]) == ("busy", "prefill", 7.5, 1)
    assert (view["card"]["memory_bytes"], view["num_prefixes"]) == (8_000, 2)
    assert view["documents"] == documents[::-1]
    assert (shown["w2"]["num_waiting"], shown["w2"]["documents"], shown["w2"]["num_prefixes"]) == (
        0,
        [],
        None,
    )
    slow.http.post(f"/v1/jobs/{job_id}/cancel")
    eventually(lambda: slow.http.get("/v1/workers").json()[0]["num_waiting"] == 0)


def test_a_deleted_document_is_held_by_nobody(slow: Api, pair: tuple[FakeWorker, FakeWorker]) -> None:
    kept, gone = document(slow, "a"), document(slow, "b")
    for read_one in (kept, gone):
        read(slow, pair[0], read_one)
    assert slow.http.delete(f"/v1/documents/{gone}").status_code == 204
    shown = {view["name"]: view["documents"] for view in slow.http.get("/v1/workers").json()}
    assert shown["w1"] == [kept]
