"""From logits to tokens: one answer by itself, with drafts where they pay."""

from __future__ import annotations

import time
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

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
    h = model.norm(h)
    # One product for all rows: a quantised head would be read for each row of a batch.
    logits: mx.array = model.head(h.reshape(1, -1, h.shape[-1]))
    return logits.astype(mx.float32).reshape(*h.shape[:2], -1)


def decode_answer(
    model: Model, cache: KVCache, answer: Answer, drafter: Drafter | None, run_ahead: bool = False
) -> None:
    """Write an answer that has begun to its end.

    Drafts change how many tokens a step checks, never which are chosen: each is drawn as it would be without
    them, and the first that differs from its draft is the last of its step.

    Args:
        cache: holds the prompt; grows by the answer, drafts that are refused left out.
        run_ahead: whether a step may be asked for before the token that it follows is read, so that a GPU
            need not wait for the host. Not where a penalty looks at the tokens or a draft is at hand.
    """
    began = time.perf_counter()
    run_ahead &= not answer.sampler.looks_back
    ahead: mx.array | None = None  # the token after the answer's last, asked for and not read
    while answer.finish_reason is None:
        answer.report.check()
        num_room = answer.sampling.max_output_tokens - len(answer.tokens) - 1
        draft = drafter.draft(answer.tokens, num_room) if drafter else []
        if ahead is not None or (run_ahead and not draft):
            following = _ask(model, cache, answer, mx.array(answer.tokens[-1:])) if ahead is None else ahead
            ahead = _ask(model, cache, answer, following, 1) if num_room and not draft else None
            answer.take(int(np.array(following)[0]))
            answer.report_progress()
            continue
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
    if ahead is not None:
        cache.drop(1)
    answer.decode_s += time.perf_counter() - began


def _ask(model: Model, cache: KVCache, answer: Answer, last: mx.array, num_unread: int = 0) -> mx.array:
    """The token (1,) that follows `last`, on its way. num_unread: tokens of the answer not read yet."""
    logits = forward(model, cache, last[None])[:, -1]
    # Nothing looks at the tokens here; the draw depends on how many there are.
    chosen = answer.sampler.choose(logits, answer.tokens + [0] * num_unread)
    # It depends on all that the step writes into the cache, which is evaluated with it.
    mx.async_eval(chosen)  # type: ignore[no-untyped-call]
    return chosen


def _step(model: Model, cache: KVCache, answer: Answer, draft: list[int]) -> list[int]:
    """What follows the answer's last token and each token of the draft, were those before it right."""
    logits = forward(model, cache, mx.array([[answer.tokens[-1], *draft]]))
    chosen = [answer.sampler.choose(logits[:, i], answer.tokens + draft[:i]) for i in range(len(draft) + 1)]
    return token_ids(chosen)
