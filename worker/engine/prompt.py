"""From documents and an instruction to token ids, the document first so that questions share its KV.

The prompt is three pieces that are tokenised apart: what the chat template puts before the user's
message, the user's message, and what the template puts after it. Only the template's pieces may
contain control tokens: `<|im_end|>` inside a document is text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from worker.engine.errors import EngineError

SYSTEM = "You answer from the document that the user gives you. You are brief and exact."
_MARK = "\x1fUSER MESSAGE\x1f"
# Templates that print today's date would make every day's prompt differ before the document.
_FIXED_DATE = "26 Jul 2024"


@dataclass(frozen=True)
class Document:
    name: str
    text: str


@dataclass(frozen=True)
class Prompt:
    tokens: np.ndarray
    """(n,) uint32."""
    document_end: int
    """How many leading tokens do not depend on the instruction."""


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
        self._before, self._after = self._template(chat_tokenizer)
        self._last: tuple[tuple[Document, ...], list[int]] | None = None

    def build(self, documents: Sequence[Document], instruction: str) -> Prompt:
        head = self._before + self._document_tokens(tuple(documents))
        tail = self._text.encode("\n\n" + instruction, add_special_tokens=False).ids + self._after
        return Prompt(np.array(head + tail, dtype=np.uint32), document_end=len(head))

    def _document_tokens(self, documents: tuple[Document, ...]) -> list[int]:
        if self._last is None or self._last[0] != documents:
            if len(documents) == 1:
                text = documents[0].text
            else:
                parts = (f"Document {i}: {d.name}\n\n{d.text}" for i, d in enumerate(documents, 1))
                text = "\n\n".join(parts)
            self._last = documents, self._text.encode(text, add_special_tokens=False).ids
        return self._last[1]

    def _template(self, chat_tokenizer: Any) -> tuple[list[int], list[int]]:
        """Token ids before and after the user's message; exactly one BOS if the model has one."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": _MARK}]
        text = _render(chat_tokenizer, messages)
        if text is None or text.count(_MARK) != 1:
            # Some templates refuse a system message: its words open the user's message there.
            text = _render(chat_tokenizer, [{"role": "user", "content": f"{SYSTEM}\n\n{_MARK}"}])
        if text is None or text.count(_MARK) != 1:
            raise EngineError(
                "no_chat_template", "The model's chat template does not show the user's message exactly once."
            )
        before, after = text.split(_MARK)
        ids = self._control.encode(before, add_special_tokens=False).ids
        bos = chat_tokenizer.bos_token_id
        if bos is not None and self._control.encode("a").ids[:1] == [bos] and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids, self._control.encode(after, add_special_tokens=False).ids


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str | None:
    from jinja2 import TemplateError

    try:
        rendered = tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
            date_string=_FIXED_DATE,
        )
    except (TemplateError, ValueError):
        return None
    return str(rendered)
