"""From logits to text, one token at a time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
from mlx_lm.sample_utils import make_repetition_penalty, make_sampler

from worker.engine.kv_cache import KVCache
from worker.engine.model import Model
from worker.engine.report import Report

PENALTY_TOKENS = 64
_LONGEST_LOOP = 32
_LOOP_TOKENS = 96
"""A text whose last 96 tokens repeat with a period of at most 32, three times or more, is a loop."""


@dataclass(frozen=True)
class Sampling:
    max_output_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    """Divides the likelihood of the tokens that the last `PENALTY_TOKENS` of the answer hold; 1 is none."""


@dataclass(frozen=True)
class Decoded:
    text: str
    tokens: list[int]
    """Without the token that ended the text."""
    finish_reason: Literal["stop", "length", "repetition"]
    first_token_at: float
    """By `time.perf_counter`."""


def decode_text(
    model: Model, cache: KVCache, logits: mx.array, sampling: Sampling, cached_tokens: int, report: Report
) -> Decoded:
    """Generate until an end token, the token limit or a loop.

    Args:
        cache: holds the prompt; grows by the generated tokens.
        logits: (1, vocab) after the prompt's last token.
    """
    if sampling.seed is not None:
        mx.random.seed(sampling.seed)
    sampler = make_sampler(temp=sampling.temperature, top_p=sampling.top_p)
    penalise = make_repetition_penalty(sampling.repetition_penalty, PENALTY_TOKENS)
    detokenizer = model.tokenizer.detokenizer
    detokenizer.reset()
    tokens: list[int] = []
    first_token_at = 0.0
    finish: Literal["stop", "length", "repetition"] = "length"
    while True:
        report.check()
        if sampling.repetition_penalty != 1.0 and tokens:
            logits = penalise(mx.array(tokens[-PENALTY_TOKENS:]), logits)
        token: int = sampler(logits - mx.logsumexp(logits, axis=-1, keepdims=True)).item()
        first_token_at = first_token_at or time.perf_counter()
        if token in model.eos_token_ids:
            finish = "stop"
            break
        tokens.append(token)
        detokenizer.add_token(token)
        report.delta(detokenizer.last_segment)
        report.progress("decode", len(tokens), sampling.max_output_tokens, cached_tokens)
        if is_loop(tokens):
            finish = "repetition"
            break
        if len(tokens) == sampling.max_output_tokens:
            break
        h = model.embed(mx.array([[token]]))
        for layer, layer_cache in zip(model.layers, cache.layers, strict=True):
            h = layer(h, mask=None, cache=layer_cache)
        logits = model.logits(h)
        mx.eval(logits, cache.arrays())
    detokenizer.finalize()
    report.delta(detokenizer.last_segment)
    return Decoded(detokenizer.text, tokens, finish, first_token_at)


def is_loop(tokens: list[int]) -> bool:
    """Whether the text has begun to repeat itself without end."""
    end = tokens[-_LOOP_TOKENS:]
    if len(end) < _LOOP_TOKENS:
        return False
    return any(end[period:] == end[:-period] for period in range(1, _LONGEST_LOOP + 1))
