"""Whether two greedy runs that part do so only where the model itself is undecided.

A matrix product of another height sums in another order, so two ways of computing the same logits differ by
rounding. Where the two likeliest tokens are closer than that, either may come out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from prompts import Prompt
from worker.engine.decode import forward
from worker.engine.kv_cache import blocks_end, whole_blocks
from worker.engine.model import Model
from worker.engine.prefill import prefill_prefix, prefill_suffix
from worker.engine.report import Silent

MAX_GAP = 0.01
"""Between the two likeliest logits: in float32 rounding stays a hundred times below it."""
MAX_HALF_GAP = 8
"""The same in 16 bits, in steps of the dtype at the largest logit: every layer rounds to them."""


class TokenRecorder:
    """A model's tokenizer that keeps the detokenizers it hands out, and so the tokens of each answer."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.given = []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    @property
    def detokenizer(self):
        self.given.append(self._tokenizer.detokenizer)
        return self.given[-1]

    def take(self) -> list[list[int]]:
        """The tokens of the answers since the last call, in the order in which they began."""
        tokens, self.given = [list(d.tokens) for d in self.given], []
        return tokens


def recording(model: Model) -> tuple[Model, TokenRecorder]:
    recorder = TokenRecorder(model.tokenizer)
    return replace(model, tokenizer=recorder), recorder


def num_near_ties(model: Model, prompts: Sequence[Prompt], these, those) -> int:
    """How many pairs of answers part at a near-tie.

    Raises:
        AssertionError: if a pair parts elsewhere.
    """
    assert len(these) == len(those) == len(prompts)
    count = 0
    for prompt, one, other in zip(prompts, these, those, strict=True):
        if one == other:
            continue
        num_same = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        gap, allowed = top_two_gap(model, prompt, one[:num_same])
        assert gap < allowed, f"parted after {num_same} tokens, where the likeliest leads by {gap:.3g}"
        count += 1
    return count


def top_two_gap(model: Model, prompt: Prompt, answer: Sequence[int]) -> tuple[float, float]:
    """By how much the likeliest token leads after `answer`, token by token; and a near-tie's most."""
    cache = model.new_cache()
    num_prefix = blocks_end(whole_blocks(prompt.document_end))
    if num_prefix:
        prefill_prefix(model, cache, prompt.tokens[:num_prefix], 1, Silent())
    logits = prefill_suffix(model, cache, prompt.tokens[num_prefix:], 0, Silent())
    for token in answer:
        logits = forward(model, cache, mx.array([[token]]))[:, -1]
        mx.eval(logits, cache.arrays())
    second, first = np.sort(np.array(logits[0]))[-2:]
    step = float(mx.finfo(model.dtype).eps) * max(1.0, abs(float(first)))
    return float(first - second), MAX_GAP if model.dtype == mx.float32 else MAX_HALF_GAP * step
