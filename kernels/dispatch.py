"""Which kernels this process uses: those of the device on which MLX computes, or the plain ones."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from kernels import cpu, cuda, metal, plain
from kernels.cache_view import CacheView
from kernels.formats import Format

_native = True


class Backend(Protocol):
    """A module or object that has the codec and the attention. Its codec's tiles are canonical."""

    FORMATS: tuple[Format, ...]
    """What it has code for."""

    def encode(self, k: mx.array, v: mx.array, format: Format) -> mx.array: ...

    def decode(
        self, tiles: mx.array, head_dim: int, dtype: mx.Dtype, format: Format
    ) -> tuple[mx.array, mx.array]: ...

    def decode_attention(
        self, q: mx.array, view: CacheView, scale: float, sinks: mx.array | None
    ) -> mx.array: ...


def backend(format: Format = "int4c") -> Backend:
    """The backend of MLX's default device, or the plain one for a format that it has no code for."""
    native = _native_backend()
    return native if native and format in native.FORMATS else plain


def _native_backend() -> Backend | None:
    if not _native:
        return None
    if _on_cpu():
        return cpu.library()
    if cuda.available():
        return cuda
    return metal if metal.available() else None


def cpu_library() -> cpu.Library | None:
    """The C++ kernels, if that is where MLX computes and they could be built."""
    return cpu.library() if _native and _on_cpu() else None


def _on_cpu() -> bool:
    return bool(mx.default_device().type == mx.cpu)


def reads_device_order(format: Format = "int4c") -> bool:
    """Whether attention wants tiles in an order of its own."""
    return backend(format) is cuda


def disable_native() -> None:
    """Use the plain kernels from now on. Only before any tile is made: their order may differ."""
    global _native
    _native = False
