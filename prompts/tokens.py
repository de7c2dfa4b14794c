"""A model's tokenizer, read twice: as its template needs it, and with control tokens as plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from prompts.errors import PromptError

PIECE_CHARS = 2_000_000
"""Longer texts are tokenised in pieces that end with a line, which bounds the memory."""

_BEGINNING = "\n"
_MOST_CUTS = 8
"""A vocabulary in which pieces of a control token still are one after so many cuts loses that text."""


class Tokens:
    """Added tokens, special or not (`<|im_end|>`, `</think>`, `<tool_call>`), are control tokens.

    They come out of a template's text and out of no other. Added tokens of white space or of one character
    are text.
    """

    def __init__(self, folder: Path) -> None:
        """Raises PromptError `model_unreadable`."""
        path = folder / "tokenizer.json"
        try:
            stored = path.read_text(encoding="utf-8")
            spec = json.loads(stored)
            self._control = Tokenizer.from_str(stored)
            unknown = _unknown(spec["model"])
            control = []
            for token in spec.get("added_tokens", []):
                token["special"] = not _is_text(token["content"])
                # What stands for unknown characters comes out of plain text.
                if token["special"] and token["content"] != unknown:
                    control.append(token["id"])
            self._text = Tokenizer.from_str(json.dumps(spec))
        except FileNotFoundError as error:
            raise PromptError(
                "model_unreadable", f"{folder} has no tokenizer.json, which Longleaf needs"
            ) from error
        except Exception as error:  # tokenizers raises Exception itself
            raise PromptError("model_unreadable", f"{path} is no tokenizer: {error}") from error
        self._text.encode_special_tokens = True
        for tokenizer in (self._control, self._text):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._is_control = np.zeros(max([self._control.get_vocab_size(), *control]) + 1, np.bool_)
        self._is_control[control] = True

    def knows(self, token: str) -> bool:
        """Whether the vocabulary has a token of just this text."""
        return self._control.token_to_id(token) is not None

    def leading(self) -> list[int]:
        """What the tokenizer itself puts before a text: mostly one BOS, or nothing."""
        alone, whole = (self._control.encode("a", add_special_tokens=each).ids for each in (False, True))
        return whole[: whole.index(alone[0])] if alone and alone[0] in whole else []

    def template(self, text: str) -> list[int]:
        """Tokens of what a template has written, control tokens included."""
        return self._control.encode(text, add_special_tokens=False).ids

    def template_on(self, text: str) -> list[int]:
        """The same in the middle of a prompt."""
        return _continued(self.template, text)

    def text(self, text: str) -> np.ndarray:
        """Tokens of text in the middle of a prompt, none of which is a control token: (n,) uint32."""
        pieces = [np.array(_continued(self._without_control, piece), np.uint32) for piece in _pieces(text)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint32)

    def _without_control(self, text: str, num_cut: int = 0) -> list[int]:
        ids: list[int] = self._text.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not self._is_control[ids].any():
            return ids
        # The model's own vocabulary can spell a control token: cut within each, so that no part of it is one.
        encoded = self._text.encode(text, add_special_tokens=False)
        found = zip(encoded.ids, encoded.offsets, strict=True)
        spans = [span for number, span in found if self._is_control[number]]
        cuts = [0, *sorted({start + 1 for start, end in spans if end - start > 1}), len(text)]
        if len(cuts) == 2 or num_cut == _MOST_CUTS:
            return [number for number in ids if not self._is_control[number]]
        pieces = (self._without_control(text[start:end], num_cut + 1) for start, end in pairwise(cuts))
        return [number for piece in pieces for number in piece]


def _unknown(model: dict[str, Any]) -> str | None:
    """The token for unknown characters: named, or in a Unigram model numbered."""
    number = model.get("unk_id")
    return model.get("unk_token") if number is None else model["vocab"][number][0]


def _is_text(content: str) -> bool:
    return len(content) == 1 or content.replace("▁", " ").isspace()


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = start + PIECE_CHARS
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def _continued(encode: Callable[[str], list[int]], text: str) -> list[int]:
    """Without the space that a SentencePiece tokenizer puts at the beginning of whatever it is given."""
    beginning, ids = encode(_BEGINNING), encode(_BEGINNING + text)
    return ids[len(beginning) :] if ids[: len(beginning)] == beginning else encode(text)
