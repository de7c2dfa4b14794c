"""What the first two layers begin as: heads that look one and two tokens back, and heads that look for them.

Such a pair (an induction circuit) forms by itself in training, after a plateau of unknown length; begun
with it, a run spends its time on recall at length. All of it is trained like any other weight.

Of the residual stream, channels 0-159 carry the token, 160-207 the token before, 208-254 the one before that,
and 255 is the same for every token, so that a head can look at places alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

NUM_WORD_CHANNELS = 160
BEFORE, BEFORE_THAT = slice(160, 208), slice(208, 255)
ANY_WORD, ANY_WORD_SIZE = 255, 4.0
HIDDEN, HEAD, GROUP = 256, 64, 4
"""The only sizes that the circuit is laid out for: channels, channels of a head, query heads of a KV head."""
FIRST_STEADY_PAIR = 17
"""From this pair of a head's channels on, RoPE turns by less than a radian in the whole context."""
_PLACE_LOGITS = (12.0, 8.0, 6.0, 4.0, 3.0, 2.0, 2.0, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0)
"""What each of the fastest pairs adds to a score at the offset that a head looks for."""


@torch.no_grad()
def build(layers: Sequence[Any], theta: float) -> None:
    """Overwrite parts of the first two layers' weights."""
    words = torch.linalg.qr(torch.randn(NUM_WORD_CHANNELS, HEAD))[0].T  # (64, 160), orthonormal rows
    _look_back(layers[0], words, theta)
    _match(layers[1], words)


def _look_back(layer: Any, words: Tensor, theta: float) -> None:
    """Query heads 0 and 1 of KV head 0 copy the token one and two places back."""
    pairs = torch.arange(len(_PLACE_LOGITS))
    turns = theta ** (-pairs / (HEAD // 2))
    sizes = (torch.tensor(_PLACE_LOGITS) * HEAD**0.5).sqrt() / 8.5  # 8.5: channel 255 behind the norm
    layer.k[:HEAD] = 0
    layer.k[pairs, ANY_WORD] = sizes
    layer.v[:HEAD] = 0
    layer.v[:HEAD, :NUM_WORD_CHANNELS] = words
    for head in range(GROUP):
        q = layer.q[head * HEAD : (head + 1) * HEAD]
        q[:] = 0
        q[pairs, ANY_WORD] = sizes * torch.cos(-(head + 1) * turns)
        q[pairs + HEAD // 2, ANY_WORD] = sizes * torch.sin(-(head + 1) * turns)
    for head, channels in enumerate((BEFORE, BEFORE_THAT)):
        o = layer.o[:, head * HEAD : (head + 1) * HEAD]
        o[:] = 0
        num = channels.stop - channels.start
        o[channels, :num] = 0.6 * torch.eye(num)


def _match(layer: Any, words: Tensor) -> None:
    """KV head 0: tokens whose predecessor is this token; KV head 1: whose two predecessors are these two."""
    steady = torch.arange(FIRST_STEADY_PAIR, HEAD // 2)
    steady = torch.cat([steady, steady + HEAD // 2])  # 30 channels
    half = len(steady) // 2
    gain = 2.2
    layer.q[:] = 0.1 * layer.q
    layer.k[:] = 0.1 * layer.k
    q_one, q_two = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
    k_one, k_two = torch.zeros(HEAD, HIDDEN), torch.zeros(HEAD, HIDDEN)
    q_one[steady, :NUM_WORD_CHANNELS] = words[: len(steady)]
    k_one[steady, BEFORE.start + torch.arange(len(steady))] = 1
    q_two[steady[:half], :NUM_WORD_CHANNELS] = words[:half]
    k_two[steady[:half], BEFORE.start + torch.arange(half)] = 1
    q_two[steady[half:], BEFORE.start + torch.arange(half)] = 1
    k_two[steady[half:], BEFORE_THAT.start + torch.arange(half)] = 1
    for kv_head, (q, k) in enumerate(((q_one, k_one), (q_two, k_two))):
        rows = slice(kv_head * HEAD, (kv_head + 1) * HEAD)
        layer.k[rows] += gain * k
        copied = torch.linalg.qr(torch.randn(NUM_WORD_CHANNELS, HEAD))[0].T
        layer.v[rows] = 0
        layer.v[rows, :NUM_WORD_CHANNELS] = copied
        for head in range(kv_head * GROUP, (kv_head + 1) * GROUP):
            heads = slice(head * HEAD, (head + 1) * HEAD)
            layer.q[heads] += gain * q
            layer.o[:, heads] = 0
            layer.o[:NUM_WORD_CHANNELS, heads] = 0.4 * copied.T
