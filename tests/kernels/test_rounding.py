"""The yardstick of the numeric tests: as long as what a naive computation loses, and no longer.

Everything here is added one by one in NumPy, so that no BLAS has a say.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels import rounding

Rounds = Callable[[np.ndarray], np.ndarray]


def arrays(num_queries: int, num_tokens: int, head_dim: int, group: int, size: float = 1.0) -> list[mx.array]:
    rng = np.random.default_rng(num_tokens)
    shapes = [(1, 2 * group, num_queries, head_dim), *[(1, 2, num_tokens, head_dim)] * 2]
    sizes = (size, 1.0, 1.0)
    return [
        mx.array((a * rng.standard_normal(shape)).astype(np.float32))
        for a, shape in zip(sizes, shapes, strict=True)
    ]


def as_it_is(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def in_float16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def to_bits(num_bits: int) -> Rounds:
    """Rounds float32 to a mantissa of so many bits."""
    step = np.uint32(1 << 23 - num_bits)

    def rounds(x: np.ndarray) -> np.ndarray:
        raw = x.astype(np.float32).view(np.uint32)
        return ((raw + (step >> 1)) & ~(step - np.uint32(1))).view(np.float32)

    return rounds


def product(a: np.ndarray, b: np.ndarray, after_each: Rounds) -> np.ndarray:
    out = np.zeros((*a.shape[:-1], b.shape[-1]), np.float32)
    for i in range(a.shape[-1]):
        out = after_each(out + a[..., i : i + 1] * b[..., i : i + 1, :])
    return out


def one_by_one(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    *,
    operands: Rounds = as_it_is,
    scores_to: Rounds = as_it_is,
    weights_to: Rounds = as_it_is,
    sums: Rounds = as_it_is,
    unseen: int | None = None,
    ahead: int = 0,
) -> mx.array:
    """Causal attention in float32, with whatever is wrong with it."""
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (np.array(x) for x in (q, k, v))
    keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
    turned = operands(keys).swapaxes(2, 3)
    scores = scores_to(product(operands(queries * np.float32(scale)), turned, sums))
    num_queries, num_tokens = scores.shape[2:]
    position = np.arange(num_tokens)
    hidden = position > np.arange(num_queries)[:, None] + num_tokens - num_queries + ahead
    scores[..., hidden | (position == unseen)] = -np.inf
    weights = weights_to(np.exp(scores - scores.max(axis=-1, keepdims=True)))
    total = product(weights, np.ones((*scores.shape[:2], num_tokens, 1), np.float32), sums)
    return mx.array(product(weights / total, operands(values), sums))


CASES = [
    (37, 130, 64, 3, 1.0),
    (66, 333, 128, 1, 1.0),
    (5, 2000, 16, 2, 1.0),
    (20, 100, 512, 1, 3.0),
    (2, 300, 64, 1, 1.0),
]


@pytest.mark.parametrize("case", CASES[:4])
def test_a_naive_computation_loses_what_is_predicted(case: tuple[int, int, int, int, float]) -> None:
    q, k, v = arrays(*case)
    exact = rounding.dense_attention(q, k, v, case[2] ** -0.5)
    out = one_by_one(q, k, v, case[2] ** -0.5)
    rounding.assert_within_contract(out, exact)
    lost = math.sqrt(((rounding.wide(out) - exact.truth) ** 2).mean() / exact.variance.mean())
    assert 0.75 < lost < 1.25


WRONG = {
    "a scale that is off by a hundred-thousandth": {"by": 1 + 1e-5},
    "one key that is left out": {"unseen": 2},
    "one key too many": {"ahead": 1},
    "sums in float16": {"sums": in_float16},
    "sums in bfloat16": {"sums": to_bits(7)},
    "scores in float16": {"scores_to": in_float16},
    "weights in float16": {"weights_to": in_float16},
    "weights that lose ten bits": {"weights_to": to_bits(13)},
    "operands of tensor cores (ten bits)": {"operands": to_bits(10)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_computation_is_outside(what: str, case: tuple[int, int, int, int, float]) -> None:
    q, k, v = arrays(*case)
    wrong = dict(WRONG[what])
    scale = case[2] ** -0.5
    exact = rounding.dense_attention(q, k, v, scale)
    out = one_by_one(q, k, v, scale * wrong.pop("by", 1), **wrong)
    with pytest.raises(AssertionError):
        rounding.assert_within_contract(out, exact)


def test_one_wrong_number_among_many_is_outside() -> None:
    q, k, v = arrays(66, 333, 128, 1)
    exact = rounding.dense_attention(q, k, v, 0.1)
    out = one_by_one(q, k, v, 0.1)
    assert abs(float(out[0, 1, 60, 7])) < 0.5
    wrong = mx.where(mx.arange(out.size).reshape(out.shape) == out[0, 0].size + 60 * 128 + 7, out + 2e-6, out)
    assert int((wrong != out).sum()) == 1
    rounding.assert_within_contract(out, exact)
    with pytest.raises(AssertionError):
        rounding.assert_within_contract(wrong, exact)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_a_result_of_a_half_is_rounded_once(dtype: mx.Dtype) -> None:
    q, k, v = arrays(37, 130, 64, 3)
    exact = rounding.dense_attention(q, k, v, 0.125)
    out = one_by_one(q, k, v, 0.125).astype(dtype)
    rounding.assert_within_contract(out, exact)
    twice = (out * (1 + 2 * rounding.UNITS[dtype])).astype(dtype)
    with pytest.raises(AssertionError):
        rounding.assert_within_contract(twice, exact)
