"""How the next token is chosen from logits: penalties, filters, and a draw that depends on nothing else."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    make_frequency_penalty,
    make_presence_penalty,
    make_repetition_penalty,
)

PENALTY_TOKENS = 64


@dataclass(frozen=True)
class Sampling:
    """What a request says about its answer; `jobs.spec` has the bounds."""

    max_output_tokens: int
    temperature: float = 0.0
    """0 takes the likeliest token, whatever the filters and the seed say."""
    top_p: float = 1.0
    top_k: int = 0
    """Only the k likeliest tokens; 0 for no limit."""
    min_p: float = 0.0
    """Only tokens at least this likely in proportion to the likeliest."""
    seed: int | None = None
    """Below 2**32; drawn at random where None."""
    repetition_penalty: float = 1.0
    """Divides the likelihood of the tokens that the last `PENALTY_TOKENS` of the answer hold; 1 is none."""
    presence_penalty: float = 0.0
    """Taken once from the logit of every token that the answer holds."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time that the answer holds it."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer and are not part of it."""
    thinking: bool = False
    """Whether a model that can is asked to think before it answers."""


class Sampler:
    """Chooses the tokens of one answer.

    The n-th draw depends on the seed and on n alone. So an answer is the same by itself, in a batch, after
    other jobs, and with drafts that are checked several at a time.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
        self._repetition = make_repetition_penalty(sampling.repetition_penalty, PENALTY_TOKENS)
        # mlx_lm takes the last n tokens, and the last 0 are all of them.
        self._presence = make_presence_penalty(sampling.presence_penalty, 0)
        self._frequency = make_frequency_penalty(sampling.frequency_penalty, 0)

    @property
    def looks_back(self) -> bool:
        """Whether a choice depends on the tokens before it, and not on the logits and their number alone."""
        s = self._sampling
        return bool(s.repetition_penalty != 1 or s.presence_penalty or s.frequency_penalty)

    def choose(self, logits: mx.array, tokens: list[int]) -> mx.array:
        """The token that follows `tokens`, the answer so far; not yet evaluated.

        Args:
            logits: (1, vocab) float32.

        Returns:
            (1,) uint32.
        """
        sampling = self._sampling
        logits = self._penalised(logits, tokens)
        if sampling.temperature == 0:
            return mx.argmax(logits, axis=-1)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if sampling.top_p < 1:
            logprobs = apply_top_p(logprobs, sampling.top_p)
        if sampling.min_p > 0:
            logprobs = apply_min_p(logprobs, sampling.min_p)
        if 0 < sampling.top_k < logprobs.shape[-1]:
            logprobs = apply_top_k(logprobs, sampling.top_k)
        key = mx.random.key(len(tokens) << 32 | self._seed)
        return mx.random.categorical(logprobs / sampling.temperature, key=key)

    def _penalised(self, logits: mx.array, tokens: list[int]) -> mx.array:
        sampling = self._sampling
        logits = logits[:]  # mlx_lm's processors write into what they are given
        if tokens and sampling.repetition_penalty != 1:
            logits = self._repetition(mx.array(tokens[-PENALTY_TOKENS:]), logits)
        if tokens and (sampling.presence_penalty or sampling.frequency_penalty):
            history = mx.array(tokens)
            if sampling.presence_penalty:
                logits = self._presence(history, logits)
            if sampling.frequency_penalty:
                logits = self._frequency(history, logits)
        return logits


def token_ids(chosen: list[mx.array]) -> list[int]:
    """Evaluate what samplers chose, (1,) each; with it all that their step wrote into a cache."""
    return [int(token) for token in np.array(mx.concatenate(chosen))]
