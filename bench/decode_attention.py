"""One step of decode attention over a long cache: int4c kernels beside what MLX and mlx-lm offer.

    python -m bench.decode_attention [--tokens 1024 131072] [--limit-s 20] [--kernels-only]

Every row is a chain of calls evaluated together, each call's queries the last one's output, over caches
that rotate so that none is found in a processor's own memory. *_wall_ms is that chain's time per call. Where
PyTorch is at hand on an NVIDIA machine, its profiler gives the sum of a call's kernel times, which *_ms
holds; elsewhere *_ms is wall time too. floor_ms: the bytes of K and V over the highest rate seen here, of a
copy or of our own kernels reading the longest cache. error: the largest difference from float32 on the same
codes, over the largest value. scratch_bytes: the most memory that one call took beside the cache, its own
result included. rows: query rows per KV head, batch rows over one prefix among them. Prints a table and one
JSON line; the line is kept in bench/results/decode_attention.<device>.json, and a plot beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # the float32 reference must be float32

import mlx.core as mx
from mlx_lm.models.base import quantized_scaled_dot_product_attention

import kernels
from bench import attention_plot
from bench.kernel_times import kernel_times, profiler
from bench.machine import ROOT, command, commit, result_path
from kernels import BLOCK_TOKENS, FORMATS, CacheView, Format, TileLayout, cuda, reference

TOKENS = [1024, 4096, 16384, 65536, 131072, 524288, 1048576]
NUM_SINKS, NUM_TAIL = 64, 64
ON_CUDA = cuda.available()
ON_GPU = mx.default_device() == mx.Device(mx.gpu)
DTYPE = mx.float16 if ON_GPU else mx.float32
CALLS = (200 if ON_CUDA else 40) if ON_GPU else 4
Step = Callable[[int, mx.array], mx.array]


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    batch: int = 1
    format: Format = "int4c"

    @property
    def rows(self) -> int:
        return self.batch * self.num_q_heads // self.num_kv_heads

    @property
    def tile_bytes(self) -> int:
        blocks = (self.num_tokens - NUM_SINKS - NUM_TAIL) // BLOCK_TOKENS
        return blocks * self.num_kv_heads * TileLayout(self.head_dim, self.format).tile_bytes

    @property
    def dense_bytes(self) -> int:
        return 4 * self.num_tokens * self.num_kv_heads * self.head_dim


def cases(tokens: list[int]) -> list[Case]:
    """Lengths for two common shapes; at 128K, or the longest asked for, other shapes, rows and formats."""
    long = 131072 if 131072 in tokens else max(tokens)
    rows = [Case(t, q, 8, 128) for t in tokens for q in (64, 32)]
    rows += [Case(long, 8, 8, 128)]
    rows += [Case(long, 64, 8, 128, batch) for batch in (2, 4, 8)]
    rows += [Case(long, 32, 8, head_dim) for head_dim in (64, 80, 96, 112, 192, 256)]
    rows += [Case(long, 64, 8, 64), Case(long, 64, 8, 64, 4), Case(long, 32, 8, 256, 4)]
    rows += [Case(long, 32, 8, 128, format=f) for f in FORMATS if f != "int4c"]
    return rows


def random_tiles(num_kv_heads: int, head_dim: int, num_blocks: int, format: Format = "int4c") -> mx.array:
    """Random codes: one stretch of 8 blocks repeated, which no kernel can tell."""
    few = min(8, num_blocks)
    k, v = (mx.random.normal((num_kv_heads, few * BLOCK_TOKENS, head_dim)).astype(DTYPE) for _ in "kv")
    tiles = kernels.encode(k, v, format)
    return mx.contiguous(mx.concatenate([tiles] * -(-num_blocks // few))[:num_blocks])


def make_view(case: Case) -> CacheView:
    """A cache of random numbers."""
    num_blocks = (case.num_tokens - NUM_SINKS - NUM_TAIL) // BLOCK_TOKENS

    def dense(*shape: int) -> mx.array:
        return mx.random.normal((*shape, case.head_dim)).astype(DTYPE)

    tiles = random_tiles(case.num_kv_heads, case.head_dim, num_blocks, case.format)
    sinks, tail = (case.num_kv_heads, NUM_SINKS), (case.batch, case.num_kv_heads, NUM_TAIL)
    view = CacheView(
        dense(*sinks), dense(*sinks), tiles, num_blocks, dense(*tail), dense(*tail), format=case.format
    )
    mx.eval(view.tiles, view.sinks_k, view.sinks_v, view.tail_k, view.tail_v)
    return view


def ours(q: mx.array, view: CacheView, scale: float) -> mx.array:
    return kernels.decode_attention(q, view, scale)


def error(case: Case, view: CacheView, q: mx.array) -> float:
    out = ours(q, view, case.head_dim**-0.5).astype(mx.float32)
    tiles = kernels.to_canonical(view.tiles, case.head_dim, case.format)
    canonical = replace(view, tiles=tiles)
    truth = reference.decode_attention(q, canonical, case.head_dim**-0.5)
    return float(mx.abs(out - truth).max() / mx.abs(truth).max())


def scratch_bytes(case: Case, view: CacheView, q: mx.array) -> int:
    mx.synchronize()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(ours(q, view, case.head_dim**-0.5))
    mx.synchronize()
    return max(0, mx.get_peak_memory() - before)


class Clock:
    """Times a chain of calls: wall time per call, and kernel time per call where a profiler can tell."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.kernels: dict[str, float] = {}  # of the last measurement, ms per call by kernel

    @property
    def name(self) -> str:
        return "CUPTI through PyTorch's profiler" if profiler() else "wall time"

    def __call__(self, step: Step, q: mx.array) -> tuple[float, float]:
        """(kernel ms or wall ms, wall ms) of one call, medians."""

        def chain(calls: int) -> float:
            start = time.perf_counter()
            x = q
            for i in range(calls):
                x = step(i, x)
            mx.eval(x)
            mx.synchronize()
            return (time.perf_counter() - start) / calls * 1e3

        chain(1)
        once = chain(2)
        calls = max(1, min(CALLS, int(self.limit_s * 200 / once)))
        wall = statistics.median(chain(calls) for _ in range(5 if once * calls < 500 else 1))
        few = min(calls, 40)
        return (self._kernels(lambda: chain(few), few) if profiler() else wall), wall

    def _kernels(self, run: Callable[[], Any], calls: int) -> float:
        times = kernel_times(run)
        # Medians, so that a call beside a clock change does not count.
        self.kernels = {n: statistics.median(t) * len(t) / calls / 1e3 for n, t in times.items()}
        return sum(self.kernels.values())


def copy_bandwidth(clock: Clock) -> float:
    """Bytes per second read and written by a copy far larger than any cache."""
    big = mx.random.normal(((1 << 29) if ON_GPU else (1 << 25),)).astype(DTYPE)
    mx.eval(big)
    ms, _ = clock(lambda i, x: x + 1, big)
    return 2 * big.nbytes / ms * 1e3


def read_bandwidth(clock: Clock, num_tokens: int) -> float:
    """Bytes of KV per second that one call of ours takes in over so many tokens."""
    case = Case(num_tokens, 32, 8, 128)
    views = [make_view(case) for _ in "ab"]
    q = mx.random.normal((1, 32, 1, 128)).astype(DTYPE)
    ms, _ = clock(lambda i, x: ours(x, views[i % 2], 0.1), q)
    mx.clear_cache()
    return case.tile_bytes / ms * 1e3


def measure(case: Case, clock: Clock, bandwidth: float, memory: float, kernels_only: bool) -> dict[str, Any]:
    scale, head_dim = case.head_dim**-0.5, case.head_dim
    copies = max(2, min(16, int(5e8 / (case.tile_bytes + 1)))) if ON_GPU else 2
    views = [make_view(case) for _ in range(copies)]
    q = mx.random.normal((case.batch, case.num_q_heads, 1, head_dim)).astype(DTYPE)
    mx.eval(q)
    row: dict[str, Any] = {
        "num_tokens": case.num_tokens,
        "num_q_heads": case.num_q_heads,
        "num_kv_heads": case.num_kv_heads,
        "head_dim": head_dim,
        "rows": case.rows,
        "format": case.format,
    }

    def step(i: int, x: mx.array) -> mx.array:
        return ours(x, views[i % copies], scale)

    row["ours_ms"], row["ours_wall_ms"] = clock(step, q)
    row["kernels_ms"] = dict(clock.kernels)
    dense = 2 * (NUM_SINKS + case.batch * NUM_TAIL) * case.num_kv_heads * head_dim * DTYPE.size
    row["floor_ms"] = (case.tile_bytes + dense) / bandwidth * 1e3
    # float32 K and V and as much again for scores and transposes
    row["error"] = error(case, views[0], q) if 6 * case.dense_bytes < memory else None
    row["scratch_bytes"] = scratch_bytes(case, views[0], q)
    views.clear()
    mx.clear_cache()
    others = dict.fromkeys(("mlx_sdpa_fp16", "mlx_lm_quantized", "dequantize_sdpa"))
    if not kernels_only and case.format == "int4c" and 8 * case.dense_bytes < memory:
        others = beside(case, clock)
    for name, times in others.items():
        row[f"{name}_ms"], row[f"{name}_wall_ms"] = times or (None, None)
    return row


def beside(case: Case, clock: Clock) -> dict[str, tuple[float, float] | None]:
    """MLX's own attention, batch rows as further query heads of the one prefix, which is the kindest way."""
    scale, head_dim = case.head_dim**-0.5, case.head_dim
    shape = (1, case.num_kv_heads, case.num_tokens, head_dim)
    copies = max(2, min(8, int(5e8 / case.dense_bytes)))
    pairs = [[mx.random.normal(shape).astype(DTYPE) for _ in range(2)] for _ in range(copies)]
    q = mx.random.normal((1, case.num_q_heads * case.batch, 1, head_dim)).astype(DTYPE)
    mx.eval(pairs, q)
    sdpa = mx.fast.scaled_dot_product_attention
    times: dict[str, tuple[float, float] | None] = dict.fromkeys(
        ("mlx_sdpa_fp16", "mlx_lm_quantized", "dequantize_sdpa")
    )

    def exact(i: int, x: mx.array) -> mx.array:
        return sdpa(x, *pairs[i % copies], scale=scale)

    times["mlx_sdpa_fp16"] = clock(exact, q)
    group = next((g for g in (64, 32) if head_dim % g == 0), None)
    if group is None:
        return times
    coded = [[mx.quantize(x, group_size=group, bits=4) for x in pair] for pair in pairs]
    mx.eval(coded)
    pairs.clear()
    mx.clear_cache()

    def quantized(i: int, x: mx.array) -> mx.array:
        # It scales its queries in place, so it gets a copy.
        return quantized_scaled_dot_product_attention(x * 1.0, *coded[i % copies], scale, None, group, 4)

    def dequantized(i: int, x: mx.array) -> mx.array:
        k, v = (mx.dequantize(*c, group_size=group, bits=4) for c in coded[i % copies])
        return sdpa(x, k, v, scale=scale)

    for name, step in (("mlx_lm_quantized", quantized), ("dequantize_sdpa", dequantized)):
        try:
            times[name] = clock(step, q)
        except RuntimeError as refused:  # MLX has no kernel for some head sizes on some devices
            print(f"{name} at head size {head_dim}: {refused}", file=sys.stderr)
    return times


def codec_rates(head_dim: int = 128, num_heads: int = 8, num_tokens: int = 32768) -> dict[str, float]:
    """Wall ms per layer of 32K tokens for encode, decode and the change of order."""
    k = mx.random.normal((num_heads, num_tokens, head_dim)).astype(DTYPE)
    backend = cuda if ON_CUDA else kernels
    tiles = backend.encode(k, k)
    mx.eval(k, tiles)
    steps: dict[str, Callable[[], Any]] = {
        "encode_ms": lambda: backend.encode(k, k),
        "decode_ms": lambda: backend.decode(tiles, head_dim, DTYPE),
    }
    if ON_CUDA:
        steps["to_device_order_ms"] = lambda: cuda.to_device_order(tiles, head_dim)
        steps["to_canonical_ms"] = lambda: cuda.to_canonical(tiles, head_dim)
    result = {"num_tokens": float(num_tokens)}
    for name, step in steps.items():
        mx.eval(step())
        start = time.perf_counter()
        for _ in range(5):
            mx.eval(step())
        result[name] = (time.perf_counter() - start) / 5 * 1e3
    return result


def host_cost() -> dict[str, float]:
    """Wall ms per call at 1K tokens: building the graph alone, and all of a call with many in flight."""
    case = Case(1024, 64, 8, 128)
    view = make_view(case)
    q = mx.random.normal((1, 64, 1, 128)).astype(DTYPE)
    mx.eval(ours(q, view, 0.1))
    calls, build, whole = 200 if ON_GPU else 10, [], []
    for _ in range(5):
        start = time.perf_counter()
        outs = [ours(q, view, 0.1) for _ in range(calls)]
        built = time.perf_counter()
        mx.eval(outs)
        mx.synchronize()
        build.append((built - start) / calls * 1e3)
        whole.append((time.perf_counter() - start) / calls * 1e3)
    return {"graph_ms": statistics.median(build), "call_ms": statistics.median(whole)}


def device_name() -> str:
    info = mx.device_info()
    return str(info.get("device_name") or platform.processor() or platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS if ON_GPU else [1024, 8192, 32768])
    parser.add_argument("--limit-s", type=float, default=5.0, help="about how long one measurement may take")
    parser.add_argument("--kernels-only", action="store_true", help="leave MLX's and mlx-lm's ways out")
    parser.add_argument("--memory-gb", type=float, default=100.0 if ON_CUDA else 12.0)
    parser.add_argument("--commit", default=commit())
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    clock = Clock(args.limit_s)
    copy, read = copy_bandwidth(clock), read_bandwidth(clock, max(args.tokens))
    bandwidth = max(copy, read)
    device = device_name()
    print(
        f"{device}: copy {copy / 1e9:.0f} GB/s, read {read / 1e9:.0f} GB/s, kernel times from {clock.name}",
        flush=True,
    )
    columns = ("ours", "ours_wall", "mlx_sdpa_fp16", "mlx_lm_quantized", "dequantize_sdpa", "floor")
    print(
        f"{'tokens':>8} {'q/kv':>6} {'D':>4} {'rows':>4} {'format':>8} "
        + " ".join(f"{c:>16}" for c in columns)
        + "     error  scratch KB"
    )
    result: dict[str, Any] = {
        "bench": "decode_attention",
        "machine": {
            "device": device,
            "system": platform.platform(),
            "copy_gb_s": copy / 1e9,
            "read_gb_s": read / 1e9,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("mlx", "mlx-lm")},
        },
        "command": command("decode_attention"),
        "commit": args.commit,
        "kernel_times": clock.name,
        "host": host_cost(),
        "codec": codec_rates(),
        "rows": [],
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path = result_path(args.out, "decode_attention", device)
    for case in cases(args.tokens):
        row = measure(case, clock, bandwidth, args.memory_gb * 1e9, args.kernels_only)
        result["rows"].append(row)
        path.write_text(json.dumps(result, indent=1) + "\n")
        cells = " ".join(f"{'-' if (n := row[f'{c}_ms']) is None else f'{n:.4f}':>16}" for c in columns)
        heads = f"{case.num_q_heads}/{case.num_kv_heads}"
        wrong = "-" if row["error"] is None else f"{row['error']:.1e}"
        print(
            f"{case.num_tokens:>8} {heads:>6} {case.head_dim:>4} {case.rows:>4} {case.format:>8} "
            f"{cells} {wrong:>9} {row['scratch_bytes'] / 1024:>10.0f}",
            flush=True,
        )
    plot = [
        row
        for row in result["rows"]
        if (row["num_q_heads"], row["head_dim"], row["rows"], row["format"]) == (64, 128, 8, "int4c")
    ]
    if len(plot) > 1:
        title = f"Decode attention on {device}, 64/8 heads, head size 128"
        attention_plot.write(path.with_suffix(".svg"), title, plot)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
