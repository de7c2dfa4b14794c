"""NumPy's side of the arrays a kernel takes. NumPy has no bfloat16: its bits travel as uint16."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np


class BFloat16:
    """A bfloat16 array as its bits."""

    def __init__(self, x: Any) -> None:
        x = np.asarray(x)
        if x.dtype != np.uint16:
            u = np.ascontiguousarray(x, np.float32).view(np.uint32)
            x = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
        self.bits: np.ndarray = x
        self.shape, self.size, self.ndim = x.shape, x.size, x.ndim

    def float(self) -> np.ndarray:
        return (self.bits.astype(np.uint32) << 16).view(np.float32)


Array = np.ndarray | BFloat16


def to_numpy(a: Any) -> Array:
    """An MLX array, a NumPy array or a Python number as a kernel's input."""
    if isinstance(a, BFloat16):
        return a
    if isinstance(a, mx.array):
        return BFloat16(np.array(a.view(mx.uint16))) if a.dtype == mx.bfloat16 else np.array(a)
    if isinstance(a, bool):
        return np.asarray(a, np.bool_)
    if isinstance(a, int | float):
        return np.asarray(a, np.int32 if isinstance(a, int) else np.float32)
    return np.asarray(a)


def bits_of(a: Array) -> np.ndarray:
    return a.bits if isinstance(a, BFloat16) else a


def mlx_dtype(a: Array) -> mx.Dtype:
    if isinstance(a, BFloat16):
        return mx.bfloat16
    return mx.bool_ if a.dtype == bool else getattr(mx, a.dtype.name)


def numpy_dtype(dtype: mx.Dtype) -> np.dtype:
    """The type whose bits an output of `dtype` has."""
    if dtype == mx.bfloat16:
        return np.dtype(np.uint16)
    return np.dtype(np.bool_ if dtype == mx.bool_ else str(dtype).split(".")[-1])
