"""The shipped model through the real engine: out of 8K and 16K each format answers as exact KV does.

A fault among the blocks has to cost recall, or these tests would see nothing.
"""

import numpy as np
import pytest

from bench.needle.batches import HEAD
from bench.needle.documents import Document, Filler, make_document, make_facts
from bench.needle.recall import (
    SNAPSHOT_BYTES,
    ask,
    ask_exactly,
    damage_cache,
    engine_of,
    load_model,
    one_bit,
    values_of_the_next_block,
)
from bench.needle.words import ids
from cache_store import SnapshotStore
from worker.engine.kv_cache import blocks_end, whole_blocks

NUM_QUESTIONS = 24
ONE = 1 / NUM_QUESTIONS
"""What one question more or less makes."""


@pytest.fixture(scope="module")
def model():
    return load_model()


def many_facts(num_tokens):
    """A document with a fact in every 96 tokens, about people who share names, and some of its questions."""
    rng = np.random.default_rng(num_tokens)
    facts = make_facts(rng, num_tokens // 96, alike=True)
    document = make_document(rng, Filler(rng, 5000), num_tokens, facts)
    asked = [document.questions[i] for i in rng.permutation(len(document.questions))[:NUM_QUESTIONS]]
    return Document(document.ids, asked, document.fact_starts)


@pytest.fixture(scope="module", params=[8192, 16_384])
def document(request):
    return many_facts(request.param)


@pytest.fixture(scope="module")
def exact(model, document):
    return ask_exactly(model, document, document.questions)


@pytest.fixture(scope="module")
def store(document, tmp_path_factory):
    return SnapshotStore(tmp_path_factory.mktemp(f"blocks{len(document.ids)}"), SNAPSHOT_BYTES, 0)


@pytest.fixture(scope="module")
def cold(model, document, store):
    asked = ask(engine_of(model, "int4c", store), document, document.questions)
    assert asked.cached_tokens == 0
    return asked


@pytest.fixture
def restored_engine(model, document, store, cold):
    """An engine that holds the document's blocks as they came from disk."""
    engine = engine_of(model, "int4c", store)
    first = ask(engine, document, document.questions[:1])
    num_prompt = len(HEAD) + len(document.ids)
    assert first.cached_tokens == blocks_end(whole_blocks(num_prompt))
    return engine


@pytest.fixture(scope="module")
def short():
    return many_facts(2048)


def test_exact_keys_and_values_give_the_right_answers(exact):
    assert exact.recall == 1


def test_int4c_answers_as_exact_keys_and_values(exact, cold):
    assert cold.recall >= exact.recall - ONE


def test_int4c_from_disk_gives_the_cold_answers(document, cold, restored_engine):
    assert ask(restored_engine, document, document.questions).answers == cold.answers


def test_int8_answers_as_exact_keys_and_values(model, document, exact):
    int8 = ask(engine_of(model, "int8", None), document, document.questions)
    assert int8.recall >= exact.recall - ONE


@pytest.mark.parametrize("damage", [values_of_the_next_block, one_bit])
def test_damaged_blocks_cost_recall(document, cold, restored_engine, damage):
    damage_cache(restored_engine, damage)
    after = ask(restored_engine, document, document.questions)
    assert after.cached_tokens > 0
    assert after.recall <= cold.recall - 4 * ONE


@pytest.mark.parametrize("format", ["int4c", "int8", "k8v4", "affine4"])
def test_each_format_answers_out_of_a_short_document(model, short, format):
    assert ask(engine_of(model, format, None), short, short.questions).recall >= 1 - ONE


def test_a_nonce_before_the_document_costs_no_recall(model, short):
    nonce = ids("nonce number babel badas bavor fabel .")
    behind = Document(np.concatenate([nonce, short.ids]), short.questions, short.fact_starts)
    asked = ask(engine_of(model, "int4c", None), behind, short.questions, reuse=False)
    assert asked.cached_tokens == 0
    assert asked.recall >= 1 - ONE
