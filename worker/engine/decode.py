"""From logits to tokens: one answer by itself, with drafts where they pay."""

from __future__ import annotations

import time
from typing import Any, Protocol

import mlx.core as mx

from worker.engine.answer import Answer
from worker.engine.kv_cache import KVCache
from worker.engine.model import Model
from worker.engine.sampling import token_ids
from worker.engine.speculate import Drafter


class Cache(Protocol):
    layers: list[Any]
    """What mlx_lm's layers take as their cache, one for each."""


def forward(model: Model, cache: Cache, tokens: mx.array) -> mx.array:
    """Run (B, Sq) token ids, at most 16 in a row, through the model; the cache grows by them.

    Returns:
        (B, Sq, vocab) float32 logits, not yet evaluated.
    """
    h = model.embed(tokens)
    for layer, layer_cache in zip(model.layers, cache.layers, strict=True):
        h = layer(h, tokens, layer_cache)
    logits: mx.array = model.head(model.norm(h))
    return logits.astype(mx.float32)


def decode_answer(model: Model, cache: KVCache, answer: Answer, drafter: Drafter | None) -> None:
    """Write an answer that has begun to its end.

    Drafts change how many tokens a step checks, never which are chosen: each is drawn as it would be without
    them, and the first that differs from its draft is the last of its step.

    Args:
        cache: holds the prompt; grows by the answer, drafts that are refused left out.
    """
    began = time.perf_counter()
    while answer.finish_reason is None:
        answer.report.check()
        num_room = answer.sampling.max_output_tokens - len(answer.tokens) - 1
        draft = drafter.draft(answer.tokens, num_room) if drafter else []
        chosen = _step(model, cache, answer, draft)
        num_accepted = next((i for i, token in enumerate(draft) if token != chosen[i]), len(draft))
        if drafter and draft:
            cache.drop(len(draft) - num_accepted)
            drafter.judge(num_accepted)
        num_before = len(answer.tokens)
        for token in chosen[: num_accepted + 1]:
            answer.take(token)
            if answer.finish_reason is not None:
                break
        answer.report_progress()
        answer.num_drafted += len(draft)
        answer.num_accepted += min(num_accepted, len(answer.tokens) - num_before)
    answer.decode_s += time.perf_counter() - began


def _step(model: Model, cache: KVCache, answer: Answer, draft: list[int]) -> list[int]:
    """What follows the answer's last token and each token of the draft, were those before it right."""
    logits = forward(model, cache, mx.array([[answer.tokens[-1], *draft]]))
    chosen = [answer.sampler.choose(logits[:, i], answer.tokens + draft[:i]) for i in range(len(draft) + 1)]
    return token_ids(chosen, cache.arrays())
