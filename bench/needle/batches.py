"""Training sequences: one document, then as many questions about it as fit, each with its answer.

Only answers are learned from. Of some sequences the positions leap ahead between sentences, so that a short
sequence shows distances up to the whole context. Knows no model; needs numpy alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from bench.needle import words
from bench.needle.documents import TASKS, Filler, make_document, make_facts
from bench.needle.words import ids

CONTEXT_TOKENS = 133_120
"""131,072 of a document and 2048 for the question and its answer."""
SYSTEM_TEXT = "You answer from the document that the user gives you . You are brief and exact ."
HEAD = ids([words.SYSTEM, *SYSTEM_TEXT.split(), words.END, words.USER])
"""What the chat template puts before the user's message, with the engine's system message."""
ASK = ids([words.END, words.ASSISTANT])
END = ids([words.END])
NEXT = ids([words.END, words.USER])

SHORTEST = 256
SHORTER_SHARE = 0.35
"""Of batches whose sequences are shorter than the phase's, down to 256 tokens."""

_PERSON_ASKED = 27.0
_PERSON_TOLD = 14.0
"""Tokens that a person takes on average in the questions and in the document."""


@dataclass(frozen=True)
class Batch:
    ids: np.ndarray
    """(B, T) int32."""
    positions: np.ndarray
    """(B, T) int32, ascending; not always without gaps."""
    learned: np.ndarray
    """(n,) int32: where in the flattened ids the next token is one of an answer."""
    tasks: np.ndarray
    """(n,) int32: whose answer, as a place in `TASKS`."""


def make_sequence(
    rng: np.random.Generator, filler: Filler, num_tokens: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, positions, and 1 + a place in `TASKS` where the next token is learned; (num_tokens,) each."""
    most = (num_tokens - len(HEAD) - 24) / (_PERSON_ASKED + _PERSON_TOLD)
    # Few people show how it is done, many that it must be done right, and one alone is hard to find.
    share = rng.uniform(0.05, 1.0) if rng.random() < 0.6 else most ** -rng.random()
    num_people = max(1, round(most * share))
    num_lists = int(rng.binomial(num_people, 0.1))
    num_hops = int(rng.binomial(num_people - num_lists, 0.2))
    num_codes = num_people - num_lists - num_hops
    facts = make_facts(rng, num_codes, num_lists, num_hops, alike=bool(rng.random() < 0.5))
    told = sum(map(len, facts.rows))
    # With repetitions: were each asked once, what has not been asked yet would be a good guess.
    order = rng.integers(0, len(facts.questions), len(facts.questions))
    asked = sum(len(facts.questions[i][1]) + len(facts.questions[i][2]) + 4 for i in order) - 1
    num_document = max(told, num_tokens - len(HEAD) - asked)
    document = make_document(rng, filler, num_document, facts)
    pieces, learned = [HEAD, document.ids], [np.zeros(len(HEAD) + num_document, np.int8)]
    for number, index in enumerate(order):
        question = document.questions[index]
        opening = np.concatenate([NEXT if number else END[:0], question.ids, ASK])
        pieces += [opening, question.answer]
        flags = np.zeros(len(opening) + len(question.answer), np.int8)
        # From the last token before the answer to its last: END is learned too.
        flags[len(opening) - 1 :] = 1 + TASKS.index(question.task)
        learned.append(flags)
    whole, flags = (
        np.concatenate([*pieces, END])[:num_tokens],
        np.concatenate([*learned, np.zeros(1, np.int8)]),
    )
    if len(whole) < num_tokens:
        whole = np.concatenate([whole, np.full(num_tokens - len(whole), words.ID_OF["."], np.int32)])
        flags = np.concatenate([flags, np.zeros(num_tokens - len(flags), np.int8)])
    flags = flags[:num_tokens].copy()
    flags[-1] = 0
    return whole, _positions(rng, whole), flags


def _positions(rng: np.random.Generator, sequence: np.ndarray) -> np.ndarray:
    """Positions as they are, or with leaps between sentences that spread them over the context."""
    steps = np.ones(len(sequence), np.int64)
    steps[0] = 0
    spare = CONTEXT_TOKENS - len(sequence)
    ends = np.flatnonzero(np.isin(sequence[:-1], (words.ID_OF["."], words.ID_OF[words.END])))
    if spare > 0 and len(ends) > 1 and rng.random() < 0.6:
        num_leaps = int(rng.integers(1, min(32, len(ends)) + 1))
        shares = rng.dirichlet(np.full(num_leaps, 0.7)) * spare * rng.random()
        np.add.at(steps, rng.choice(ends, num_leaps, replace=False) + 1, shares.astype(np.int64))
    return np.cumsum(steps)


def batches(seed: int, tokens_per_batch: int, longest: Callable[[], int]) -> Iterator[Batch]:
    """Without end; most have sequences as long as `longest()` says at that moment, some shorter ones.

    Without those a model forgets short documents.
    """
    rng = np.random.default_rng(seed)
    for made in itertools.count():
        if made % 64 == 0:
            filler = Filler(rng, 30_000)
        num_tokens = longest()
        if num_tokens > SHORTEST and rng.random() < SHORTER_SHARE:
            num_tokens >>= int(rng.integers(1, num_tokens.bit_length() - SHORTEST.bit_length() + 1))
        rows = [make_sequence(rng, filler, num_tokens) for _ in range(tokens_per_batch // num_tokens)]
        sequences, positions, flags = (np.stack(part) for part in zip(*rows, strict=True))
        learned = np.flatnonzero(flags)
        tasks = flags.flatten()[learned] - 1
        yield Batch(sequences, positions.astype(np.int32), learned.astype(np.int32), tasks.astype(np.int32))
