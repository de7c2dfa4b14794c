"""From documents and an instruction to token ids, the document first so that questions share its KV.

The prompt is three pieces that are tokenised apart: what the chat template puts before the user's
message, the user's message, and what the template puts after it. Only the template's pieces may
contain control tokens: `<|im_end|>` inside a document is text.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from worker.engine.errors import EngineError
from worker.engine.thinking import OPEN, Stage

SYSTEM = "You answer from the document that the user gives you. You are brief and exact."
_MARK = "\x1fUSER MESSAGE\x1f"
# Templates that print today's date would make every day's prompt differ before the document.
_FIXED_DAY = datetime.date(2024, 7, 26)


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
    """What the template puts around the user's message."""

    before: list[int]
    after: list[int]
    stage: Stage


class PromptBuilder:
    """Knows a model's template and tokenizer. Keeps the last document's tokens, for the next question."""

    def __init__(self, folder: Path, chat_tokenizer: Any) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise EngineError("model_unreadable", f"{folder} has no tokenizer.json, which Longleaf needs.")
        self._control = Tokenizer.from_file(str(path))
        self._text = Tokenizer.from_file(str(path))
        self._text.encode_special_tokens = True
        for tokenizer in (self._control, self._text):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self._frames = {thinking: self._frame(chat_tokenizer, thinking) for thinking in (False, True)}
        self._last: tuple[tuple[Document, ...], bool, np.ndarray] | None = None

    def build(self, documents: Sequence[Document], instruction: str, thinking: bool = False) -> Prompt:
        """
        Args:
            thinking: whether the template is told to let the model think first.
        """
        frame = self._frames[thinking]
        tail = self._text.encode("\n\n" + instruction, add_special_tokens=False).ids + frame.after
        return Prompt(self._head(tuple(documents), thinking), np.array(tail, np.uint32), frame.stage)

    def _head(self, documents: tuple[Document, ...], thinking: bool) -> np.ndarray:
        if self._last is None or self._last[:2] != (documents, thinking):
            if len(documents) == 1:
                text = documents[0].text
            else:
                parts = (f"Document {i}: {d.name}\n\n{d.text}" for i, d in enumerate(documents, 1))
                text = "\n\n".join(parts)
            ids = self._text.encode(text, add_special_tokens=False).ids
            self._last = documents, thinking, np.array(self._frames[thinking].before + ids, np.uint32)
        return self._last[2]

    def _frame(self, chat_tokenizer: Any, thinking: bool) -> _Frame:
        """Token ids before and after the user's message; exactly one BOS if the model has one."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _MARK}]
        text = _render(chat_tokenizer, messages, thinking)
        if text is None or text.count(_MARK) != 1:
            # Some templates refuse a system message: its words open the user's message there.
            message = {"role": "user", "content": f"{SYSTEM}\n\n{_MARK}"}
            text = _render(chat_tokenizer, [message], thinking)
        if text is None or text.count(_MARK) != 1:
            raise EngineError(
                "no_chat_template", "The model's chat template does not show the user's message exactly once."
            )
        before, after = text.split(_MARK)
        ids = self._control.encode(before, add_special_tokens=False).ids
        bos = chat_tokenizer.bos_token_id
        if bos is not None and self._control.encode("a").ids[:1] == [bos] and ids[:1] != [bos]:
            ids = [bos, *ids]
        stage: Stage = "answer"
        if after.rstrip().endswith(OPEN):
            stage = "thinking"
        elif OPEN in after or self._control.token_to_id(OPEN) is not None:
            stage = "before"
        return _Frame(ids, self._control.encode(after, add_special_tokens=False).ids, stage)


def _render(tokenizer: Any, messages: list[dict[str, str]], thinking: bool) -> str | None:
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=thinking,
            date_string=f"{_FIXED_DAY:%d %b %Y}",
            strftime_now=_FIXED_DAY.strftime,
        )
    except (TemplateError, ValueError):
        return None
    return str(rendered)
