"""Tokens become thinking, text and an end; with a real tokenizer, one token at a time."""

import pytest

from prompts.thinking import TAGS
from worker.engine.answer import Answer
from worker.engine.repetition import NumberTokens
from worker.engine.report import Silent
from worker.engine.sampling import Sampling
from worker.engine.thinking import ThinkingSplitter


class Deltas(Silent):
    def __init__(self):
        self.said = []

    def delta(self, text):
        self.said.append(text)


@pytest.fixture
def write(model):
    """A function: an answer that took the tokens of a text, and the deltas that it reported."""

    def of(text, stage, ended=True, **options):
        report = Deltas()
        sampling = Sampling(500, **options)
        numbers = NumberTokens(model.tokenizer)
        eos = model.eos_token_ids
        thinking = ThinkingSplitter(stage, TAGS[0])
        answer = Answer(sampling, model.tokenizer.detokenizer, numbers, eos, thinking, 0, report)
        for token in model.tokenizer.encode(text, add_special_tokens=False):
            if answer.finish_reason is None:
                answer.take(token)
        if ended and answer.finish_reason is None:
            answer.take(min(model.eos_token_ids))
        return answer, report.said

    return of


def test_thinking_is_kept_apart_and_not_reported(write):
    answer, said = write("<think>\nThe year is 1871.\n</think>\n\nIn 1871.", "before")
    assert (answer.thinking, answer.text) == ("The year is 1871.", "In 1871.")
    assert "".join(said) == "In 1871."
    assert len(said) > 1


def test_an_answer_that_never_stops_thinking_has_no_text(write):
    answer, said = write("The year may be 1871, or", "thinking", ended=False)
    assert (answer.text, said, answer.finish_reason) == ("", [], None)
    answer, said = write("The year may be 1871, or", "thinking")
    assert (answer.thinking, answer.text, said) == ("The year may be 1871, or", "", [])


def test_tags_that_an_answer_quotes_are_text(write):
    text = "The page shows <think> and </think> as they are."
    for stage in ("before", "answer"):
        answer, said = write(text, stage)
        assert (answer.thinking, answer.text, "".join(said)) == (None, text, text)


def test_a_stop_string_in_thinking_does_not_end_the_answer(write):
    answer, said = write("<think>END</think>yes END no", "before", stop=("END",))
    assert (answer.thinking, answer.text, answer.finish_reason) == ("END", "yes", "stop")
    assert "".join(said) == "yes "


def test_characters_of_several_tokens_are_said_whole(write):
    text = "naïve 🦉🦉 über 漢字"
    answer, said = write(text, "answer")
    assert "".join(said) == answer.text == text
    assert all("\ufffd" not in piece for piece in said)


def test_what_is_held_back_is_said_at_the_end(write):
    answer, said = write("it is the EN", "answer", stop=("END",))
    assert answer.text == "".join(said) == "it is the EN"


def test_the_end_token_is_no_output(write, model):
    answer, _ = write("yes", "answer")
    assert answer.finish_reason == "stop"
    assert not set(answer.tokens) & model.eos_token_ids
