"""Stop strings in text that arrives in pieces: what may be the beginning of one is held back."""

from __future__ import annotations


class StopStrings:
    """Passes text through up to the stop string that is complete first; of several, the longest.

    What passes in all is the same, however the text is cut into pieces.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Take the next piece; return what surely belongs to the answer. Nothing follows a stop string."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def finish(self) -> str:
        """The text is over: what was held back for nothing."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
