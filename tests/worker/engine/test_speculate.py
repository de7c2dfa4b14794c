"""Drafts come from what was said before, and stop where they don't pay."""

import numpy as np

from worker.engine.speculate import Drafter, DraftPolicy


def drafter(prompt, longest=4, step_cost=1.5):
    return Drafter(np.array(prompt, np.uint32), DraftPolicy(longest, step_cost))


def test_a_draft_is_what_followed_the_last_three_tokens():
    assert drafter([1, 2, 3, 4, 5, 6, 7, 8]).draft([2, 3, 4], 9) == [5, 6, 7, 8]


def test_a_draft_ends_with_the_room_and_with_what_is_known():
    assert drafter([1, 2, 3, 4, 5, 6]).draft([1, 2, 3], 2) == [4, 5]
    assert drafter([1, 2, 3, 4]).draft([1, 2, 3], 9) == [4, 1, 2, 3]
    assert drafter([1, 2, 3, 4]).draft([1, 2, 3], 0) == []
    assert drafter([1, 2, 3, 4]).draft([2, 3], 9) == []


def test_grams_across_the_prompts_end_and_in_the_answer_are_known():
    guesses = drafter([5, 6])
    assert guesses.draft([7, 8, 9], 9) == []
    assert guesses.draft([7, 8, 9, 5, 6, 7], 9) == [8, 9, 5, 6]
    assert guesses.draft([7, 8, 9, 5, 6, 7, 8, 9, 4, 7, 8, 9], 2) == [4, 7]


def test_of_several_places_the_last_is_taken():
    assert drafter([1, 2, 3, 4, 0, 1, 2, 3, 5, 0, 0]).draft([1, 2, 3], 1) == [5]


def test_an_accepted_draft_goes_on_where_it_was():
    guesses = drafter([1, 2, 3, 10, 11, 12, 13, 14, 15, 0, 10, 11, 12, 99, 0], longest=2)
    answer = [1, 2, 3]
    assert guesses.draft(answer, 9) == [10, 11]
    guesses.judge(2)
    answer += [10, 11, 12]
    assert guesses.draft(answer, 9) == [13, 14]


def test_short_prompts_have_no_grams():
    for num_tokens in range(4):
        assert drafter(list(range(num_tokens))).draft([], 9) == []


def test_drafts_that_do_not_pay_pause_ever_longer_and_come_back():
    guesses = drafter([1, 2, 3, 4] * 4, step_cost=2.0)
    answer, asked = [], []
    for place in range(2000):
        answer.append(1 + place % 4)
        if guesses.draft(answer, 9):
            asked.append(place)
            guesses.judge(0)
    gaps = np.diff(asked)
    assert list(gaps[:8]) == [1, 1, 1, 17, 33, 65, 129, 257]
    assert set(gaps[8:]) == {257}
    good = 0
    for place in range(2000, 2600):
        answer.append(1 + place % 4)
        if guesses.draft(answer, 9):
            guesses.judge(4)
            good += 1
    assert good > 300


def test_drafts_that_pay_never_pause():
    guesses = drafter([1, 2, 3, 4] * 4, step_cost=2.0)
    answer = [1, 2, 3]
    for place in range(3, 400):
        assert guesses.draft(answer, 9)
        guesses.judge(2)
        answer.append(1 + place % 4)
