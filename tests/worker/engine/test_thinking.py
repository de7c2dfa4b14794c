"""Thinking and answer are told apart, however the text arrives."""

import pytest

from tests.worker.engine.test_stops import pieces
from worker.engine.thinking import ThinkingSplitter

CASES = [
    ("before", "<think>hm</think>yes", "hm", "yes"),
    ("before", "\n<think>\nhm\n</think>\n\nyes", "hm", "yes"),
    ("before", "yes <think> is a tag", None, "yes <think> is a tag"),
    ("before", "<thing>", None, "<thing>"),
    ("before", "<thin", None, "<thin"),
    ("before", "</think>\nyes", None, "yes"),
    ("before", "yes", None, "yes"),
    ("thinking", "hm</think>yes", "hm", "yes"),
    ("thinking", "<think>hm</think>yes", "hm", "yes"),
    ("thinking", "hm</think></think>yes", "hm", "yes"),
    ("thinking", "a</b></think>y</think>", "a</b>", "y</think>"),
    ("thinking", "no end <", "no end <", ""),
    ("thinking", "\n</think>y", None, "y"),
    ("before", "<think></think><think>a</think>y", "a", "y"),
    ("answer", "</think><think>x", None, "</think><think>x"),
]


@pytest.mark.parametrize(("stage", "text", "thinking", "answer"), CASES)
def test_thinking_and_answer_are_parted_however_the_text_is_cut(stage, text, thinking, answer):
    for cut in pieces(text):
        splitter = ThinkingSplitter(stage)
        said = "".join(splitter.push(piece) for piece in cut) + splitter.finish()
        assert (splitter.thinking, said) == (thinking, answer), cut


def test_an_answer_is_passed_on_as_it_comes():
    splitter = ThinkingSplitter("thinking")
    assert [splitter.push(piece) for piece in ("hm</th", "ink>", " y", "es <", "think>")] == [
        "",
        "",
        "y",
        "es <",
        "think>",
    ]
