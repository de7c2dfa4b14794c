"""Notices a text that repeats itself without end. Knows token ids and which of them are digits, no model.

A loop is a run with a period: each symbol is the one a period before. A number is one symbol, whatever its
digits, so that a counter doesn't hide a loop; the numbers are then looked at by themselves. Text that is
meant repeats itself too: a refrain once, a table's rule for a line, rows that differ in their numbers alone.
So a run must be long, and each of its numbers must stay or count on by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

WINDOW = 8192
"""Symbols that are looked at: the longest period that is found is 4,032, with a counter 2,730."""
EVERY = 16
"""Tokens between two looks, so that a look costs little by the token."""
BEYOND = 128
"""A loop is said twice and 128 symbols more: a short one then comes round many times, and a long one needs
no third time. The same row eight times over in a table is not one."""
BEYOND_COUNTED = 256
"""Where a number counts on: rows that say the same of one chapter after another are an answer for a while."""
BEYOND_ROWS = 512
"""Where numbers are much of what repeats: a matrix of zeros, counting to a hundred."""
SYMBOLS_PER_NUMBER = 6
"""With fewer other symbols than these for each number, a period is a row of numbers."""
MAX_PERIODS = 64
"""Tried at a look, the shortest first: where rows differ in their numbers alone, hundreds would do."""
LONGEST_NUMBER = 18
"""Further digits are symbols of their own, so that a number without end can be a loop."""
_NUMBER = "\0"


class NumberTokens:
    """What a tokenizer's tokens say where they are digits; kept, since asking costs more than a look."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def digits(self, token: int) -> str:
        """The token's digits, the space before them included; empty for any other token."""
        digits = self._known.get(token)
        if digits is None:
            piece = str(self._tokenizer.decode([token]))
            digits = self._known[token] = piece.rstrip() if piece.strip().isdecimal() else ""
        return digits


class RepetitionWatch:
    """Looks at one answer's tokens as they come, thinking included. Mutated by `push`."""

    def __init__(self, numbers: NumberTokens) -> None:
        self._tokens = numbers
        self._back = ""
        """The last symbols backwards, so that the first place found is the nearest: a character each, for a
        token's id or for a number."""
        self._new: list[str] = []
        """The symbols since the last look."""
        self._numbers: list[str] = []
        """The digits of each symbol, in order; empty for what is no number."""
        self._num_tokens = 0
        self._num_digits = 0
        """Of the number that the text ends with."""

    def push(self, token: int) -> bool:
        """Take the next token; return whether the text has become a loop. It looks every 16th time alone."""
        digits = self._tokens.digits(token)
        is_new = not self._num_digits or digits[:1].isspace()
        digits = digits.strip()
        self._num_digits = (0 if is_new or not digits else self._num_digits) + len(digits)
        if not digits or self._num_digits > LONGEST_NUMBER:
            self._add(chr(token + 1), "")
        elif is_new:
            self._add(_NUMBER, digits)
        else:
            self._numbers[-1] += digits
        self._num_tokens += 1
        return self._num_tokens % EVERY == 0 and self._is_loop()

    def _add(self, symbol: str, digits: str) -> None:
        self._new.append(symbol)
        self._numbers.append(digits)

    def _is_loop(self) -> bool:
        self._back = "".join(reversed(self._new)) + self._back[: WINDOW - len(self._new)]
        self._new.clear()
        if len(self._numbers) > 2 * WINDOW:
            del self._numbers[:-WINDOW]
        # The last number may not be all there yet.
        num_open = int(self._num_digits > 0)
        back, numbers = self._back[num_open:], _Backwards(self._numbers, num_open)
        period, longest, tail = 0, (len(back) - BEYOND) // 2, back[:BEYOND]
        for _ in range(MAX_PERIODS):
            period = back.find(tail, period + 1, longest + BEYOND)
            if period < 0:
                return False
            if _repeats(back, numbers, period):
                return True
        return False


class _Backwards:
    """The digits of a text's symbols by their distance from its end."""

    def __init__(self, numbers: list[str], num_left_out: int) -> None:
        self._numbers, self._last = numbers, -1 - num_left_out

    def steps(self, period: int, place: int, end: int) -> Iterator[int]:
        """From the number at `place` to the one a period further back, and so on before `end`."""
        for at in range(place, end - period, period):
            yield int(self._numbers[self._last - at]) - int(self._numbers[self._last - at - period])


def _repeats(back: str, numbers: _Backwards, period: int) -> bool:
    """Whether the end of a text is a loop of that period."""
    num_numbers = back.count(_NUMBER, 0, period)
    is_rows = period - num_numbers < SYMBOLS_PER_NUMBER * num_numbers
    beyond, beyond_counted = (BEYOND_ROWS, BEYOND_ROWS) if is_rows else (BEYOND, BEYOND_COUNTED)
    if _is_run(back, numbers, period, 2 * period + beyond, may_count=False):
        return True
    # Any two numbers are one step apart: a counter is known by three.
    num_symbols = max(2 * period + beyond_counted, 3 * period)
    return num_numbers > 0 and _is_run(back, numbers, period, num_symbols, may_count=True)


def _is_run(back: str, numbers: _Backwards, period: int, num_symbols: int, may_count: bool) -> bool:
    """Whether the last symbols have that period, and each number in it stays, or counts up or down by one."""
    if len(back) < num_symbols or back[period:num_symbols] != back[: num_symbols - period]:
        return False
    place = -1
    while (place := back.find(_NUMBER, place + 1, period)) >= 0:
        steps = numbers.steps(period, place, num_symbols)
        first = next(steps)
        # Larger steps are data.
        if abs(first) > may_count or any(step != first for step in steps):
            return False
    return True
