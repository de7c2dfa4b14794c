"""The KV formats on the CPU: the attention and the codec of this package in C++, on MLX's own buffers.

Knows how arrays are handed over; the arithmetic is in attention.h and codec.h, the cutting and the
threads in longleaf.cpp. Arguments and results are those of the plain versions, checked by the caller.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kernels.cache_view import CacheView
from kernels.cpu.build import BuildError
from kernels.cpu.build import library as build_library
from kernels.formats import (
    BLOCK_TOKENS,
    FORMATS,
    Format,
    TileLayout,
    layout_of_blocks,
    layout_of_tiles,
    rotation,
)

_DTYPES = {mx.float32: 0, mx.float16: 1, mx.bfloat16: 2}


class _Tensor(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64 * 3), ("dtype", ctypes.c_int32))


class _Coding(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("k_bits", "v_bits", "rotated"))


class _Attention(ctypes.Structure):
    _fields_ = (
        *((name, _Tensor) for name in ("q", "sinks_k", "sinks_v", "tail_k", "tail_v", "out")),
        *((name, ctypes.c_void_p) for name in ("tiles", "tail_lengths", "sink_logits")),
        *((name, ctypes.c_void_p) for name in ("rotation", "rotation_transposed")),
        *((n, ctypes.c_int32) for n in ("batch", "num_q_heads", "num_kv_heads", "num_queries", "head_dim")),
        *((n, ctypes.c_int32) for n in ("num_sinks", "num_blocks", "num_tail", "window")),
        ("coding", _Coding),
        ("scale", ctypes.c_float),
    )


class _Prefill(ctypes.Structure):
    _fields_ = (
        *((name, _Tensor) for name in ("q", "out", "k", "v")),
        *((n, ctypes.c_int32) for n in ("num_q_heads", "num_kv_heads", "num_queries", "num_tokens")),
        ("head_dim", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


class _Recode(ctypes.Structure):
    _fields_ = (
        ("k", _Tensor),
        ("v", _Tensor),
        *((name, ctypes.c_void_p) for name in ("tiles", "rotation", "rotation_transposed")),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "num_blocks", "head_dim")),
        ("coding", _Coding),
    )


class Library:
    """The loaded library with the instruction set and the number of threads that its calls take."""

    FORMATS: tuple[Format, ...] = FORMATS

    def __init__(self, path: str | os.PathLike[str], threads: int | None = None, isa: str = "") -> None:
        """
        Args:
            path: the shared library.
            threads: default: as many as this process has cores.
            isa: `avx512`, `avx2` or `baseline`; default: the best that the processor has.

        Raises:
            ValueError: if the processor lacks the instruction set.
        """
        self._lib = ctypes.CDLL(os.fspath(path))
        self._lib.longleaf_instruction_set.restype = ctypes.c_void_p
        self._lib.longleaf_name.restype = ctypes.c_char_p
        found = self._lib.longleaf_instruction_set(isa.encode())
        if found is None:
            raise ValueError(f"this processor lacks the instruction set {isa!r}")
        self._set = ctypes.c_void_p(found)
        self.isa: str = self._lib.longleaf_name(self._set).decode()
        self.threads = threads or _num_cores()

    def decode_attention(
        self, q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """As `kernels.decode_attention`, the result in q's dtype. Evaluates what it reads."""
        batch, num_q_heads, num_queries, head_dim = q.shape
        num_kv_heads, num_sinks = view.sinks_k.shape[:2]
        logits = None if sinks is None else sinks.astype(mx.float32)
        lengths = view.tail_lengths
        lengths = None if lengths is None else lengths.astype(mx.int32)
        tiles = view.tiles[: view.num_blocks]
        dense = [_plain(x) for x in (q, view.sinks_k, view.sinks_v, view.tail_k, view.tail_v)]
        mx.eval(*dense, tiles, *(x for x in (logits, lengths) if x is not None))
        out = np.empty(q.shape, _numpy_dtype(dense[0].dtype))
        held = _Held()
        job = _Attention(
            *(held.tensor(x) for x in dense),
            held.raw(out, _DTYPES[dense[0].dtype]),
            held.packed(tiles),
            None if lengths is None else held.packed(lengths),
            None if logits is None else held.packed(logits),
            *_rotation_pointers(head_dim),
            batch,
            num_q_heads,
            num_kv_heads,
            num_queries,
            head_dim,
            num_sinks,
            view.num_blocks,
            view.tail_k.shape[2],
            view.window or 0,
            _coding(TileLayout(head_dim, view.format)),
            scale,
        )
        self._call(self._lib.longleaf_attend, job)
        result = mx.array(out)
        return result.view(mx.bfloat16) if dense[0].dtype == mx.bfloat16 else result

    def prefill_attention(self, q: mx.array, k: mx.array, v: mx.array, scale: float) -> mx.array:
        """As `kernels.prefill_attention`, for what `takes` says. Evaluates what it reads.

        The result lies in memory token by token, as the projection that follows reads it.
        """
        _, num_q_heads, num_queries, head_dim = q.shape
        num_kv_heads, num_tokens = k.shape[1:3]
        out = mx.zeros((1, num_queries, num_q_heads, head_dim))
        mx.eval(q, k, v, out)
        held = _Held()
        job = _Prefill(
            held.tensor(q),
            held.raw(_numpy(out).swapaxes(1, 2), _DTYPES[mx.float32]),
            held.tensor(k),
            held.tensor(v),
            num_q_heads,
            num_kv_heads,
            num_queries,
            num_tokens,
            head_dim,
            scale,
        )
        self._call(self._lib.longleaf_prefill, job)
        return out.swapaxes(1, 2)

    @staticmethod
    def takes(q: mx.array, k: mx.array, v: mx.array) -> bool:
        """Whether `prefill_attention` has code for these: one sequence in float32, whole vectors."""
        return q.shape[0] == 1 and q.shape[3] % 16 == 0 and {q.dtype, k.dtype, v.dtype} == {mx.float32}

    def encode(self, k: mx.array, v: mx.array, format: Format = "int4c") -> mx.array:
        """As `kernels.encode`."""
        layout, num_blocks = layout_of_blocks(k, v, format), k.shape[1] // BLOCK_TOKENS
        k, v = _plain(k), _plain(v)
        tiles = mx.zeros((num_blocks, k.shape[0], layout.tile_words), dtype=mx.uint32)
        mx.eval(k, v, tiles)
        self._recode(self._lib.longleaf_encode, k, v, tiles, layout)
        return tiles

    def decode(
        self, tiles: mx.array, head_dim: int, dtype: mx.Dtype = mx.float32, format: Format = "int4c"
    ) -> tuple[mx.array, mx.array]:
        """As `kernels.decode`."""
        layout = layout_of_tiles(tiles, head_dim, format)
        num_blocks, num_heads = tiles.shape[:2]
        stored = dtype if dtype in _DTYPES else mx.float32
        k, v = (mx.zeros((num_heads, num_blocks * BLOCK_TOKENS, head_dim), dtype=stored) for _ in "kv")
        mx.eval(k, v, tiles)
        self._recode(self._lib.longleaf_decode, k, v, tiles, layout)
        return k.astype(dtype), v.astype(dtype)

    def _recode(self, call: object, k: mx.array, v: mx.array, tiles: mx.array, layout: TileLayout) -> None:
        held = _Held()
        num_blocks, num_heads = tiles.shape[:2]
        if not tiles.size:
            return
        job = _Recode(
            held.tensor(k),
            held.tensor(v),
            held.packed(tiles),
            *_rotation_pointers(layout.head_dim),
            num_heads,
            num_blocks,
            layout.head_dim,
            _coding(layout),
        )
        self._call(call, job)

    def _call(self, function: object, job: ctypes.Structure) -> None:
        code = function(ctypes.byref(job), self._set, self.threads)  # type: ignore[operator]
        if code:
            raise MemoryError("no memory for the scratch of the CPU kernels")


class _Held:
    """Pointers into MLX's buffers, and the views that keep them alive during a call."""

    def __init__(self) -> None:
        self._views: list[npt.NDArray[np.generic]] = []

    def raw(self, view: npt.NDArray[np.generic], dtype: int) -> _Tensor:
        if view.strides[-1] != view.itemsize:
            view = np.ascontiguousarray(view)
        self._views.append(view)
        strides = [0] * (4 - view.ndim) + [s // view.itemsize for s in view.strides[:-1]]
        return _Tensor(_pointer(view), (ctypes.c_int64 * 3)(*strides), dtype)

    def tensor(self, x: mx.array) -> _Tensor:
        """An evaluated array, copied only if its last axis isn't contiguous."""
        return self.raw(_numpy(x), _DTYPES[x.dtype])

    def packed(self, x: mx.array) -> int:
        """An evaluated array, copied only if it isn't contiguous."""
        view = np.ascontiguousarray(_numpy(x))
        self._views.append(view)
        return _pointer(view)


def _numpy(x: mx.array) -> npt.NDArray[np.generic]:
    """An evaluated array's memory, not a copy. numpy has no bfloat16, so those are seen as uint16."""
    if x.dtype == mx.bfloat16:
        x = x.view(mx.uint16)
        mx.eval(x)
    return np.array(x, copy=False)


def _pointer(x: npt.NDArray[np.generic]) -> int:
    address: int = x.__array_interface__["data"][0]
    return address


def _numpy_dtype(dtype: mx.Dtype) -> npt.DTypeLike:
    return np.dtype({mx.float32: np.float32, mx.float16: np.float16}.get(dtype, np.uint16))


def _plain(x: mx.array) -> mx.array:
    """x as it is if its dtype is one of the three, else in float32."""
    return x if x.dtype in _DTYPES else x.astype(mx.float32)


@cache
def _rotations(head_dim: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    layout = TileLayout(head_dim)
    if layout.group_size % 8 or layout.group_size * layout.num_groups != head_dim:
        raise ValueError(
            f"head size {head_dim} has no int4c form: {layout.num_groups} equal groups of whole words "
            "do not make it"
        )
    forward = np.array(rotation(head_dim))
    return forward, np.ascontiguousarray(forward.T)


def _rotation_pointers(head_dim: int) -> tuple[int, int]:
    forward, backward = _rotations(head_dim)
    return _pointer(forward), _pointer(backward)


def _coding(layout: TileLayout) -> _Coding:
    return _Coding(layout.k_bits, layout.v_bits, layout.rotated)


def _num_cores() -> int:
    named = os.environ.get("LONGLEAF_CPU_THREADS")
    if named is not None:
        if not named.isdigit() or int(named) < 1:
            raise ValueError(f"LONGLEAF_CPU_THREADS is {named!r}: expected a whole number from 1 up")
        return int(named)
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


@cache
def library() -> Library | None:
    """The library for this machine, built at first use; None, after one warning, if it can't be had."""
    try:
        return Library(build_library())
    except (BuildError, OSError) as error:
        warnings.warn(
            "Attention on the CPU runs on MLX's own operations, many times slower: "
            f"{error}. Install the ziglang package or a C++ compiler to mend it.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
