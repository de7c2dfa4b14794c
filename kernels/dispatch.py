"""Which kernels this process uses: those of the device on which MLX computes, or the plain ones."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from kernels import cpu, cuda, metal, plain
from kernels.cache_view import CacheView

_native = True


class Backend(Protocol):
    """A module or object that has the codec and the attention. Its codec's tiles are canonical."""

    def encode(self, k: mx.array, v: mx.array) -> mx.array: ...

    def decode(self, tiles: mx.array, head_dim: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]: ...

    def decode_attention(
        self, q: mx.array, view: CacheView, scale: float, sinks: mx.array | None
    ) -> mx.array: ...


def backend() -> Backend:
    """The backend of MLX's default device."""
    if library := cpu_library():
        return library
    if _native and mx.default_device() != mx.Device(mx.cpu):
        if cuda.available():
            return cuda
        if metal.available():
            return metal
    return plain


def cpu_library() -> cpu.Library | None:
    """The C++ kernels, if that is where MLX computes and they could be built."""
    return cpu.library() if _native and mx.default_device() == mx.Device(mx.cpu) else None


def reads_device_order() -> bool:
    """Whether attention wants tiles in an order of its own."""
    return backend() is cuda


def disable_native() -> None:
    """Use the plain kernels from now on. Only before any tile is made: their order may differ."""
    global _native
    _native = False
