"""The KV formats on Apple GPUs: MLX kernels for attention and for the codec, on tiles in canonical order.

The kernels are text that MLX compiles at first use, once per head size, format, row class and dtypes.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import mlx.core as mx

from kernels.cache_view import CacheView
from kernels.formats import FORMATS, Format
from kernels.metal.launcher import Launcher, Plan

__all__ = [
    "FORMATS",
    "Launcher",
    "Plan",
    "available",
    "decode",
    "decode_attention",
    "encode",
    "launcher",
    "source_digest",
]


def available() -> bool:
    """Whether there is an Apple GPU that MLX can use."""
    return mx.metal.is_available()


@cache
def launcher() -> Launcher:
    """The kernels that this process uses, with the plan that they are launched by."""
    return Launcher(plan=Plan.for_architecture(str(mx.device_info()["architecture"])))


def source_digest() -> str:
    """Changes whenever a measured plan may no longer be the best: with the kernels and their launcher."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for source in sorted((*folder.glob("*.metal"), *folder.glob("*.py"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def decode_attention(q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None) -> mx.array:
    """As `kernels.decode_attention`, whose checks have passed."""
    return launcher().decode_attention(q, view, scale, sinks)


def encode(k: mx.array, v: mx.array, format: Format = "int4c") -> mx.array:
    """As `kernels.encode`."""
    return launcher().encode(k, v, format)


def decode(
    tiles: mx.array, head_dim: int, dtype: mx.Dtype = mx.float32, format: Format = "int4c"
) -> tuple[mx.array, mx.array]:
    """As `kernels.decode`."""
    return launcher().decode(tiles, head_dim, dtype, format)
