"""Takes a model's thinking out of its text, which arrives in pieces that may cut a tag in two."""

from __future__ import annotations

from prompts import Stage, ThinkingTags


class ThinkingSplitter:
    """Parts thinking from answer. Thinking comes first or not at all: a tag that comes later is text.

    A model may repeat a tag that its template has written; at the beginning of thinking or answer the second
    one is dropped. What passes in all is the same, however the text is cut into pieces.
    """

    def __init__(self, stage: Stage, tags: ThinkingTags | None) -> None:
        """
        Args:
            stage: where the prompt leaves the text.
            tags: the model's; None for a model that knows no thinking.
        """
        self._stage: Stage = stage if tags else "answer"
        self._tags = tags or ThinkingTags("", "")
        self._held = ""
        self._thinking: list[str] = []

    @property
    def thinking(self) -> str | None:
        """The thinking so far, without tags; None if there is none."""
        text = "".join(self._thinking).strip().removeprefix(self._tags.open).strip()
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
        close = self._tags.close
        at = self._held.find(close)
        if at < 0:
            keep = next((n for n in range(len(close) - 1, 0, -1) if self._held.endswith(close[:n])), 0)
            cut = len(self._held) - keep
            self._thinking.append(self._held[:cut])
            self._held = self._held[cut:]
            return False
        self._thinking.append(self._held[:at] + "\n")
        self._held = self._held[at + len(close) :]
        self._stage = "before"
        return True

    def _leave_before(self) -> bool:
        tags = self._tags
        self._held = self._held.lstrip()
        if self._held.startswith(tags.open):
            self._held, self._stage = self._held[len(tags.open) :], "thinking"
        elif self._held.startswith(tags.close):
            self._held = self._held[len(tags.close) :]
        elif tags.answer and self._held.startswith(tags.answer):
            self._held, self._stage = self._held[len(tags.answer) :], "answer"
        elif any(tag.startswith(self._held) for tag in (tags.open, tags.close, tags.answer)):
            return False
        else:
            self._stage = "answer"
        return True
