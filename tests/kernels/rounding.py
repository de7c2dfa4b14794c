"""What attention loses to rounding, derived from the format of its numbers and the length of its sums.

The contract of every kernel: against the exact result, at most twice the error of a naive computation in the
same dtype. How much one naive computation happens to lose depends on the order in which somebody's BLAS adds,
and on luck where there are few numbers. So nothing naive is run here: its expected error is worked out.

- A result x is rounded to the nearest number of its format. The error is uniform within half a unit in the
  last place, which is u|x| at a power of two and half of that below the next: on average over numbers whose
  logarithms are spread evenly, its variance is (u x)²/(8 ln 2). u is 2^-24 in float32, 2^-11 in float16,
  2^-8 in bfloat16.
- The errors of different roundings are independent.
- n terms of the sum S are added one by one. On average over their orders, the squares of the sums on the way
  add up to (n + 1)(Q + 2S²)/6, Q being the sum of the terms' squares.
- To first order: where float32 rounds scores by more than one, no error can be predicted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from kernels import BLOCK_TOKENS, CacheView
from kernels.codec import unpack
from tests.kernels.attention_cases import decode_in_float64

UNITS = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}
"""The largest relative error of one rounding to nearest."""
EXP_UNITS = 2
"""A float32 exp is within one unit in the last place, which is twice the error of a rounding."""
ODDS = 1e-6
"""How seldom a naive computation's error, which is random, may exceed what is said that chance allows."""


def variance_of_rounding(unit: float) -> float:
    """Of numbers of size one."""
    return unit**2 / (8 * math.log(2))


class Exact(NamedTuple):
    """The exact result, and the variance of a naive computation's error in each of its numbers."""

    truth: np.ndarray
    variance: np.ndarray


def of_sum(squares: np.ndarray, total: np.ndarray, num_terms: np.ndarray | int) -> np.ndarray:
    """The variance of adding terms one by one, in roundings of size one."""
    return (num_terms + 1) * (squares + 2 * total**2) / 6


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    visible: np.ndarray,
    sinks: np.ndarray | None = None,
    decoding: tuple[np.ndarray, np.ndarray] | None = None,
    shared: tuple[np.ndarray, np.ndarray] | None = None,
    stored: float = 2.0**-24,
) -> Exact:
    """Softmax attention in float64 with what float32 arithmetic loses, one KV head to a group of queries.

    Args:
        q: (B, Hkv, group, Sq, D). k, v: (B, Hkv, 1, T, D). All float64.
        visible: which of T tokens a query sees; broadcasts to (B, Hkv, group, Sq, T).
        sinks: logits that take weight and give nothing; broadcasts to (B, Hkv, group, Sq, 1).
        decoding: the variance with which k and v come out of their codes, in roundings of size one.
        shared: N numbers of the query that enter many scores, so that these err together: their variance in
            roundings of size one, (B, Hkv, group, Sq, N), and what a token multiplies, (B, Hkv, 1, T, N).
        stored: u of the format in which scores, weights and the result are kept.
    """
    u2 = variance_of_rounding(UNITS[mx.float32])
    stored2 = variance_of_rounding(stored)
    width = q.shape[-1]
    scores = scale * q @ k.swapaxes(-1, -2)
    squares = scale**2 * (q**2 @ (k**2).swapaxes(-1, -2))
    # Scaling the query and multiplying are a rounding each, and then their sum's.
    of_score = u2 * (2 * squares + of_sum(squares, scores, width)) + (stored2 - u2) * scores**2
    if decoding:
        of_score += u2 * scale**2 * (q**2 @ decoding[0].swapaxes(-1, -2))
    scores = np.where(visible, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    top = top if sinks is None else np.maximum(top, sinks)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    total = total if sinks is None else total + np.exp(sinks - top)
    weights /= total
    num_terms = visible.sum(axis=-1, keepdims=True)
    out = weights @ v
    # A weight that is off by a share moves the mean by its distance from the value.
    below_top = np.where(visible, scores - top, 0)
    share = np.where(visible, of_score, 0) + u2 * (below_top**2 + EXP_UNITS**2) + (stored2 - u2)
    moves = weights**2 * share
    variance = moves @ v**2 - 2 * out * (moves @ v) + out**2 * moves.sum(axis=-1, keepdims=True)
    of_total = of_sum((weights**2).sum(axis=-1, keepdims=True), np.ones_like(total), num_terms)
    of_terms = weights**2 @ v**2
    variance += u2 * (of_total * out**2 + 2 * of_terms + of_sum(of_terms, out, num_terms))
    variance += (stored2 - u2) * out**2
    if decoding:
        variance += u2 * (weights**2 @ decoding[1])
    if shared:
        for of_number, factor in zip(
            np.moveaxis(shared[0], -1, 0), np.moveaxis(shared[1], -1, 0), strict=True
        ):
            leaning = weights * factor[..., None, :]
            moved = leaning @ v - out * leaning.sum(axis=-1, keepdims=True)
            variance += u2 * scale**2 * of_number[..., None] * moved**2
    return Exact(out, np.maximum(variance, 0))


def dense_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    visible: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
) -> Exact:
    """Attention over dense keys and values, as `kernels.prefill_attention` takes them; causal unless told."""
    num_queries, num_tokens = q.shape[2], k.shape[2]
    if visible is None:
        visible = np.arange(num_tokens) <= num_tokens - num_queries + np.arange(num_queries)[:, None]
    rows = grouped(q, k.shape[1])
    found = attention(rows, wide(k)[:, :, None], wide(v)[:, :, None], scale, visible, sinks)
    return Exact(*(x.reshape(q.shape) for x in found))


def cached_attention(
    q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None, stored: float = 2.0**-24
) -> Exact:
    """Attention over a cache, as `kernels.decode_attention` takes it, straight from the codes.

    What is naive: every key and value is decoded first, then attention is computed as if they were dense.
    """
    batch, _, num_queries, head_dim = q.shape
    num_kv_heads, num_tail = view.sinks_k.shape[0], view.tail_k.shape[2]
    tiles = view.tiles[: view.num_blocks]
    lengths = np.full(batch, num_tail) if view.tail_lengths is None else np.array(view.tail_lengths)
    position = np.arange(num_tail)
    own = lengths[:, None, None] - num_queries + np.arange(num_queries)[:, None]
    seen = np.broadcast_to(position <= own, (batch, num_queries, num_tail))
    if view.window:
        seen = seen & (position > own - view.window)
    num_before = view.sinks_k.shape[1] + view.num_blocks * BLOCK_TOKENS
    before = np.ones((batch, num_queries, num_before), dtype=bool)
    visible = np.concatenate([before, seen], axis=-1)[:, None, None]
    read = seen.any(axis=1)[:, None, :, None]

    def tokens(sinks: mx.array, blocks: np.ndarray, tail: mx.array) -> np.ndarray:
        first = np.concatenate([wide(sinks), blocks], axis=1)
        first = np.broadcast_to(first, (batch, *first.shape))
        return np.concatenate([first, np.where(read, wide(tail), 0)], axis=2)[:, :, None]

    blocks = decode_in_float64(tiles, head_dim, view.format)
    losses = of_decoding(tiles, head_dim, view.format, blocks)
    if stored > 2.0**-24:
        losses = [loss + (stored / 2.0**-24) ** 2 * x**2 for loss, x in zip(losses, blocks, strict=True)]
    nothing_k, nothing_v = (
        (mx.zeros_like(a), mx.zeros_like(b))
        for a, b in ((view.sinks_k, view.tail_k), (view.sinks_v, view.tail_v))
    )
    rows = grouped(q, num_kv_heads)
    shared = None
    parts = unpack(tiles, head_dim, view.format)
    if not parts.layout.rotated:
        # The queries of a group are added up once, for the offsets of all tokens.
        groups = rows.reshape(*rows.shape[:-1], -1, parts.layout.group_size)
        squares = (groups**2).sum(axis=-1)
        of_offset = tokens(
            mx.zeros_like(view.sinks_k[..., : groups.shape[-2]]),
            by_token(wide(parts.k_biases)),
            mx.zeros_like(view.tail_k[..., : groups.shape[-2]]),
        )
        shared = squares + of_sum(squares, groups.sum(axis=-1), parts.layout.group_size), of_offset
    found = attention(
        rows,
        tokens(view.sinks_k, blocks[0], view.tail_k),
        tokens(view.sinks_v, blocks[1], view.tail_v),
        scale,
        visible,
        None if sinks is None else wide(sinks).reshape(1, num_kv_heads, -1, 1, 1),
        (tokens(nothing_k[0], losses[0], nothing_k[1]), tokens(nothing_v[0], losses[1], nothing_v[1])),
        shared,
        stored,
    )
    return Exact(*(x.reshape(q.shape) for x in found))


def decoded_numbers(tiles: mx.array, head_dim: int, format: str = "int4c") -> list[Exact]:
    """The keys and the values of tiles, (num_kv_heads, tokens, D)."""
    numbers = decode_in_float64(tiles, head_dim, format)
    losses = of_decoding(tiles, head_dim, format, numbers)
    unit = variance_of_rounding(UNITS[mx.float32])
    return [Exact(x, unit * loss) for x, loss in zip(numbers, losses, strict=True)]


def of_decoding(tiles: mx.array, head_dim: int, format: str, decoded: list[np.ndarray]) -> list[np.ndarray]:
    """The variance of what float32 decodes: (num_kv_heads, tokens, D), in roundings of size one.

    A code times its scale is exact. Then a rotated format has a product with ±1/√D, itself rounded, and a sum
    over the head, and for keys the mean. An affine number is two, code and offset, which MLX's own product
    sums apart: what is left after they cancel is as inexact as they are.
    """
    parts = unpack(tiles, head_dim, format)
    layout = parts.layout

    losses = []
    if not layout.rotated:
        for x, biases in zip(decoded, (parts.k_biases, parts.v_biases), strict=True):
            offset = by_token(wide(biases).repeat(layout.group_size, axis=-1))
            losses.append((x - offset) ** 2 + offset**2)
        return losses
    mean = wide(parts.k_mean)[:, :, None]  # (NB, H, 1, D)
    for x, offset in zip(decoded, (mean, np.zeros_like(mean)), strict=True):
        blocks = x.reshape(x.shape[0], -1, BLOCK_TOKENS, head_dim).swapaxes(0, 1)
        rotated = blocks - offset
        squares = (rotated**2).mean(axis=-1, keepdims=True)  # the rotation keeps the norm
        losses.append(by_token(squares + rotated**2 + of_sum(squares, rotated, head_dim) + blocks**2))
    return losses


def assert_within_contract(ours: mx.array, exact: Exact, label: object = "") -> None:
    """No more than twice what a naive computation of float32 is expected to lose, then one rounding.

    As a whole, where what few rows lose may be more by chance; and in every single number, where it is twice
    the deviation that one of so many may have by chance.
    """
    once = UNITS[ours.dtype] if ours.dtype != mx.float32 else 0.0
    error = np.maximum(np.abs(wide(ours) - exact.truth) - once * np.abs(exact.truth), 0)
    expected = math.sqrt(exact.variance.mean())
    lost, whole = math.sqrt((error**2).mean()), max(2.0, by_chance(exact.variance)) * expected
    assert lost <= whole, (label, f"{lost:.3g} of {whole:.3g}")
    deviations = math.sqrt(2 * math.log(2 * error.size / ODDS))
    single = 2 * deviations * np.sqrt(exact.variance)
    assert (error <= single).all(), (
        label,
        f"{(error / np.maximum(single, 1e-300)).max():.3g} of a single one",
    )


def by_chance(variance: np.ndarray) -> float:
    """How many times as much as expected a naive computation loses as a whole, but for the odds `ODDS`.

    The error of a row may all come from one score, so a row is one random number. The bound is that of a sum
    of their squares (Laurent and Massart 2000, lemma 1).
    """
    rows = variance.mean(axis=-1).ravel()
    if not rows.any():
        return 1.0
    x = -math.log(ODDS)
    bound = rows.sum() + 2 * math.sqrt(x * (rows**2).sum()) + 2 * x * rows.max()
    return math.sqrt(bound / rows.sum())


def by_token(x: np.ndarray) -> np.ndarray:
    """(NB, H, 128, n) → (H, tokens, n)."""
    return x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, x.shape[3])


def wide(x: mx.array) -> np.ndarray:
    return np.array(x.astype(mx.float32)).astype(np.float64)


def grouped(q: mx.array, num_kv_heads: int) -> np.ndarray:
    """(B, Hq, Sq, D) → (B, Hkv, group, Sq, D)."""
    batch, _, num_queries, head_dim = q.shape
    return wide(q).reshape(batch, num_kv_heads, -1, num_queries, head_dim)
