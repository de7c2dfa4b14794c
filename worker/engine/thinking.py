"""Takes a model's thinking out of its text, which arrives in pieces that may cut a tag in two."""

from __future__ import annotations

from typing import Literal

OPEN, CLOSE = "<think>", "</think>"

Stage = Literal["before", "thinking", "answer"]
"""Where a text stands: before its first word, within the tags, or in the answer, where tags are text."""


class ThinkingSplitter:
    """Parts thinking from answer. Thinking comes first or not at all: a tag that comes later is text.

    A model may repeat a tag that its template has written; at the beginning of thinking or answer the second
    one is dropped. What passes in all is the same, however the text is cut into pieces.
    """

    def __init__(self, stage: Stage) -> None:
        """
        Args:
            stage: where the prompt leaves the text; `answer` for a model that knows no thinking.
        """
        self._stage: Stage = stage
        self._held = ""
        self._thinking: list[str] = []

    @property
    def thinking(self) -> str | None:
        """The thinking so far, without tags; None if there is none."""
        text = "".join(self._thinking).strip().removeprefix(OPEN).strip()
        return text or None

    def push(self, text: str) -> str:
        """Take the next piece; return what of it, and of what was held back, belongs to the answer."""
        self._held += text
        while self._stage != "answer":
            if self._stage == "thinking":
                if not self._leave_thinking():
                    return ""
            elif not self._leave_before():
                return ""
        return self.finish()

    def finish(self) -> str:
        """The text is over: what was held back for nothing."""
        held, self._held = self._held, ""
        if self._stage != "thinking":
            return held
        self._thinking.append(held)
        return ""

    def _leave_thinking(self) -> bool:
        at = self._held.find(CLOSE)
        if at < 0:
            keep = next((n for n in range(len(CLOSE) - 1, 0, -1) if self._held.endswith(CLOSE[:n])), 0)
            cut = len(self._held) - keep
            self._thinking.append(self._held[:cut])
            self._held = self._held[cut:]
            return False
        self._thinking.append(self._held[:at] + "\n")
        self._held = self._held[at + len(CLOSE) :]
        self._stage = "before"
        return True

    def _leave_before(self) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(OPEN):
            self._held, self._stage = self._held[len(OPEN) :], "thinking"
        elif self._held.startswith(CLOSE):
            self._held = self._held[len(CLOSE) :]
        elif OPEN.startswith(self._held) or CLOSE.startswith(self._held):
            return False
        else:
            self._stage = "answer"
        return True
