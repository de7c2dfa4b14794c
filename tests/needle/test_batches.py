"""What a training sequence teaches, and where its tokens stand."""

import numpy as np
import pytest

from bench.needle import words
from bench.needle.batches import CONTEXT_TOKENS, HEAD, batches, make_sequence
from bench.needle.documents import TASKS, Filler


@pytest.fixture(params=[128, 512, 4096])
def sequence(request):
    rng = np.random.default_rng(request.param)
    return make_sequence(rng, Filler(rng, 3000), request.param)


def test_a_sequence_begins_as_the_engines_prompt(sequence):
    assert sequence[0][: len(HEAD)].tolist() == HEAD.tolist()


def test_answers_and_their_ends_are_learned_and_nothing_else(sequence):
    ids, _, flags = sequence
    special = {words.ID_OF[w]: w for w in words.SPECIAL}
    answering = False
    for token, flag in zip(ids[:-1].tolist(), flags[:-1].tolist(), strict=True):
        if special.get(token) == words.ASSISTANT:
            answering = True
        elif special.get(token) == words.END:
            answering = False
        assert bool(flag) == answering


def test_positions_rise_within_the_context_and_leap_between_sentences_alone(sequence):
    ids, positions, _ = sequence
    steps = np.diff(positions)
    assert steps.min() >= 1
    assert positions[0] == 0
    assert positions[-1] < CONTEXT_TOKENS
    before = {words.WORDS[i] for i in ids[:-1][steps > 1]}
    assert before <= {".", words.END}


def test_some_sequences_leap_and_some_do_not():
    rng = np.random.default_rng(0)
    filler = Filler(rng, 1000)
    leaps = [bool((np.diff(make_sequence(rng, filler, 256)[1]) > 1).any()) for _ in range(30)]
    assert any(leaps)
    assert not all(leaps)


def test_a_batch_holds_the_same_number_of_tokens_at_every_length():
    made = batches(1, 2048, lambda: 2048)
    shapes = {next(made).ids.shape for _ in range(40)}
    assert shapes == {(1, 2048), (2, 1024), (4, 512), (8, 256)}


def test_tasks_name_whose_answer_a_token_is_of():
    batch = next(batches(1, 4096, lambda: 4096))
    assert batch.tasks.shape == batch.learned.shape
    after = batch.ids.flatten()[batch.learned[batch.tasks == TASKS.index("count")] + 1]
    counts = {words.ID_OF[w] for w in words.COUNTS}
    assert counts & set(after.tolist())


def test_the_same_seed_gives_the_same_batches():
    first, second = (next(batches(5, 512, lambda: 256)) for _ in range(2))
    assert (first.ids == second.ids).all()
    assert (first.positions == second.positions).all()
    assert (first.learned == second.learned).all()
