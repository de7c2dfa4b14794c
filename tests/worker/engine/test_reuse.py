"""Cached equals cold: what is restored gives the tokens that the first run gave."""

import dataclasses

import pytest

from cache_store import Keyring, SnapshotStore
from worker.engine.engine import Document, Engine, Stopped
from worker.engine.kv_cache import blocks_end, whole_blocks
from worker.engine.report import Silent

LENGTHS = [60, 100, 191, 192, 193, 319, 320, 321, 447, 448, 449, 700]
"""Prompts around the block boundaries at 192, 320 and 448, shorter and longer ones."""


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_restored_equals_cold_token_for_token(model, store, document, answer, num_tokens):
    text = document(num_tokens)
    cold = answer(Engine(model, store), text)
    restored = answer(Engine(model, store), text)
    never_stored = answer(Engine(model, None), text, reuse=False)
    assert cold.usage.cached_tokens == 0
    assert restored.usage.cached_tokens == blocks_end(whole_blocks(num_tokens))
    assert restored.usage.cached_tokens + restored.usage.prefilled_tokens == cold.usage.prompt_tokens
    assert restored.text == cold.text == never_stored.text
    assert restored.usage.output_tokens == cold.usage.output_tokens > 0
    assert restored.prefix == cold.prefix == ("exact" if num_tokens >= 192 else "none")


def test_a_second_question_reuses_the_document(engine, document, answer):
    first = answer(engine, document(330))
    second = answer(engine, document(330), "Who kept the light?")
    assert first.usage.cached_tokens == 0
    assert second.usage.cached_tokens == 320
    assert second.usage.prefilled_tokens < first.usage.prefilled_tokens / 4


def test_a_prefix_held_in_memory_gives_what_a_restored_one_gives(model, store, engine, document, answer):
    text = document(330)
    answer(engine, text, "Who kept the light?", max_output_tokens=150)
    in_memory = answer(engine, text)
    from_disk = answer(Engine(model, store), text)
    assert in_memory.usage.cached_tokens == from_disk.usage.cached_tokens == 320
    assert in_memory.text == from_disk.text


def test_questions_in_any_order_give_the_same_answers(model, store, document, answer):
    text = document(330)
    questions = ["When was it built?", "Who kept the light?", "Which ship struck the reef?"]
    forward, backward = Engine(model, store), Engine(model, None)
    answers = [answer(forward, text, q).text for q in questions]
    assert [answer(backward, text, q).text for q in reversed(questions)] == answers[::-1]


def test_a_changed_document_reuses_what_stands_before_the_change(model, store, document, answer):
    text = document(470).text
    answer(Engine(model, store), Document("d", text))
    middle = len(text) * 3 // 4
    edited = Document("d", text[:middle] + " CHANGED " + text[middle:])
    again = answer(Engine(model, store), edited)
    assert again.usage.cached_tokens == 320
    assert again.usage.prefilled_tokens == again.usage.prompt_tokens - 320
    assert again.prefix == "continued"


def test_a_continued_prefix_is_stored_as_such(model, store, document, answer):
    text = document(470).text
    answer(Engine(model, store), Document("d", text[: len(text) * 3 // 4]))
    assert answer(Engine(model, store), Document("d", text)).prefix == "continued"
    assert answer(Engine(model, store), Document("d", text)).prefix == "continued"


def test_a_document_that_is_a_shorter_cut_reuses_exact_blocks(model, store, document, answer):
    text = document(470).text
    answer(Engine(model, store), Document("d", text))
    cut = Document("d", text[: len(text) * 3 // 4])
    shorter = answer(Engine(model, store), cut)
    assert shorter.usage.cached_tokens == 320
    assert shorter.prefix == "exact"
    assert shorter.text == answer(Engine(model, None), cut, reuse=False).text


def test_without_reuse_nothing_is_read_or_written(engine, store, document, answer):
    answer(engine, document(330), reuse=False)
    assert store.entries() == []
    assert answer(engine, document(330)).usage.cached_tokens == 0
    assert len([entry for entry in store.entries() if not entry.attached]) == 2
    assert answer(engine, document(330), reuse=False).usage.cached_tokens == 0


def test_a_damaged_block_is_prefilled_again_and_the_answer_is_right(model, store, document, answer):
    text = document(460)
    cold = answer(Engine(model, store), text)
    blocks = [entry for entry in store.entries() if not entry.attached]
    newest = max(blocks, key=lambda entry: store.info(entry.key).meta["first_token"])
    path = next(store.folder.rglob(f"{newest.key.hex}*"))
    content = bytearray(path.read_bytes())
    content[-1000] ^= 0x10
    path.write_bytes(content)
    again = answer(Engine(model, store), text)
    assert again.usage.cached_tokens == 320
    assert again.prefix == "continued"
    assert len(again.text) > 0
    assert cold.usage.prompt_tokens == again.usage.prompt_tokens


def test_a_full_disk_does_not_stop_an_answer(model, tmp_path, document, answer):
    without_room = SnapshotStore(tmp_path / "tiny", budget_bytes=10_000, min_free_bytes=0)
    assert (
        answer(Engine(model, without_room), document(330)).text
        == answer(Engine(model, None), document(330)).text
    )


class StopAfter(Silent):
    def __init__(self, phase):
        self.phase, self.seen = phase, None

    def progress(self, phase, num_done, num_total, cached_tokens):
        self.seen = phase

    def check(self):
        if self.seen == self.phase:
            raise Stopped("cancel")


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_stopped_job_leaves_the_engine_right(model, store, document, answer, phase):
    engine = Engine(model, store)
    with pytest.raises(Stopped):
        answer(engine, document(330), report=StopAfter(phase))
    assert answer(engine, document(330)).text == answer(Engine(model, None), document(330)).text


def test_snapshots_of_other_weights_are_not_used(model, store, document, answer):
    answer(Engine(model, store), document(330))
    card = model.card.model_copy(update={"fingerprint": "of other weights"})
    other = Engine(dataclasses.replace(model, card=card), store)
    assert answer(other, document(330)).usage.cached_tokens == 0


def test_a_deleted_prefix_is_forgotten_in_memory_too(engine, store, document, answer):
    text = document(448)
    first = answer(engine, text)
    assert answer(engine, text).usage.cached_tokens == 448
    other = SnapshotStore(store.folder, 1_000_000_000, min_free_bytes=0)
    for entry in other.entries():
        other.remove(entry.key)
    again = answer(engine, text)
    assert again.usage.cached_tokens == 0
    assert again.text == first.text


@pytest.fixture
def keyring(tmp_path):
    folder = tmp_path / "keys"
    folder.mkdir()
    return Keyring(folder)


def test_an_encrypted_prefix_gives_what_a_plain_one_gives(model, store, tmp_path, document, answer, keyring):
    plain = answer(Engine(model, store), document(460))
    encrypted = SnapshotStore(tmp_path / "encrypted", 1_000_000_000, 0, keyring=keyring)
    cold, restored = (answer(Engine(model, encrypted), document(460)) for _ in range(2))
    assert (cold.usage.cached_tokens, restored.usage.cached_tokens) == (0, 448)
    assert plain.text == cold.text == restored.text
    assert not {entry.key for entry in store.entries()} & {entry.key for entry in encrypted.entries()}


def test_without_its_key_a_prefix_is_used_neither_from_disk_nor_from_memory(
    model, tmp_path, document, answer, keyring
):
    store = SnapshotStore(tmp_path / "encrypted", 1_000_000_000, 0, keyring=keyring)
    no_room = SnapshotStore(tmp_path / "tiny", 10_000, 0, keyring=keyring)
    engines = [Engine(model, store), Engine(model, no_room)]
    for engine in engines:
        answer(engine, document(330))
        assert answer(engine, document(330)).usage.cached_tokens == 320
    keyring.remove("")
    assert [answer(engine, document(330)).usage.cached_tokens for engine in engines] == [0, 0]
    assert answer(Engine(model, store), document(330)).usage.cached_tokens == 320, "under a key made since"
