"""Synthetic documents with facts in filler, the questions that they answer, and the score of an answer.

    single_key   They gave Mara Ashford kabel nulon fimir dulon.   (the only fact)
                 What did they give Mara Ashford?        Mara Ashford kabel nulon fimir dulon
    multi_key    the same for many people
    multi_value  In the first year they gave Mara Ashford w w w w.   In the second year they gave ...
                 What all did they give Mara Ashford?    first year Mara Ashford w w w w, second year ...
    two_hop      They sent Mara Ashford Tala Dunwell.   They gave Tala Dunwell w w w w.
                 What did they give whom they sent Mara Ashford?   Mara Ashford Tala Dunwell w w w w
    count        as multi_value
                 In how many years did they give Mara Ashford?     Mara Ashford three

Everything is word ids (`words.py`), for training needs millions a second; `words.text` makes text of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from bench.needle import words
from bench.needle.words import ids

Task = Literal["single_key", "multi_key", "multi_value", "two_hop", "count"]
TASKS: tuple[Task, ...] = get_args(Task)
CODE_LENGTH = 4
"""Words in a code, of 1024 each: a guess is right once in 10^12."""
MOST_CODES = len(words.ORDINALS)

_GIVEN, _SURNAME, _CODE, _PLACE = (
    ids(x) for x in (words.GIVEN_NAMES, words.SURNAMES, words.CODE_WORDS, words.PLACES)
)
_SLOTS = {
    "P": _PLACE,
    "N": ids(words.NOUNS),
    "J": ids(words.ADJECTIVES),
    "V": ids(words.PAST_VERBS),
    "R": ids(words.ADVERBS),
    "I": ids(words.PREPOSITIONS),
}
_SENTENCES = (
    "The J N V the N I the J N .",
    "In P the J N V a N , and the N V it R .",
    "A N from P V the J N .",
    "No N V R until the J N had V the N .",
    "Nobody at P V the N until the N was J .",
    "The N was J and the N was J , but the J N V them R .",
    "Near the N of P a J N V the N .",
    "Every N V a J N , because the N of P was J .",
    "It was J and J I the J N .",
    "They V the N R , while the J N of P V some J N with a N .",
    "Some N V no N without the J N .",
    "Before the N V , everyone V the J N I P .",
    "At P everyone said that the N V R and V the J J N .",
    "The N V .",
)
"""Filler: a capital letter is a slot, other words stand for themselves."""
_STOP = words.ID_OF["."]


class Filler:
    """A long run of random sentences, of which documents take pieces."""

    def __init__(self, rng: np.random.Generator, num_sentences: int) -> None:
        rows: list[np.ndarray] = []
        share = rng.multinomial(num_sentences, [1 / len(_SENTENCES)] * len(_SENTENCES))
        for sentence, n in zip(_SENTENCES, share, strict=True):
            columns = [
                rng.choice(_SLOTS[w], n) if w in _SLOTS else np.full(n, words.ID_OF[w], np.int32)
                for w in sentence.split()
            ]
            rows += list(np.stack(columns, axis=1))
        self._ids = np.concatenate([rows[i] for i in rng.permutation(len(rows))])
        self._starts = np.flatnonzero(self._ids == _STOP)[:-1] + 1

    def take(self, rng: np.random.Generator, num_tokens: int) -> np.ndarray:
        """Exactly `num_tokens` ids, from the start of a sentence to a full stop."""
        start = int(rng.choice(self._starts))
        piece = np.take(self._ids, np.arange(start, start + num_tokens), mode="wrap")
        if num_tokens:
            piece[-1] = _STOP
        if num_tokens > 1 and piece[-2] == _STOP:
            piece[-2] = words.ID_OF["here"]
        return piece


@dataclass(frozen=True)
class Question:
    task: Task
    ids: np.ndarray
    answer: np.ndarray
    depth: float
    """Where its facts stand in the document on average, 0 at the start and 1 at the end."""


@dataclass(frozen=True)
class Document:
    ids: np.ndarray
    questions: list[Question]
    fact_starts: np.ndarray
    """Of each fact's first token, ascending."""


@dataclass(frozen=True)
class Facts:
    """Facts as rows of ids, and questions with the rows that answer them."""

    rows: list[np.ndarray]
    questions: list[tuple[Task, np.ndarray, np.ndarray, list[int]]]


def make_facts(
    rng: np.random.Generator, num_codes: int, num_lists: int = 0, num_hops: int = 0, alike: bool = False
) -> Facts:
    """Facts about different people, and one question about each (two about who has several codes).

    Args:
        num_codes: people with one code.
        num_lists: people with two to five codes.
        num_hops: people to whom another was sent, who has a code; those are further people with one code.
        alike: draw the names from so few that each shares its given name and its surname with many others.
    """
    num_people = num_codes + num_lists + 2 * num_hops
    people = _names(rng, num_people, alike)
    with_code, listed, kept = np.split(people, [num_codes + num_hops, num_people - num_hops])
    codes = rng.choice(_CODE, (len(with_code), CODE_LENGTH))
    rows = list(_filled("They gave * * * * * * .", np.hstack([with_code, codes])))
    task: Task = "single_key" if num_people == 1 else "multi_key"
    asked = _filled("What did they give * * ?", with_code)
    told = np.hstack([with_code, codes])
    questions = [(task, asked[i], told[i], [i]) for i in range(len(with_code))]

    for person in listed:
        count = int(rng.integers(2, MOST_CODES + 1))
        own = rng.choice(_CODE, (count, CODE_LENGTH))
        where = list(range(len(rows), len(rows) + count))
        for ordinal, code in zip(words.ORDINALS, own, strict=False):
            rows.append(_one(f"In the {ordinal} year they gave * * * * * * .", *person, *code))
        each = [
            _one(f", {o} year * * * * * *", *person, *code)
            for o, code in zip(words.ORDINALS, own, strict=False)
        ]
        every = np.concatenate(each)[1:]
        questions.append(("multi_value", _one("What all did they give * * ?", *person), every, where))
        number = np.concatenate([person, ids(words.COUNTS[count])])
        questions.append(("count", _one("In how many years did they give * * ?", *person), number, where))

    for i, person in enumerate(kept):
        keeper = with_code[num_codes + i]
        rows.append(_one("They sent * * * * .", *person, *keeper))
        question = _one("What did they give whom they sent * * ?", *person)
        answer = np.concatenate([person, keeper, codes[num_codes + i]])
        questions.append(("two_hop", question, answer, [num_codes + i, len(rows) - 1]))
    return Facts(rows, questions)


def make_document(
    rng: np.random.Generator,
    filler: Filler,
    num_tokens: int,
    facts: Facts,
    depths: np.ndarray | None = None,
) -> Document:
    """A document of exactly `num_tokens` tokens with every fact in it, between sentences.

    Args:
        depths: where each fact goes, 0 at the start and 1 at the end; drawn at random if None.

    Raises:
        ValueError: if the facts alone are longer.
    """
    lengths = np.array([len(row) for row in facts.rows], np.int64)
    num_filler = num_tokens - int(lengths.sum())
    if num_filler < 0:
        raise ValueError(f"{len(lengths)} facts take {lengths.sum()} tokens, the document has {num_tokens}")
    text = filler.take(rng, num_filler)
    places = np.concatenate([[0], np.flatnonzero(text == _STOP) + 1])
    wanted = rng.random(len(lengths)) if depths is None else np.asarray(depths)
    order = np.argsort(wanted, kind="stable")
    at = places[np.searchsorted(places, num_filler * wanted[order]).clip(0, len(places) - 1)]
    lengths = lengths[order]
    inserted = np.concatenate([facts.rows[i] for i in order]) if len(order) else text[:0]
    whole = np.insert(text, np.repeat(at, lengths), inserted)
    starts = at + np.cumsum(lengths) - lengths
    start_of = np.empty(len(order), np.int64)
    start_of[order] = starts
    questions = [
        Question(task, question, answer, float(start_of[rows].mean()) / max(1, num_tokens))
        for task, question, answer, rows in facts.questions
    ]
    return Document(whole, questions, starts)


_VALUES = frozenset([*words.CODE_WORDS, *words.COUNTS])


def values(answer: str) -> list[str]:
    """The code words and numbers in a text, in its order."""
    return [word for word in re.findall(r"\w+", answer) if word in _VALUES]


def is_right(question: Question, answer: str) -> bool:
    """Whether an answer states exactly the values that were asked for; what else it says does not count."""
    return values(answer) == values(words.text(question.answer))


def _names(rng: np.random.Generator, n: int, alike: bool) -> np.ndarray:
    """(n, 2) ids of different given names with surnames."""
    num_each = int(np.ceil(np.sqrt(1.5 * n))) if alike else len(_GIVEN)
    given, surname = (rng.choice(x, num_each, replace=False) for x in (_GIVEN, _SURNAME))
    pairs = rng.choice(num_each * num_each, n, replace=False)
    return np.stack([given[pairs // num_each], surname[pairs % num_each]], axis=1)


def _filled(pattern: str, values: np.ndarray) -> np.ndarray:
    """Rows of `pattern` with each `*` replaced by the next column of (n, columns) values."""
    tokens = pattern.split()
    holes = [i for i, w in enumerate(tokens) if w == "*"]
    rows = np.tile(ids(tokens), (len(values), 1))
    rows[:, holes] = values
    return rows


def _one(pattern: str, *values: int) -> np.ndarray:
    return _filled(pattern, np.array([values]))[0]
