"""Loops are noticed whatever their length, counters or not; text that repeats itself for a reason is left."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from prompts.thinking import TAGS
from worker.engine.answer import Answer
from worker.engine.model import Model
from worker.engine.repetition import BEYOND, EVERY, WINDOW, NumberTokens, RepetitionWatch
from worker.engine.report import Silent
from worker.engine.sampling import Sampling
from worker.engine.thinking import ThinkingSplitter

SENTENCE = (
    "The clerk shall read the register aloud, the witness shall confirm each line, the chair shall sign the "
    "page, the seal shall be set in red wax, and the copy shall be sent to the archive by the evening post."
)
WORDS = SENTENCE.replace(",", "").replace(".", "").lower().split()


@pytest.fixture(scope="module")
def tokenizer(model: Model) -> Any:
    return model.tokenizer


@pytest.fixture(scope="module")
def numbers(tokenizer: Any) -> NumberTokens:
    return NumberTokens(tokenizer)


def looped(numbers: NumberTokens, tokens: Iterable[int]) -> int | None:
    """After how many tokens a loop was seen."""
    watch = RepetitionWatch(numbers)
    return next((i for i, token in enumerate(tokens, 1) if watch.push(token)), None)


def encoded(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


@pytest.mark.parametrize("period", [1, 7, 32, 33, 56, 100, 300, 700, 1500])
def test_a_text_of_any_period_is_a_loop_soon_after_its_second_time(
    numbers: NumberTokens, period: int
) -> None:
    lead, body = range(10_000, 10_050), range(20_000, 20_000 + period)
    seen = looped(numbers, [*lead, *itertools.islice(itertools.cycle(body), WINDOW)])
    assert seen is not None
    assert seen - len(lead) <= 2 * period + BEYOND + EVERY


@pytest.mark.parametrize("num_sentences", [1, 4, 20])
def test_a_counter_hides_no_loop(tokenizer: Any, numbers: NumberTokens, num_sentences: int) -> None:
    """From 95, so that the counter grows by a token while it counts."""
    rng = random.Random(7)
    said = " ".join(" ".join(rng.sample(WORDS, 12)) + "." for _ in range(num_sentences))
    rounds = [encoded(tokenizer, f"{n}. {said}\n") for n in range(95, 300)]
    seen = looped(numbers, itertools.chain(*rounds))
    assert seen is not None
    assert seen <= max(3 * len(rounds[9]), 2 * len(rounds[9]) + 256) + 2 * EVERY


def test_rows_of_json_that_only_count_are_a_loop(tokenizer: Any, numbers: NumberTokens) -> None:
    rows = [{"id": n, "name": "clerk", "does": SENTENCE, "page": 12} for n in range(1, 40)]
    assert looped(numbers, encoded(tokenizer, json.dumps(rows))) is not None


def test_a_number_without_end_is_a_loop(tokenizer: Any, numbers: NumberTokens) -> None:
    assert looped(numbers, encoded(tokenizer, "A third is 0." + "3" * 1000)) is not None


def test_counting_without_end_is_a_loop(tokenizer: Any, numbers: NumberTokens) -> None:
    assert looped(numbers, encoded(tokenizer, ", ".join(map(str, range(1, 1000))))) is not None


REFRAIN = "Row, row, row your boat gently down the stream, merrily, merrily, life is but a dream.\n"
MEANT = {
    "counting to a hundred": ", ".join(map(str, range(1, 101))),
    "a matrix of zeros": "\n".join([" ".join("0" * 12)] * 12),
    "a table's rule": "| " + " | ".join(WORDS[:24]) + " |\n" + "|---" * 24 + "|\n",
    "a refrain": "".join(
        " ".join(random.Random(verse).sample(WORDS, 20)) + "\n" + REFRAIN for verse in range(30)
    ),
    "a paragraph said twice": 2 * (" ".join(random.Random(1).choices(WORDS, k=300)) + "\n"),
    "a table of measurements": "\n".join(
        f"| {2000 + n} | {n * n} | {37 * n % 101} | metres above the sea |" for n in range(60)
    ),
    "rows in steps": json.dumps([{"at": n * 15, "text": "quarter", "x": 40 + 34 * n} for n in range(60)]),
    "a finding for each chapter": json.dumps([{"chapter": n, "found": False} for n in range(1, 21)]),
    "a list with the same beginning": "\n".join(
        f"{n}. The clerk shall read page {n * 7 % 31} to the {word}." for n, word in enumerate(WORDS, 1)
    ),
    "places of pi": "3." + str(random.Random(3).randrange(10**600)),
}


@pytest.mark.parametrize("name", MEANT)
def test_text_that_repeats_itself_for_a_reason_is_none(
    tokenizer: Any, numbers: NumberTokens, name: str
) -> None:
    assert looped(numbers, encoded(tokenizer, MEANT[name])) is None


def test_this_project_holds_no_loop(tokenizer: Any, numbers: NumberTokens) -> None:
    root = Path(__file__).parents[3]
    for path in (root / "README.md", root / "docs/api.md", root / "bench/results/needle.cpu.json"):
        assert looped(numbers, encoded(tokenizer, path.read_text()[:60_000])) is None, path


@pytest.mark.parametrize("stage", ["answer", "thinking"])
def test_a_loop_ends_an_answer_and_its_thinking(tokenizer: Any, numbers: NumberTokens, stage: Any) -> None:
    thinking = ThinkingSplitter(stage, TAGS[0])
    answer = Answer(Sampling(2000), tokenizer.detokenizer, numbers, frozenset(), thinking, 0, Silent())
    tokens = itertools.cycle(encoded(tokenizer, SENTENCE + "\n"))
    while answer.finish_reason is None:
        answer.take(next(tokens))
    assert answer.finish_reason == "repetition"
    assert len(answer.tokens) < 300
