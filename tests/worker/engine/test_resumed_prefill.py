"""A stage one that was killed or cancelled goes on where it was, and ends as if it had not been."""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import pytest

from cache_store import SnapshotStore
from tests.worker.engine.conftest import BOOK
from tests.worker.engine.killed_prefill import EVERY_LAYER, digest
from tests.worker.engine.tiny import load_tiny
from worker.engine import prefill
from worker.engine.checkpoints import BYTES_PER_S, CheckpointPolicy, Pace
from worker.engine.engine import Document, Engine, Sampling, Stopped
from worker.engine.report import Silent

TEXT = (BOOK * 20)[:5200]
NUM_LAYERS = 24
MODELS = {
    "llama": {"num_hidden_layers": NUM_LAYERS},
    "gemma3_text": {"num_hidden_layers": NUM_LAYERS},
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request, smollm2, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    load_tiny(path, smollm2, request.param, **MODELS[request.param])
    (path / "document").write_text(TEXT)
    return path


def run(folder, kill_at=None):
    """(what the run printed, None where it was killed; the steps of stage one that it reported)."""
    steps = folder / "steps"
    steps.write_text("")
    command = [sys.executable, "-m", "tests.worker.engine.killed_prefill", folder, folder / "document"]
    done = subprocess.run(
        command + [str(kill_at)] * bool(kill_at),
        env=os.environ | {"STEPS": str(steps)},
        capture_output=True,
        text=True,
        check=False,
    )
    num_steps = len(steps.read_text().splitlines())
    if kill_at:
        assert done.returncode == -signal.SIGKILL, done.stderr
        return None, num_steps
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), num_steps


@pytest.fixture(scope="module")
def whole(folder):
    result = run(folder)
    assert result[0]["resumed_at"] == 0
    return result


@pytest.fixture
def emptied(folder, whole):
    shutil.rmtree(folder / "snapshots")
    return folder


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_killed_prefill_repeats_a_twentieth_at_most_and_ends_alike(emptied, whole, share):
    expected, num_whole = whole
    _, num_before = run(emptied, share)
    result, num_after = run(emptied)
    assert num_before + num_after - num_whole <= 0.05 * num_whole
    assert num_before / num_whole - 0.05 <= result["resumed_at"] <= share
    assert result | {"resumed_at": 0} == expected
    assert result["num_checkpoints"] == 0


def test_a_prefill_killed_while_its_blocks_are_stored_is_not_repeated(emptied, whole):
    expected, num_whole = whole
    _, num_before = run(emptied, "store")
    result, num_after = run(emptied)
    # What is behind the prefix is not run before the blocks are stored.
    assert num_before == num_whole - 1
    assert num_after - 1 <= 0.05 * num_whole
    assert result | {"resumed_at": 0} == expected
    assert result["prefix"] == "exact"


@pytest.fixture(scope="module")
def tiny(smollm2, tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"), smollm2, num_hidden_layers=6)


def engine(tiny, store, policy=EVERY_LAYER):
    return Engine(tiny, store, memory_bytes=1 << 40, checkpoints=policy)


class Recording(Silent):
    """What was reported; a cancel at a look."""

    def __init__(self, looks=10**9):
        self.looks, self.seen = looks, []

    def check(self):
        self.looks -= 1
        if self.looks < 0:
            raise Stopped("cancel")

    def progress(self, phase, num_done, num_total, cached_tokens):
        self.seen.append((phase, num_done))


def ask(engine, report=None, text=TEXT, **options):
    return engine.generate([Document("d", text)], "Why?", Sampling(12), report or Silent(), **options)


def cancelled(engine, looks, **options):
    with pytest.raises(Stopped):
        ask(engine, Recording(looks), **options)


def num_chunks(tiny):
    report = Recording()
    ask(Engine(tiny, None, memory_bytes=1 << 40), report)
    ends = {done for phase, done in report.seen if phase == "prefill"}
    return (len(ends) - 1) // 6


def test_a_cancelled_job_goes_on_when_it_comes_again(tiny, store):
    chunks = num_chunks(tiny)
    cancelled(engine(tiny, store), 4 * chunks + 1)
    assert len(store.checkpoints.keys()) == 1
    report = Recording()
    again = ask(engine(tiny, store), report)
    assert report.seen[0][0] == "restore"
    assert [phase for phase, _ in report.seen].count("prefill") == 2 * chunks + 1
    done = [num for phase, num in report.seen if phase != "decode"]
    assert done == sorted(done)
    assert store.checkpoints.keys() == {}
    assert again.usage.cached_tokens == 0
    assert again.text == ask(Engine(tiny, None, memory_bytes=1 << 40)).text


def test_the_same_engine_goes_on_too(tiny, store):
    same = engine(tiny, store)
    cancelled(same, 4 * num_chunks(tiny) + 1)
    report = Recording()
    ask(same, report)
    assert report.seen[0][0] == "restore"


def test_a_continued_prefix_goes_on_behind_its_known_blocks(tiny, store, tmp_path):
    short, other = TEXT[: len(TEXT) // 3], SnapshotStore(tmp_path / "other", 1_000_000_000, min_free_bytes=0)
    for kept in (store, other):
        ask(engine(tiny, kept), text=short)
    cold = ask(engine(tiny, other))
    cancelled(engine(tiny, store), 3 * num_chunks(tiny))
    assert len(store.checkpoints.keys()) == 1
    report = Recording()
    resumed = ask(engine(tiny, store), report)
    assert resumed.prefix == cold.prefix == "continued"
    assert resumed.usage == cold.usage
    assert resumed.text == cold.text
    assert digest(store) == digest(other)


def test_another_prefix_does_not_go_on_from_it(tiny, store):
    cancelled(engine(tiny, store), 4 * num_chunks(tiny) + 1)
    report = Recording()
    ask(engine(tiny, store), report, salt=b"another tenant")
    ask(engine(tiny, store), report, text=TEXT + " The end, and the end of this block of the document." * 9)
    assert len(store.checkpoints.keys()) == 1
    assert report.seen[0][0] == "prefill"


def damage(store, part):
    path = next(store.folder.rglob(f"*{part}*"))
    content = bytearray(path.read_bytes())
    content[-1000] ^= 0x10
    path.write_bytes(content)


def test_a_damaged_layer_is_a_miss(tiny, store):
    cancelled(engine(tiny, store), 4 * num_chunks(tiny) + 1)
    damage(store, "layer-00001")
    report = Recording()
    again = ask(engine(tiny, store), report)
    assert report.seen[0][0] == "prefill"
    assert again.text == ask(Engine(tiny, None, memory_bytes=1 << 40)).text
    assert store.checkpoints.keys() == {}


@pytest.mark.parametrize(("damaged", "num_left"), [([4], 3), ([3], 2), ([3, 4], 6)])
def test_where_the_last_hidden_states_are_damaged_those_before_serve(tiny, store, damaged, num_left):
    chunks = num_chunks(tiny)
    cancelled(engine(tiny, store), 4 * chunks + 1)
    for layer in damaged:
        damage(store, f"hidden-0000{layer}")
    report = Recording()
    again = ask(engine(tiny, store), report)
    assert [phase for phase, _ in report.seen].count("prefill") == num_left * chunks + 1
    assert again.text == ask(Engine(tiny, None, memory_bytes=1 << 40)).text
    assert store.checkpoints.keys() == {}


def test_nothing_is_written_before_a_kill_would_lose_too_much(tiny, store):
    cancelled(engine(tiny, store, replace(EVERY_LAYER, max_repeated=0.5)), 5 * num_chunks(tiny) + 1)
    assert [path.name[33:45] for path in store.folder.rglob("*hidden*")] == ["hidden-00003"]


def test_a_checkpoint_of_other_chunks_is_a_miss(tiny, store, monkeypatch):
    cancelled(engine(tiny, store), 4 * num_chunks(tiny) + 1)
    monkeypatch.setattr(prefill, "CPU_CHUNK_TOKENS", 512)
    report = Recording()
    ask(engine(tiny, store), report)
    assert report.seen[0][0] == "prefill"


def test_hidden_states_of_sixteen_bits_come_back(tiny, store):
    from worker.engine.checkpoints import Checkpoint
    from worker.engine.snapshots import Prefix

    cache = tiny.new_cache()
    prompt = Engine(tiny, None)._prompts.build([Document("d", TEXT)], "Why?")
    prefix = Prefix("f", prompt.head)
    prefill.prefill_prefix(tiny, cache, prefix.tokens, 0, Silent())
    hidden = [mx.random.normal((1, 300, 96)).astype(mx.bfloat16) for _ in range(2)]
    Checkpoint(store, prefix, 0, {}, Pace(EVERY_LAYER)).layer_done(cache, 2, 6, hidden)
    again = Checkpoint(store, prefix, 0, {}, Pace(EVERY_LAYER))
    layer, entering = again.resume(tiny.new_cache(), 6, [mx.zeros_like(h) for h in hidden], 0)
    assert layer == 3
    assert all(mx.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(hidden, entering, strict=True))


def test_without_reuse_there_is_no_checkpoint(tiny, store):
    cancelled(engine(tiny, store), 4 * num_chunks(tiny) + 1, reuse=False)
    assert store.checkpoints.keys() == {}


def test_a_short_prefill_has_no_checkpoint(tiny, store):
    cancelled(engine(tiny, store, CheckpointPolicy(math.inf, 1e9)), 4 * num_chunks(tiny) + 1)
    assert store.checkpoints.keys() == {}


def test_checkpoints_take_their_share_of_a_prefill_and_no_more():
    now, written_at, write_s = 0.0, [], 0.5
    pace = Pace(CheckpointPolicy(max_share=0.03, min_prefill_s=20.0), clock=lambda: now)
    for done in range(1000):
        now += 0.1
        if pace.is_due((done + 1) / 1000, int(BYTES_PER_S)):
            began = pace.elapsed_s
            now += write_s
            pace.wrote(int(BYTES_PER_S), began)
            written_at.append(done / 1000)
    assert 0.02 * now <= write_s * len(written_at) <= 0.03 * now
    assert written_at[0] < 0.1
    assert max(b - a for a, b in itertools.pairwise(written_at)) < 0.2


def test_one_slow_write_does_not_put_off_the_next():
    now, written_at = 0.0, []
    pace = Pace(CheckpointPolicy(max_share=0.03, min_prefill_s=20.0), clock=lambda: now)
    for layer in range(30):
        now += 1.0
        if pace.is_due((layer + 1) / 30, 15_000_000):
            began = pace.elapsed_s
            now += 0.015 if layer else 0.2
            pace.wrote(15_000_000, began)
            written_at.append(layer)
    assert written_at == list(range(30))


def test_a_prefill_that_is_soon_done_is_not_noted():
    now = 0.0
    pace = Pace(CheckpointPolicy(min_prefill_s=20.0), clock=lambda: now)
    now = 1.9
    assert not pace.is_due(0.1, 1)
    now = 2.1
    assert pace.is_due(0.1, 1)
