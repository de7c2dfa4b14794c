"""A restored prefix is compared with what followed from it when it was stored."""

import logging

import mlx.core as mx
import numpy as np
import pytest

from cache_store import SnapshotStore
from tests.worker.engine.conftest import BOOK
from tests.worker.engine.tiny import load_tiny
from worker.engine import self_check
from worker.engine.engine import Document, Engine, Sampling
from worker.engine.report import Silent

TEXT = (BOOK * 8)[:2400]


@pytest.fixture(scope="module", params=["llama", "gemma3_text"])
def tiny(request, smollm2, tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp(request.param), smollm2, request.param)


@pytest.fixture
def other(tiny, smollm2, tmp_path):
    """Another model that says that it is the same one."""
    folder = tmp_path / "other"
    folder.mkdir()
    other = load_tiny(folder, smollm2, tiny.card.architecture)
    attention = other.modules[1].self_attn
    attention.q_proj.weight = attention.q_proj.weight[::-1]
    return other


def ask(model, store, verify="always", text=TEXT):
    engine = Engine(model, store, memory_bytes=1 << 40, verify=verify)
    return engine.generate([Document("d", text)], "Why?", Sampling(8), Silent())


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def quarantined(store):
    return list((store.folder / "quarantine").glob("*"))


def test_a_restored_prefix_passes(tiny, store, caplog):
    cold = ask(tiny, store)
    kept = [entry for entry in store.entries() if entry.attached == "logits"]
    assert len(kept) == 1
    again = ask(tiny, store)
    assert again.usage.cached_tokens > 400
    assert again.text == cold.text == ask(tiny, store, "never").text
    assert again.text == ask(tiny, None).text
    assert warnings(caplog) == []


def test_another_model_under_the_same_name_is_caught_and_prefills_again(tiny, other, store, caplog):
    ask(tiny, store)
    ask(tiny, store, text=TEXT[:1200])
    num_blocks = len(store.entries())
    caught = ask(other, store)
    assert caught.usage.cached_tokens == 0
    assert caught.prefix == "exact"
    assert caught.text == ask(other, None).text
    assert len(quarantined(store)) == num_blocks
    (line,) = warnings(caplog)
    assert "the logits that follow the prefix" in line
    assert ask(other, store).usage.cached_tokens > 400
    assert len(warnings(caplog)) == 1


def test_a_flipped_bit_of_a_weight_is_caught(tiny, store):
    ask(tiny, store)
    weight = tiny.modules[1].mlp.down_proj.weight
    flipped = np.array(weight)
    # The highest bit of the exponent: what is below 2 becomes enormous.
    flipped.view(np.uint32)[7, 3] ^= 1 << 30
    tiny.modules[1].mlp.down_proj.weight = mx.array(flipped)
    try:
        caught = ask(tiny, store)
    finally:
        tiny.modules[1].mlp.down_proj.weight = weight
    assert caught.usage.cached_tokens == 0


def test_what_was_caught_is_a_miss_where_nothing_may_be_written(tiny, other, store):
    ask(tiny, store)
    reader = SnapshotStore(store.folder, 1_000_000_000, min_free_bytes=0)
    reader._folder.read_only = True
    assert ask(other, reader).usage.cached_tokens == 0
    assert ask(other, reader, "never").usage.cached_tokens == 0


def test_never_looks_at_nothing_and_keeps_nothing(tiny, other, store):
    ask(tiny, store, "never")
    assert not [entry for entry in store.entries() if entry.attached == "logits"]
    assert ask(other, store).usage.cached_tokens > 400


def test_a_sample_is_the_first_restore_and_every_eighth_after_it(tiny, store):
    ask(tiny, store)
    engine = Engine(tiny, store, memory_bytes=1 << 40)
    num_cached = []
    attention = tiny.modules[1].self_attn
    right = attention.q_proj.weight
    try:
        for _ in range(9):
            engine._held.forget()
            output = engine.generate([Document("d", TEXT)], "Why?", Sampling(1), Silent())
            num_cached.append(output.usage.cached_tokens)
            attention.q_proj.weight = right[::-1]
    finally:
        attention.q_proj.weight = right
    assert min(num_cached[:8]) > 400
    assert num_cached[8] == 0


def test_a_difference_that_rounding_explains_passes(tiny, store):
    check = self_check.SelfCheck(tiny, store, "always")
    values = np.array([20.0, -3.0], np.float32)
    num_layers = len(tiny.layers)
    assert check._limit(values, 2.0**-24) == pytest.approx((2 * num_layers) ** 0.5 * 20 / 2048)
    assert check._limit(values, 2.0**-8) == pytest.approx((2 * num_layers) ** 0.5 * 20 / 256)
