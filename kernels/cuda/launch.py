"""Kernel text to MLX kernels: one builder per launch. Knows argument lists, not what they mean to attention.

The texts are included by path, so that the string MLX hashes on every call stays short.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle
from pathlib import Path

import mlx.core as mx
import numpy as np

from kernels.cuda.plan import Build, Simple, Tensor
from kernels.formats import Format, TileLayout, rotation

COMBINE_THREADS = 256
Kernel = Callable[..., list[mx.array]]

_FOLDER = Path(__file__).resolve().parent
_C_TYPES = {mx.float16: "__half", mx.bfloat16: "__nv_bfloat16", mx.float32: "float"}


@cache
def _head(head_dim: int, format: Format, file: str) -> str:
    """The defines of common.cuh and the include of a kernel's text."""
    layout = TileLayout(head_dim, format)
    outer = head_dim
    while outer % 2 == 0:
        outer //= 2
    outer *= 1 if outer == 1 else 4  # H is H_outer x H_inner with outer 1, 12, 20 or 28
    inner = head_dim // outer
    matrix = np.array(mx.hadamard_transform(mx.eye(head_dim, stream=mx.cpu), stream=mx.cpu)) < 0
    signs = (np.array(rotation(head_dim)) < 0)[:, 0] ^ matrix[:, 0]

    def words(bits: np.ndarray) -> str:
        padded = np.resize(np.append(bits, np.zeros(-len(bits) % 32, bool)), (-(-len(bits) // 32), 32))
        return ",".join(f"{sum(1 << i for i in np.flatnonzero(row)):#x}u" for row in padded)

    rows = ",".join(words(row) for row in matrix[::inner, ::inner])
    return (
        f"#define LONGLEAF_D {head_dim}\n#define LONGLEAF_INNER {inner}\n"
        f"#define LONGLEAF_K_BITS {layout.k_bits}\n#define LONGLEAF_V_BITS {layout.v_bits}\n"
        f"#define LONGLEAF_AFFINE {int(not layout.rotated)}\n"
        f"#define LONGLEAF_SIGNS {{{words(signs)}}}\n#define LONGLEAF_OUTER {{{rows}}}\n"
        f'#include "{(_FOLDER / file).as_posix()}"\n'
    )


def _kernel(
    name: str,
    head: str,
    body: str,
    inputs: list[str],
    outputs: list[str],
    *,
    threads: int,
    per_sm: int,
    shared: int = 0,
) -> Kernel:
    """A kernel with launch bounds, which MLX's generated signature has no place for."""
    symbol = f"custom_kernel_{name}"
    built: Kernel = mx.fast.cuda_kernel(  # type: ignore[assignment]
        name=name,
        input_names=inputs,
        output_names=outputs,
        source=f"#undef {symbol}\n{body}",
        header=f"{head}#define {symbol} __launch_bounds__({threads}, {per_sm}) {symbol}\n",
        ensure_row_contiguous=False,
        shared_memory=shared,
    )
    return built


def _strided(c_type: str, name: str, axes: str) -> str:
    """A `Strided` of an MLX array; `axes` names its axes out of b, h, n and d."""
    strides = ", ".join(f"{name}_strides[{axes.index(a)}]" if a in axes else "0" for a in "bhnd")
    return f"::longleaf::Strided<{c_type}>{{{name}, {strides}}}"


def _call(build: Build, layout: TileLayout, c_type: str, logits: mx.Dtype | None) -> tuple[str, str, str]:
    """The name of a build, the file its text is in, and the statement that runs it on `call`."""
    arguments = "call, ::longleaf::Cut(cut_shape), smem, po, pl"
    match build:
        case Simple():
            run = f"::longleaf::simple_split<{c_type}>({arguments});"
            return "simple", "simple.cuh", run
        case Tensor():
            of_logits = _C_TYPES[logits] if logits else "float"
            if build.merges:
                arguments += f", (::longleaf::u32*)counters, {'logits' if logits else 'nullptr'}, out"
            else:
                arguments += f", nullptr, (const {of_logits}*)nullptr, ({c_type}*)nullptr"
            sizes = f"{build.row_tiles}, {build.warps}, {build.stages}"
            flags = f"{int(build.queries_shared)}, {int(build.bulk)}"
            same = f"static_assert(::longleaf::Shared<{sizes}>::BYTES == {build.shared_bytes(layout)});"
            run = f"::longleaf::split<{c_type}, {of_logits}, {sizes}, {flags}>({arguments});"
            return f"split_{sizes.replace(', ', '_')}", "split.cuh", f"{same}\n{run}"


@cache
def split_kernel(
    head_dim: int,
    format: Format,
    dtype: mx.Dtype,
    build: Build,
    scale: float,
    window: int,
    has_sinks: bool,
    has_tiles: bool,
    has_lengths: bool,
    logits: mx.Dtype | None,
) -> Kernel:
    """The first launch: cut, q, tail_k, tail_v [, sinks_k, sinks_v] [, tiles] [, lengths] → po, pl.

    Where the build merges them itself: ... [, counters] [, logits] → po, pl, out.
    """
    t = _C_TYPES[dtype]
    sinks_k, sinks_v = ("sinks_k", "sinks_v") if has_sinks else ("tail_k", "tail_v")
    axes = "hnd" if has_sinks else "bhnd"
    layout = TileLayout(head_dim, format)
    name, file, run = _call(build, layout, t, logits)
    body = f"""extern __shared__ __align__(128) unsigned char smem[];
const ::longleaf::Call<{t}> call = {{
  {_strided(t, "q", "bhnd")},
  {_strided(t, sinks_k, axes)}, {_strided(t, sinks_v, axes)},
  {_strided(t, "tail_k", "bhnd")}, {_strided(t, "tail_v", "bhnd")},
  {"tiles, tiles_strides[0], tiles_strides[1]" if has_tiles else "nullptr, 0, 0"},
  {"lengths" if has_lengths else "nullptr"},
  q_shape[0], tail_k_shape[1], q_shape[1] / tail_k_shape[1], q_shape[2],
  {"sinks_k_shape[1]" if has_sinks else "0"}, tail_k_shape[2],
  {window}, {scale * 1.4426950408889634:.9e}f}};
{run}"""
    inputs = ["cut", "q", "tail_k", "tail_v"]
    inputs += ["sinks_k", "sinks_v"] if has_sinks else []
    inputs += ["tiles"] if has_tiles else []
    inputs += ["lengths"] if has_lengths else []
    outputs = ["po", "pl"]
    if build.merges:
        inputs += ["counters", "logits"] if logits else ["counters"]
        outputs += ["out"]
    return _kernel(
        f"longleaf_{name}_{head_dim}_{format}",
        _head(head_dim, format, file),
        body,
        inputs,
        outputs,
        threads=build.threads,
        per_sm=build.per_sm,
        shared=build.shared_bytes(layout),
    )


@cache
def numbers(shape: tuple[int, ...]) -> mx.array:
    """An array that only carries its shape: numbers that reach a kernel by value and compile nothing anew."""
    carrier = mx.broadcast_to(mx.array(0, dtype=mx.float32), shape)
    mx.eval(carrier)
    return carrier


class _Counters(threading.local):
    def __init__(self) -> None:
        self.rings: dict[int, Iterator[mx.array]] = {}


_counters = _Counters()


def counters(num: int) -> mx.array:
    """At least `num` zeros that a launch may count in, if it leaves zeros behind.

    A graph's launches may run at once, graphs run one after another: so a thread takes turns among more
    arrays than MLX puts launches into a graph.
    """
    size = max(64, 1 << (num - 1).bit_length())
    if size not in _counters.rings:
        turns = max(128, 2 * int(os.environ.get("MLX_MAX_OPS_PER_BUFFER", 0)))
        ring = [mx.array(np.zeros(size, np.uint32)) for _ in range(turns)]
        mx.eval(ring)
        _counters.rings[size] = cycle(ring)
    return next(_counters.rings[size])


@cache
def combine_kernel(head_dim: int, format: Format, dtype: mx.Dtype, logits: mx.Dtype | None) -> Kernel:
    """The second launch: po (H, partials, B, group, Sq, D), pl [, logits] → out."""
    body = (
        f"::longleaf::combine<{_C_TYPES[dtype]}, {_C_TYPES[logits] if logits else 'float'}>(po, pl, "
        f"{'logits' if logits else 'nullptr'}, out, po_shape[1], po_shape[2] * po_shape[3] * po_shape[4], "
        "po_shape[3], po_shape[4]);"
    )
    inputs = ["po", "pl", "logits"] if logits else ["po", "pl"]
    name = f"longleaf_combine_{head_dim}_{format}"
    head = _head(head_dim, format, "combine.cuh")
    return _kernel(name, head, body, inputs, ["out"], threads=COMBINE_THREADS, per_sm=1)


@cache
def encode_kernel(head_dim: int, format: Format, dtype: mx.Dtype) -> Kernel:
    """k, v (H, 128 * NB, D) → tiles."""
    t = _C_TYPES[dtype]
    body = f"::longleaf::encode<{t}>({_strided(t, 'k', 'hnd')}, {_strided(t, 'v', 'hnd')}, tiles);"
    name, head = f"longleaf_encode_{head_dim}_{format}", _head(head_dim, format, "codec.cuh")
    return _kernel(name, head, body, ["k", "v"], ["tiles"], threads=256, per_sm=1)


@cache
def decode_kernel(head_dim: int, format: Format, dtype: mx.Dtype) -> Kernel:
    """tiles → k, v (H, 128 * NB, D)."""
    body = f"::longleaf::decode<{_C_TYPES[dtype]}>(tiles, k, v);"
    name, head = f"longleaf_decode_{head_dim}_{format}", _head(head_dim, format, "codec.cuh")
    return _kernel(name, head, body, ["tiles"], ["k", "v"], threads=256, per_sm=1)


@cache
def reorder_kernel(head_dim: int, format: Format, to_device: bool) -> Kernel:
    """tiles → tiles in the other order."""
    tile_bytes = TileLayout(head_dim, format).tile_bytes
    body = (
        "extern __shared__ __align__(128) unsigned char smem[];\n"
        f"static_assert(::longleaf::TILE == {tile_bytes});\n"
        f"::longleaf::reorder<{'true' if to_device else 'false'}>(tiles, out, smem);"
    )
    name = f"longleaf_{'to' if to_device else 'from'}_device_order_{head_dim}_{format}"
    head = _head(head_dim, format, "codec.cuh")
    shared = tile_bytes // 2  # two slices, with the mean of the tile to spare
    return _kernel(name, head, body, ["tiles"], ["out"], threads=256, per_sm=1, shared=shared)
