"""Guesses what an answer says next from what prompt and answer said before (prompt lookup).

An answer that quotes its document repeats a run of its tokens, and those can be checked several at a time.
Knows no model: a guess is only ever a question to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

_GRAM = 3
"""Tokens that must agree before the ones behind them are worth a guess."""
_TOKEN_BITS = 21
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256


@dataclass(frozen=True)
class DraftPolicy:
    """How far to guess, and what that costs; by device and never by the clock, so that runs repeat."""

    longest: int
    """Tokens in one draft; 0 for none at all."""
    step_cost: float = 1.0
    """A step that checks such a draft, in steps of one token."""


CPU_POLICY = DraftPolicy(15, 3.0)
"""SmolLM2 on two cores: a step of 16 tokens takes 3.1 times as long as one of 1, and one of 2 takes 2.0.
So long drafts pay and short ones don't."""
GPU_POLICY = DraftPolicy(15, 3.3)
"""An 8B model behind 64K tokens on an H200: a step of 16 tokens takes 22 ms, of 4 tokens 24, since MLX
multiplies fewer than 8 rows one by one; a token by itself takes 6.6, since the next step is asked for before
it is read."""


def device_policy() -> DraftPolicy:
    """The policy of MLX's default device."""
    return CPU_POLICY if mx.default_device() == mx.Device(mx.cpu) else GPU_POLICY


class Drafter:
    """Drafts for one answer. Mutated by `draft` and `judge`.

    It keeps an account in tokens: a step costs `step_cost` and earns what it brings. Overdrawn, it pauses for
    ever longer; one draft that pays ends that.
    """

    def __init__(self, prompt: np.ndarray, policy: DraftPolicy) -> None:
        """
        Args:
            prompt: (n,) token ids below 2**21.
        """
        self._policy = policy
        self._tokens: list[int] = prompt.tolist()
        wide = prompt.astype(np.int64)
        keys = np.zeros(max(0, len(wide) - _GRAM), np.int64)
        for place in range(_GRAM):
            keys = keys << _TOKEN_BITS | wide[place : place + len(keys)]
        order = np.argsort(keys, kind="stable")
        self._prompt_keys, self._prompt_ends = keys[order], order + _GRAM
        self._num_prompt = len(prompt)
        self._answer_ends: dict[int, int] = {}
        self._following = 0
        self._credit = 2 * policy.step_cost
        self._pause, self._next_pause = 0, _FIRST_PAUSE

    def draft(self, answer: Sequence[int], num_room: int) -> list[int]:
        """Guess what follows prompt and answer.

        Args:
            answer: all tokens since the prompt; it only ever grows.
            num_room: the most tokens to guess.
        """
        num_new = self._num_prompt + len(answer) - len(self._tokens)
        for token in answer[len(answer) - num_new :]:
            # A gram is known once something follows it.
            self._answer_ends[self._last_key()] = len(self._tokens)
            self._tokens.append(token)
        if self._pause > 0:
            self._pause -= num_new
            return []
        start = self._find()
        self._following = start
        longest = min(num_room, self._policy.longest)
        return self._tokens[start : start + longest] if start and longest > 0 else []

    def judge(self, num_accepted: int) -> None:
        """How many tokens of the last draft the model would have said too."""
        # Where the draft was right, the next one goes on behind it and the token that the model added.
        self._following += num_accepted + 1
        balance = self._credit + 1 + num_accepted - self._policy.step_cost
        self._credit = min(balance, 4 * self._policy.step_cost)
        if self._credit <= 0:
            self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
            self._credit = self._policy.step_cost - 1  # the next draft is a test
        elif num_accepted >= self._policy.step_cost:
            self._next_pause = _FIRST_PAUSE

    def _last_key(self) -> int:
        key = 0
        for token in self._tokens[-_GRAM:]:
            key = key << _TOKEN_BITS | token
        return key

    def _find(self) -> int:
        """The place behind an earlier occurrence of the last tokens; 0 if there is none."""
        if len(self._tokens) < _GRAM:
            return 0
        last = self._tokens[-_GRAM:]
        place = self._following
        if _GRAM <= place < len(self._tokens) and self._tokens[place - _GRAM : place] == last:
            return place
        key = self._last_key()
        if key in self._answer_ends:
            return self._answer_ends[key]
        at = int(np.searchsorted(self._prompt_keys, key, side="right")) - 1
        return int(self._prompt_ends[at]) if at >= 0 and self._prompt_keys[at] == key else 0
