"""Launches the Metal kernels: decode attention, encode, decode. Knows arrays and grids, no device.

`*.metal` files of one noun are headers; the four that hold a kernel's body (split, combine, encode, decode)
get their signature from MLX. Templates are compiled per head size, format, row class and dtypes only: every
length is a number in a buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kernels.cache_view import CacheView
from kernels.formats import BLOCK_TOKENS, Format, TileLayout, layout_of_blocks, layout_of_tiles, rotation

THREADS = 128
"""Threads of a `split` threadgroup: four simdgroups."""
CODEC_THREADS = 256
DENSE_TOKENS = 256
"""Tokens of a dense part that one threadgroup takes, unless they would make too many splits."""
MAX_SPLITS = 256
"""Partials of a row that `combine` weighs: half of them for blocks at most, a quarter for each dense part."""
ROW_CLASSES = (2, 4, 8, 16, 32)
_MAX_ROW_FLOATS = 4096
"""Query numbers that a threadgroup keeps: 16 KB, so that two fit a core's 32 KB and more."""

MakeKernel = Callable[..., Any]
"""`mx.fast.metal_kernel`, or what behaves like it."""


@dataclass(frozen=True)
class Plan:
    """What may be tuned per device: how many threadgroups a launch aims at, and the most splits of a row."""

    threadgroups: int = 256
    max_splits: int = 64

    @staticmethod
    def for_architecture(architecture: str) -> Plan:
        """The default before tuning, from `mx.device_info()["architecture"]`: an Ultra has twice the cores
        of a Max."""
        return Plan(threadgroups=512 if architecture.endswith("d") else 256)

    @staticmethod
    def candidates() -> list[Plan]:
        """What an autotuner should time. Any of them gives right results."""
        return [Plan(t, s) for t in (128, 256, 512, 1024) for s in (32, 64, 128)]

    def num_splits(self, num_blocks: int, threadgroups_per_split: int) -> int:
        wanted = max(1, self.threadgroups // threadgroups_per_split)
        return min(num_blocks, wanted, self.max_splits, MAX_SPLITS // 2)


class Launcher:
    """The four kernels, made by `make_kernel`."""

    def __init__(self, make_kernel: MakeKernel = mx.fast.metal_kernel, plan: Plan | None = None) -> None:
        self.plan = plan or Plan()
        attention = _sources("rotation", "tile", "work", "split_vector", "split_matrix")
        codec = _sources("rotation", "tile", "codec")
        self._split = make_kernel(
            name="longleaf_split",
            input_names=[
                *("q", "tiles", "sinks_k", "sinks_v", "tail_k", "tail_v"),
                *("tail_lengths", "sizes", "rotation", "scale"),
            ],
            output_names=["partial", "lse"],
            header=attention,
            source=_sources("split"),
        )
        self._combine = make_kernel(
            name="longleaf_combine",
            input_names=["partial", "lse", "logits", "sizes", "rotation"],
            output_names=["out"],
            header=f"constant constexpr int MAX_SPLITS = {MAX_SPLITS};\n" + _sources("rotation"),
            source=_sources("combine"),
        )
        self._encode = make_kernel(
            name="longleaf_encode",
            input_names=["k", "v", "rotation"],
            output_names=["tiles"],
            header=codec,
            source=_sources("encode"),
        )
        self._decode = make_kernel(
            name="longleaf_decode",
            input_names=["tiles", "rotation"],
            output_names=["k", "v"],
            header=codec,
            source=_sources("decode"),
        )

    def decode_attention(
        self, q: mx.array, view: CacheView, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """As `kernels.decode_attention`, whose checks have passed. Two launches.

        Arrays that aren't row-contiguous are copied by MLX: pass whole buffers and lengths, not slices.
        """
        batch, num_q_heads, num_queries, head_dim = q.shape
        num_kv_heads, num_sinks = view.sinks_k.shape[:2]
        num_tail = view.tail_k.shape[2]
        layout = TileLayout(head_dim, view.format)
        num_rows = batch * num_q_heads * num_queries // num_kv_heads
        rows = row_class(num_rows, head_dim)
        shared_tiles = -(-num_rows // rows)
        tail_tiles = -(-(num_rows // batch) // rows)

        sink_splits = min(-(-num_sinks // DENSE_TOKENS), MAX_SPLITS // 4)
        tail_splits = min(-(-num_tail // DENSE_TOKENS), MAX_SPLITS // 4)
        block_splits = self.plan.num_splits(view.num_blocks, num_kv_heads * shared_tiles)
        num_splits = block_splits + sink_splits + tail_splits
        lengths = view.tail_lengths
        sizes = _sizes(
            *(view.num_blocks, block_splits, num_sinks, sink_splits, num_tail, tail_splits),
            *(view.window or 0, lengths is not None, sinks is not None, num_queries, num_q_heads),
            block_splits if layout.rotated else 0,
        )
        dense = view.tail_k.dtype
        # Buffers of no elements have no address: an array that is there stands in for them, and isn't read.
        sinks_k, sinks_v = (view.sinks_k, view.sinks_v) if num_sinks else (view.tail_k, view.tail_v)
        table = rotation_table(head_dim)
        partial, lse = self._split(
            inputs=[
                *(q, view.tiles if view.tiles.size else table),
                *(x.astype(dense) for x in (sinks_k, sinks_v, view.tail_k, view.tail_v)),
                *(sizes if lengths is None else lengths.astype(mx.int32), sizes, table, float(scale)),
            ],
            template=[("T", q.dtype), ("C", dense), *_coding(layout), ("ROWS", rows)],
            grid=(
                THREADS * ((block_splits + sink_splits) * shared_tiles + batch * tail_splits * tail_tiles),
                num_kv_heads,
                1,
            ),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[
                (batch * num_q_heads * num_queries, num_splits, head_dim),
                (batch * num_q_heads * num_queries, num_splits),
            ],
            output_dtypes=[mx.float32, mx.float32],
        )
        threads = -(-head_dim // 32) * 32
        out: mx.array
        (out,) = self._combine(
            inputs=[partial, lse, lse if sinks is None else sinks, sizes, table],
            template=[("T", q.dtype), ("D", head_dim)],
            grid=(threads * batch * num_q_heads * num_queries, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[q.shape],
            output_dtypes=[q.dtype],
        )
        return out

    def encode(self, k: mx.array, v: mx.array, format: Format = "int4c") -> mx.array:
        """As `kernels.encode`. One launch."""
        num_heads, num_tokens, head_dim = k.shape
        layout, num_blocks = layout_of_blocks(k, v, format), num_tokens // BLOCK_TOKENS
        if num_blocks == 0:
            return mx.zeros((0, num_heads, layout.tile_words), dtype=mx.uint32)
        tiles: mx.array
        (tiles,) = self._encode(
            inputs=[k, v, rotation_table(head_dim)],
            template=_coding(layout),
            grid=(CODEC_THREADS * num_blocks, num_heads, 2),
            threadgroup=(CODEC_THREADS, 1, 1),
            output_shapes=[(num_blocks, num_heads, layout.tile_words)],
            output_dtypes=[mx.uint32],
        )
        return tiles

    def decode(
        self, tiles: mx.array, head_dim: int, dtype: mx.Dtype = mx.float32, format: Format = "int4c"
    ) -> tuple[mx.array, mx.array]:
        """As `kernels.decode`. One launch."""
        layout = layout_of_tiles(tiles, head_dim, format)
        num_blocks, num_heads = tiles.shape[:2]
        shape = (num_heads, num_blocks * BLOCK_TOKENS, head_dim)
        if num_blocks == 0:
            return mx.zeros(shape, dtype=dtype), mx.zeros(shape, dtype=dtype)
        k, v = self._decode(
            inputs=[tiles, rotation_table(head_dim)],
            template=[("T", dtype), *_coding(layout)],
            grid=(CODEC_THREADS * num_blocks, num_heads, 2),
            threadgroup=(CODEC_THREADS, 1, 1),
            output_shapes=[shape, shape],
            output_dtypes=[dtype, dtype],
        )
        return k, v


def _coding(layout: TileLayout) -> list[tuple[str, Any]]:
    """The template arguments of tile.metal's Tile."""
    bits = (("K_BITS", layout.k_bits), ("V_BITS", layout.v_bits))
    return [("D", layout.head_dim), *bits, ("AFFINE", not layout.rotated)]


def row_class(num_rows: int, head_dim: int) -> int:
    """How many query rows of a KV head one threadgroup takes: the template's ROWS."""
    padded = -(-head_dim // 32) * 32
    fitting = [rows for rows in ROW_CLASSES if rows * padded <= _MAX_ROW_FLOATS]
    return next((rows for rows in fitting if rows >= num_rows), fitting[-1])


@cache
def rotation_table(head_dim: int) -> mx.array:
    """The signs of `formats.rotation` as rotation.metal reads them, (80,) uint32."""
    hadamard = np.array(mx.hadamard_transform(mx.eye(head_dim)))
    signs = np.array(rotation(head_dim))[:, 0] * hadamard[:, 0] < 0
    odd = {1: 1, 3: 12, 5: 20, 7: 28}[head_dim // (head_dim & -head_dim)]
    base = hadamard[:: head_dim // odd, :: head_dim // odd] < 0  # H = base ⊗ H_k
    table = np.zeros(80, np.uint32)
    table[:16] = _bits(signs[None], 512).view(np.uint32)
    table[16 : 16 + odd] = _bits(base.T, 32).view(np.uint32)[:, 0]
    table[48 : 48 + odd] = _bits(base, 32).view(np.uint32)[:, 0]
    array = mx.array(table)
    mx.eval(array)
    return array


@lru_cache(maxsize=64)
def _sizes(*numbers: int) -> mx.array:
    """The lengths as a buffer. The layers of a step share one."""
    array = mx.array(numbers, dtype=mx.int32)
    mx.eval(array)
    return array


def _bits(rows: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """(n, m) bool → (n, width / 8) uint8, element 0 in the lowest bit."""
    padded = np.zeros((rows.shape[0], width), bool)
    padded[:, : rows.shape[1]] = rows
    return np.packbits(padded, axis=1, bitorder="little")


def _sources(*names: str) -> str:
    folder = Path(__file__).parent
    return "\n".join((folder / f"{name}.metal").read_text() for name in names)
