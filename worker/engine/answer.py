"""One answer while it is written: tokens in, text out, until something ends it. Knows no model, no cache."""

from __future__ import annotations

import time
from typing import Any, Literal

import mlx.core as mx

from worker.engine.repetition import NumberTokens, RepetitionWatch
from worker.engine.report import Report
from worker.engine.sampling import Sampler, Sampling, token_ids
from worker.engine.stops import StopStrings
from worker.engine.thinking import ThinkingSplitter


class Answer:
    """Owns its sampler, its text and its end. Mutated by `take`; text is reported as soon as it is sure."""

    def __init__(
        self,
        sampling: Sampling,
        detokenizer: Any,
        numbers: NumberTokens,
        eos_token_ids: frozenset[int],
        thinking: ThinkingSplitter,
        cached_tokens: int,
        report: Report,
    ) -> None:
        """
        Args:
            detokenizer: one of mlx_lm's streaming ones, of this answer alone.
            numbers: of the same tokenizer.
            thinking: parts what the model thinks from its answer.
            cached_tokens: for the report only.
        """
        self.sampling, self.sampler = sampling, Sampler(sampling)
        self.tokens: list[int] = []
        """Without the token that ended the text."""
        self.finish_reason: Literal["stop", "length", "repetition"] | None = None
        """None while the answer goes on."""
        self.first_token_at = 0.0
        """By `time.perf_counter`."""
        self.decode_s = 0.0
        self.num_drafted = self.num_accepted = 0
        self.report = report
        self._detokenizer, self._eos_token_ids = detokenizer, eos_token_ids
        self._thinking, self._stops = thinking, StopStrings(sampling.stop)
        self._repetition = RepetitionWatch(numbers)
        self._cached_tokens = cached_tokens
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text).strip()

    @property
    def thinking(self) -> str | None:
        return self._thinking.thinking

    def begin(self, logits: mx.array) -> None:
        """Choose and take the first token from (1, vocab) logits."""
        began = time.perf_counter()
        self.take(*token_ids([self.sampler.choose(logits, [])]))
        self.decode_s += time.perf_counter() - began
        self.report_progress()

    def take(self, token: int) -> None:
        """The next token."""
        self.first_token_at = self.first_token_at or time.perf_counter()
        if token in self._eos_token_ids:
            self._end("stop")
            return
        self.tokens.append(token)
        is_loop = self._repetition.push(token)
        self._detokenizer.add_token(token)
        self._say(self._thinking.push(self._detokenizer.last_segment))
        if self._stops.found:
            self._end("stop")
        elif is_loop:
            self._end("repetition")
        elif len(self.tokens) == self.sampling.max_output_tokens:
            self._end("length")

    def report_progress(self) -> None:
        num_done, num_total = len(self.tokens), self.sampling.max_output_tokens
        self.report.progress("decode", num_done, num_total, self._cached_tokens)

    def _end(self, reason: Literal["stop", "length", "repetition"]) -> None:
        self._detokenizer.finalize()
        self._say(self._thinking.push(self._detokenizer.last_segment) + self._thinking.finish())
        # What the detokenizer had held back may complete a stop string.
        self.finish_reason = "stop" if self._stops.found else reason
        self._pass_on(self._stops.finish())

    def _say(self, text: str) -> None:
        self._pass_on(self._stops.push(text))

    def _pass_on(self, text: str) -> None:
        if text:
            self._text.append(text)
            self.report.delta(text)
