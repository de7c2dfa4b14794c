"""The tokenizer is the inverse of the generator's text, and the engine's prompt is what was trained on."""

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer

from bench.needle import words
from bench.needle.batches import ASK, HEAD
from bench.needle.documents import Filler, make_document, make_facts
from bench.needle.tokenizer import write_tokenizer
from prompts import Document, PromptBuilder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def chat_tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def document():
    rng = np.random.default_rng(2)
    return make_document(rng, Filler(rng, 3000), 20_000, make_facts(rng, 100, 10, 10))


def test_each_word_of_a_document_is_one_token(chat_tokenizer, document):
    ids = chat_tokenizer.encode(words.text(document.ids), add_special_tokens=False)
    assert ids == document.ids.tolist()


def test_answers_come_back_as_text(chat_tokenizer, document):
    for question in document.questions:
        assert chat_tokenizer.decode(question.answer.tolist()) == words.text(question.answer)


def test_the_prompt_has_the_tokens_of_a_training_sequence(folder, document):
    builder = PromptBuilder(folder)
    question = document.questions[0]
    prompt = builder.build([Document("d", words.text(document.ids))], words.text(question.ids))
    expected = np.concatenate([HEAD, document.ids, question.ids, ASK])
    assert prompt.tokens.tolist() == expected.tolist()
    assert prompt.document_end == len(HEAD) + len(document.ids)
    assert prompt.stage == "answer"


def test_other_words_fall_into_letters_and_come_back(chat_tokenizer):
    text = "Longleaf reads zebra books, 42 of them"
    ids = chat_tokenizer.encode(text, add_special_tokens=False)
    assert words.ID_OF[words.UNKNOWN] not in ids
    assert chat_tokenizer.decode(ids) == text


def test_the_end_of_an_answer_is_the_one_token_that_ends_text(chat_tokenizer):
    assert set(chat_tokenizer.eos_token_ids) == {words.ID_OF[words.END]}


def test_there_is_room_for_every_word():
    assert len(words.WORDS) == len(set(words.WORDS)) <= words.VOCAB_SIZE
