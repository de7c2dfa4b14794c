"""Dense experts with a bias, whose sorted product MLX gets wrong on CUDA.

`mx.gather_mm` there takes the stride between the rows of its input from an axis of size one. An array that
was made by `mx.expand_dims` has 1 there, and gives it on to a sum or an activation whenever MLX lets that
write into its memory, which depends on what memory is free: the same prompt then has one answer or another.
Experts' biases are such arrays. Quantised experts take another product, which is right.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear


def state_row_strides(modules: Sequence[nn.Module]) -> None:
    """Let every dense expert with a bias in these modules multiply arrays whose strides are those of rows."""
    for module in modules:
        for _, part in module.named_modules():
            if type(part) is SwitchLinear and "bias" in part:
                part.__class__ = _OfRows


class _OfRows(SwitchLinear):
    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        if sorted_indices:
            # To another shape and back: MLX leaves an array that has the shape already as it is.
            x = x.reshape(-1, x.shape[-1]).reshape(x.shape)
        out: mx.array = super().__call__(x, indices, sorted_indices)
        return out
