"""Tenants share no prefix, in memory or on disk; a salt's own are found again."""

import io

import pytest

from cache_store import SnapshotStore, stored_prefixes
from jobs import DocumentRef, Prompt, RunRequest
from tests.worker.engine.conftest import BOOK
from tests.worker.engine.tiny import load_tiny
from worker import child, protocol
from worker.engine.engine import Document, Engine, Sampling
from worker.engine.report import Silent
from worker.engine.snapshots import tenant_name

TEXT = (BOOK * 8)[:2400]
ANNA, BERT = b"a" * 16, b"b" * 16


@pytest.fixture(scope="module")
def tiny(smollm2, tmp_path_factory):
    return load_tiny(tmp_path_factory.mktemp("tiny"), smollm2)


@pytest.fixture
def engine(tiny, store):
    return Engine(tiny, store, memory_bytes=1 << 40)


def ask(engine, salt):
    return engine.generate([Document("d", TEXT)], "Why?", Sampling(4), Silent(), salt=salt)


@pytest.mark.parametrize("others", [BERT, b""], ids=["another tenant", "the default tenant"])
def test_two_salts_share_no_prefix_in_memory(tiny, others):
    engine = Engine(tiny, None, memory_bytes=1 << 40)
    first = ask(engine, ANNA)
    again = ask(engine, ANNA)
    other = ask(engine, others)
    assert first.usage.cached_tokens == other.usage.cached_tokens == 0
    assert again.usage.cached_tokens > 400
    assert first.text == again.text == other.text


@pytest.mark.parametrize("others", [BERT, b""], ids=["another tenant", "the default tenant"])
def test_two_salts_share_no_prefix_on_disk(tiny, store, others):
    ask(Engine(tiny, store, memory_bytes=1 << 40), ANNA)
    other = ask(Engine(tiny, store, memory_bytes=1 << 40), others)
    again = ask(Engine(tiny, store, memory_bytes=1 << 40), ANNA)
    assert other.usage.cached_tokens == 0
    assert again.usage.cached_tokens > 400
    assert {prefix.tenant for prefix in stored_prefixes(store)} == {tenant_name(ANNA), tenant_name(others)}


def test_deleting_a_tenant_leaves_the_others_prefixes(engine, store):
    for salt in (ANNA, BERT):
        ask(engine, salt)
    assert store.remove_tenant(tenant_name(ANNA)) == len(store.entries()) > 0
    assert {entry.tenant for entry in store.entries()} == {tenant_name(BERT)}


def test_each_block_is_worth_its_share_of_the_prefill(engine, store):
    output = ask(engine, b"")
    worth = {entry.prefill_s for entry in store.entries() if not entry.attached}
    num_blocks = sum(not entry.attached for entry in store.entries())
    assert len(worth) == 1
    assert 0 < worth.pop() * num_blocks <= output.timing.prefill_s


def test_the_salt_of_a_job_reaches_its_keys(tiny, tmp_path):
    store = SnapshotStore(tmp_path, 100_000_000, min_free_bytes=0)
    engine = Engine(tiny, store, memory_bytes=1 << 40)
    channel = child.Channel(io.BytesIO(), io.BytesIO())
    spec = Prompt(documents=["d"], instruction="Why?", max_output_tokens=4)
    cached = []
    for attempt, salt in enumerate([ANNA, BERT, ANNA], 1):
        reference = DocumentRef(id="d", name="d", text_sha256="", num_chars=len(TEXT))
        request = RunRequest(
            job_id="j", attempt=attempt, spec=spec, documents=[reference], prefix_salt=salt.hex()
        )
        run = protocol.Run(request=request, documents=[protocol.DocumentText(id="d", name="d", text=TEXT)])
        end = child.do(engine, run, channel)
        assert end.outcome == "succeeded"
        cached.append(end.result.usage.cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] > 400
