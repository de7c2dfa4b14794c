"""Jobs that end half-way, by a cancel or for want of memory, leave nothing behind and spoil nothing."""

import gc
import os
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from cache_store import SnapshotStore
from tests.worker.engine.conftest import BOOK
from tests.worker.engine.tiny import load_tiny
from worker.engine import prefill
from worker.engine.engine import Document, Engine, EngineError, Request, Sampling, Stopped
from worker.engine.report import Silent

DOCUMENT = [Document("book", (BOOK * 40)[:6000])]


class StopsAt(Silent):
    """A cancel that is seen at the n-th look."""

    def __init__(self, looks):
        self.looks, self.phases = looks, []

    def check(self):
        self.looks -= 1
        if self.looks < 0:
            raise Stopped("cancel")

    def progress(self, phase, num_done, num_total, cached_tokens):
        self.phases.append(phase)


@pytest.fixture(scope="module")
def engine(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    store = SnapshotStore(folder / "snapshots", 1_000_000_000, min_free_bytes=0)
    return Engine(load_tiny(folder, smollm2), store, memory_bytes=1 << 40)


def held():
    """(bytes that MLX holds for us, threads, open files)."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory(), threading.active_count(), len(os.listdir("/proc/self/fd"))


def test_a_cancel_ends_prefill_at_the_next_chunk(engine):
    report = StopsAt(2)
    with pytest.raises(Stopped):
        engine.generate(DOCUMENT, "Summarize.", Sampling(4), report, reuse=False)
    assert report.phases == ["prefill"] * 2


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
def test_two_hundred_cancels_leave_nothing_behind(engine):
    wanted = Sampling(20)
    whole = engine.generate(DOCUMENT, "Summarize.", wanted, Silent(), reuse=False).text
    total = StopsAt(10**9)
    engine.generate(DOCUMENT, "Summarize.", wanted, total, reuse=False)
    num_looks = 10**9 - total.looks
    before, phases = held(), set()
    for i in range(200):
        # Every place where a cancel can be seen, many times over: in any layer's chunk and any token.
        report = StopsAt(i * 7 % num_looks)
        questions = [Request(q, wanted, report) for q in ("Summarize.", "Who speaks?")[: 1 + i % 2]]
        with pytest.raises(Stopped):
            engine.answer(DOCUMENT, questions, reuse=False)
        phases |= set(report.phases)
    assert phases == {"prefill", "decode"}
    assert held() == before
    assert engine.generate(DOCUMENT, "Summarize.", wanted, Silent(), reuse=False).text == whole


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (RuntimeError, "[metal::malloc] Unable to allocate 123 bytes."),
        (RuntimeError, "cudaMallocAsync(&data, size, stream) failed: out of memory"),
        (MemoryError, "no memory for the scratch of the CPU kernels"),
    ],
    ids=["Metal", "CUDA", "CPU"],
)
def test_memory_that_runs_out_fails_the_job_alone(engine, kind, message, monkeypatch):
    wanted = Sampling(8)
    whole = engine.generate(DOCUMENT, "Summarize.", wanted, Silent(), reuse=False).text
    before = held()[0]

    def encode(k, v, format):
        raise kind(message)

    with monkeypatch.context() as patch:
        patch.setattr(prefill, "encode", encode)
        with pytest.raises(
            EngineError, match=r"ran out of memory at [0-9,]+ tokens.*LONGLEAF_MEMORY_BYTES"
        ) as why:
            engine.generate(DOCUMENT, "Summarize.", wanted, Silent(), reuse=False)
    assert why.value.problem.code == "out_of_memory"
    del why
    assert held()[0] == before
    assert engine.generate(DOCUMENT, "Summarize.", wanted, Silent(), reuse=False).text == whole


def test_another_error_is_not_taken_for_want_of_memory(engine, monkeypatch):
    def encode(k, v, format):
        raise RuntimeError("a bug")

    monkeypatch.setattr(prefill, "encode", encode)
    with pytest.raises(RuntimeError, match="a bug"):
        engine.generate(DOCUMENT, "Summarize.", Sampling(2), Silent(), reuse=False)
