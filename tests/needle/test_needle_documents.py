"""The generator's promises, and that the score takes a right answer and no other."""

import numpy as np
import pytest

from bench.needle import words
from bench.needle.documents import TASKS, Filler, is_right, make_document, make_facts


@pytest.fixture
def rng():
    return np.random.default_rng(11)


@pytest.fixture
def filler(rng):
    return Filler(rng, 3000)


def occurrences(piece, whole):
    windows = np.lib.stride_tricks.sliding_window_view(whole, len(piece))
    return np.flatnonzero((windows == piece).all(1))


@pytest.mark.parametrize("num_tokens", [9, 64, 1000, 8192, 131_072])
def test_a_document_has_exactly_the_tokens_that_were_asked_for(rng, filler, num_tokens):
    document = make_document(rng, filler, num_tokens, make_facts(rng, 1))
    assert document.ids.shape == (num_tokens,)
    assert words.WORDS[document.ids[-1]] == "."


def test_every_fact_stands_in_the_document_once_and_between_sentences(rng, filler):
    facts = make_facts(rng, 30, 5, 5, alike=True)
    document = make_document(rng, filler, 4000, facts)
    starts = [occurrences(row, document.ids).tolist() for row in facts.rows]
    assert all(len(found) == 1 for found in starts)
    assert sorted(s for found in starts for s in found) == document.fact_starts.tolist()
    before = document.ids[document.fact_starts[document.fact_starts > 0] - 1]
    assert {words.WORDS[i] for i in before} == {"."}


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_a_fact_stands_at_the_depth_that_was_asked_for(rng, filler, depth):
    document = make_document(rng, filler, 5000, make_facts(rng, 1), np.array([depth]))
    assert document.questions[0].depth == pytest.approx(depth, abs=0.01)


def test_the_same_seed_gives_the_same_document():
    def once():
        rng = np.random.default_rng(3)
        return make_document(rng, Filler(rng, 500), 2000, make_facts(rng, 9, 2, 2)).ids

    assert (once() == once()).all()


def test_all_tasks_are_asked_and_their_questions_name_their_person(rng, filler):
    facts = make_facts(rng, 4, 3, 2)
    assert {task for task, *_ in facts.questions} == set(TASKS) - {"single_key"}
    for _, question, _, rows in facts.questions:
        assert set(question[-3:-1].tolist()) <= set(np.concatenate([facts.rows[i] for i in rows]).tolist())


def test_one_person_alone_is_a_single_key(rng):
    assert [task for task, *_ in make_facts(rng, 1).questions] == ["single_key"]


def test_people_who_are_alike_share_names_but_are_told_apart(rng):
    facts = make_facts(rng, 200, alike=True)
    people = {tuple(question[-3:-1].tolist()) for _, question, _, _ in facts.questions}
    assert len(people) == 200
    assert len({given for given, _ in people}) < 40
    assert len({surname for _, surname in people}) < 40


def test_facts_longer_than_the_document_are_refused_with_both_counts(rng, filler):
    with pytest.raises(ValueError, match=r"10 facts take 90 tokens, the document has 89"):
        make_document(rng, filler, 89, make_facts(rng, 10))


def test_the_score_takes_the_stated_values_and_nothing_else(rng, filler):
    document = make_document(rng, filler, 2000, make_facts(rng, 2, 2, 1))
    assert len(document.questions) == 8
    for question in document.questions:
        right = words.text(question.answer)
        assert is_right(question, right)
        assert is_right(question, f"They gave {right}.")
        assert not is_right(question, "")
        assert not is_right(question, right.rsplit(" ", 1)[0])
        assert not is_right(question, f"{right} babel")
        others = [
            q
            for q in document.questions
            if (q.answer.tolist(), q.task) != (question.answer.tolist(), question.task)
        ]
        wrong = [
            q for q in others if q.task != "two_hop" and question.task != "two_hop" and q.task != "count"
        ]
        assert not any(is_right(question, words.text(q.answer)) for q in wrong)


def test_two_hops_lead_to_the_code_of_the_one_who_was_sent(rng):
    facts = make_facts(rng, 0, 0, 1)
    (_, _, direct, _), (_, question, answer, rows) = facts.questions
    sent = facts.rows[rows[1]]
    assert sent[2:4].tolist() == question[-3:-1].tolist()
    assert sent[4:6].tolist() == direct[:2].tolist()
    assert answer.tolist() == sent[2:4].tolist() + direct.tolist()
