"""Products of a batch with quantised weights, all rows at once.

MLX takes (B, n, K) times a quantised matrix for B products of n rows, each of which reads the matrix: on an
H200 16 rows took 5.5 times as long as one. As one product of B · n rows they read it once.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn


def join_rows(module: nn.Module) -> None:
    """Let every QuantizedLinear of `module` multiply the rows of a batch as one product."""
    for _, part in module.named_modules():
        if type(part) is nn.QuantizedLinear:
            part.__class__ = _RowsTogether


class _RowsTogether(nn.QuantizedLinear):
    def __call__(self, x: mx.array) -> mx.array:
        if x.ndim < 3 or x.shape[0] == 1:
            return self._product(x)
        return self._product(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def _product(self, x: mx.array) -> mx.array:
        out: mx.array = super().__call__(x)
        return out
