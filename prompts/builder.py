"""From documents and an instruction to token ids, the document first so that questions share its KV.

Every piece is tokenised apart: what the chat template puts before the user's message, each document with its
heading, the instruction, and what the template puts after the message. So a prompt's length is the sum of its
pieces' lengths, and a document's tokens don't depend on what is asked about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prompts.frame import find_frame
from prompts.template import read_template
from prompts.thinking import TAGS, Stage, tags_of
from prompts.tokens import Tokens


@dataclass(frozen=True)
class Document:
    name: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """Many prompts over long documents share one head in memory."""

    head: np.ndarray
    """(document_end,) uint32: the leading tokens, which do not depend on the instruction."""
    tail: np.ndarray
    stage: Stage
    """Where the answer's text begins: in or before thinking, or in the answer of a model that knows none."""

    @property
    def document_end(self) -> int:
        return len(self.head)

    @property
    def tokens(self) -> np.ndarray:
        """(n,) uint32."""
        return np.concatenate([self.head, self.tail])


@dataclass(frozen=True)
class _Frame:
    """What the template puts around the user's message, as tokens."""

    before: list[int]
    after: list[int]
    stage: Stage


class PromptBuilder:
    """Knows a model's template and tokenizer. Keeps the last documents' tokens, for the next question."""

    def __init__(self, folder: Path) -> None:
        """
        Args:
            folder: a model folder; its weights are not read.

        Raises:
            PromptError: no prompt can be made for this model, and why.
        """
        self._tokens = Tokens(folder)
        template = read_template(folder)
        tags = tags_of(template.source)
        if tags is None:
            tags = next((each for each in TAGS if self._tokens.knows(each.open)), None)
        self.tags = tags
        """The tags between which the model thinks; None for a model that knows none."""
        found = {thinking: find_frame(template, thinking, tags) for thinking in (False, True)}
        self.can_think: bool | None = True
        """Whether a model that is asked to think does; None where its template doesn't tell."""
        if found[False] == found[True] and found[True].stage != "thinking":
            self.can_think = None if tags else False
        self._frames = {
            thinking: _Frame(
                self._with_leading(self._tokens.template(frame.before)),
                self._tokens.template_on(frame.after),
                frame.stage,
            )
            for thinking, frame in found.items()
        }
        self._last: tuple[tuple[Document, ...], bool, np.ndarray] | None = None

    def build(self, documents: Sequence[Document], instruction: str, thinking: bool = False) -> Prompt:
        """
        Args:
            thinking: whether the template is told to let the model think first.
        """
        frame = self._frames[thinking]
        tail = np.concatenate([self._tokens.text(_asked(instruction)), np.array(frame.after, np.uint32)])
        return Prompt(self._head(tuple(documents), thinking), tail, frame.stage)

    def count(self, text: str) -> int:
        """How many tokens a document's text has."""
        return len(self._tokens.text(text))

    def count_head(self, documents: Sequence[tuple[str, int]], thinking: bool = False) -> int:
        """How many tokens the head of a prompt has.

        Args:
            documents: each one's name, and what `count` says of its text.
        """
        headings = _headings([name for name, _ in documents])
        return len(self._frames[thinking].before) + sum(
            self.count(heading) + num_tokens
            for heading, (_, num_tokens) in zip(headings, documents, strict=True)
        )

    def count_tail(self, instruction: str, thinking: bool = False) -> int:
        """How many tokens the tail of a prompt has."""
        return self.count(_asked(instruction)) + len(self._frames[thinking].after)

    def _head(self, documents: tuple[Document, ...], thinking: bool) -> np.ndarray:
        if self._last is None or self._last[:2] != (documents, thinking):
            pieces = [np.array(self._frames[thinking].before, np.uint32)]
            for heading, document in zip(_headings([d.name for d in documents]), documents, strict=True):
                pieces += [self._tokens.text(heading), self._tokens.text(document.text)]
            self._last = documents, thinking, np.concatenate(pieces)
        return self._last[2]

    def _with_leading(self, ids: list[int]) -> list[int]:
        """With exactly one BOS if the tokenizer begins texts with one; many templates write it themselves."""
        leading = self._tokens.leading()
        return ids if ids[: len(leading)] == leading else [*leading, *ids]


def _headings(names: Sequence[str]) -> list[str]:
    """What comes before each document's text; nothing before a single one."""
    if len(names) < 2:
        return [""] * len(names)
    first, *others = (f"Document {number}: {name}\n\n" for number, name in enumerate(names, 1))
    return [first, *(f"\n\n{other}" for other in others)]


def _asked(instruction: str) -> str:
    return "\n\n" + instruction
