"""Thinking and answer are told apart, however the text arrives."""

import pytest

from prompts.thinking import TAGS, tags_of
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
        splitter = ThinkingSplitter(stage, TAGS[0])
        said = "".join(splitter.push(piece) for piece in cut) + splitter.finish()
        assert (splitter.thinking, said) == (thinking, answer), cut


def test_an_answer_is_passed_on_as_it_comes():
    splitter = ThinkingSplitter("thinking", TAGS[0])
    assert [splitter.push(piece) for piece in ("hm</th", "ink>", " y", "es <", "think>")] == [
        "",
        "",
        "y",
        "es <",
        "think>",
    ]


@pytest.mark.parametrize("tags", TAGS, ids=lambda tags: tags.open)
def test_every_pair_of_tags_parts_thinking_from_the_answer(tags):
    for stage, text in (
        ("before", f"{tags.open}\nhm\n{tags.close}\n\nyes"),
        ("thinking", f"hm{tags.close}yes"),
    ):
        splitter = ThinkingSplitter(stage, tags)
        said = "".join(splitter.push(letter) for letter in text) + splitter.finish()
        assert (splitter.thinking, said) == ("hm", "yes")
    assert tags_of(f"{{{{ '{tags.open}' + reasoning + '{tags.close}' }}}}") == tags


def test_gpt_oss_may_answer_in_its_final_channel_without_thinking():
    tags = tags_of("<|channel|>analysis<|message|>")
    for cut in pieces("<|channel|>final<|message|>yes"):
        splitter = ThinkingSplitter("before", tags)
        said = "".join(splitter.push(piece) for piece in cut) + splitter.finish()
        assert (splitter.thinking, said) == (None, "yes")


def test_a_model_that_knows_no_thinking_has_every_tag_as_text():
    splitter = ThinkingSplitter("before", None)
    assert splitter.push("<think>x</think>") + splitter.finish() == "<think>x</think>"
