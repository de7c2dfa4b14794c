"""Products of few rows with quantised weights, where a launch and a second reading cost more than the sums.

Of a batch: MLX takes (B, n, K) times a quantised matrix for B products of n rows, each of which reads the
matrix; on an H200 16 rows took 5.5 times as long as one. As one product of B · n rows they read it once.
Of a single row: a GPU's host prepares every product, so the matrices that multiply the same input (q, k and
v; gate and up) stand below one another in one array and are one product.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import mlx.core as mx
import mlx.nn as nn

_SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def join_products(modules: Sequence[nn.Module]) -> None:
    """Let quantised matrices of these modules that multiply the same input be one product of a single row.

    Each stays a QuantizedLinear, a view of the joined weights, and gives several rows to the bit what it gave
    before. The weights are moved, not doubled, one group of matrices at a time. What differs in its form from
    the others of its group, and leaves its group alone, is left as it is.
    """
    for module in modules:
        for _, parent in module.named_modules():
            for names in _SAME_INPUT:
                _join([parent[name] for name in names if name in parent])
        # Else MLX would keep what the parts took, for arrays of their size, up to a second model.
        mx.clear_cache()


@contextmanager
def rows_joined(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let every QuantizedLinear in these modules multiply the rows of a batch as one product meanwhile."""
    parts = [p for module in modules for _, p in module.named_modules() if type(p) is nn.QuantizedLinear]
    for part in parts:
        part.__class__ = _RowsTogether
    try:
        yield
    finally:
        for part in parts:
            part.__class__ = nn.QuantizedLinear


class _RowsTogether(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        if x.ndim < 3 or x.shape[0] == 1:
            return self._product(x)
        return self._product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def _product(self, x: mx.array) -> mx.array:
        out: mx.array = super().__call__(x)
        return out


class _Joined(_RowsTogether):
    """One of a group's matrices."""

    group: _Group
    index: int

    def __call__(self, x: mx.array) -> mx.array:
        return self.group.part(x, self.index) if x.size == x.shape[-1] else super().__call__(x)


class _Group:
    """Matrices that multiply the same input, below one another in one. Mutated by `part`."""

    def __init__(self, whole: nn.QuantizedLinear, ends: list[int]) -> None:
        self._whole, self._ends = whole, ends
        self._input: mx.array | None = None
        self._parts: list[mx.array] = []

    def part(self, x: mx.array, index: int) -> mx.array:
        """Matrix `index` times x, a single row. The others come at once and wait to be asked for in order."""
        if x is not self._input:
            self._input, self._parts = x, list(mx.split(self._whole(x), self._ends[:-1], axis=-1))
        out = self._parts[index]
        if index == len(self._parts) - 1:
            self._input, self._parts = None, []
        return out


def _join(parts: list[nn.Module]) -> None:
    forms = {_form(part) for part in parts}
    if len(parts) < 2 or len(forms) > 1 or None in forms:
        return
    ends = list(accumulate(part.weight.shape[0] for part in parts))
    whole = copy.copy(parts[0])
    for name in parts[0]:
        whole[name] = mx.concatenate([part[name] for part in parts])
        for part, (start, end) in zip(parts, pairwise([0, *ends]), strict=True):
            part[name] = whole[name][start:end]
        mx.eval(whole[name], *(part[name] for part in parts))
    group = _Group(whole, ends)
    for index, part in enumerate(parts):
        part.__class__ = _Joined
        part.group, part.index = group, index


def _form(part: nn.Module) -> tuple[object, ...] | None:
    """What matrices must share to be one; None of what is no quantised matrix."""
    if type(part) is not nn.QuantizedLinear:
        return None
    arrays = ((name, array.shape[1:], array.dtype) for name, array in part.items())
    return part.group_size, part.bits, part.mode, *arrays
