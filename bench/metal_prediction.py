"""PREDICTED time of decode attention per layer on Apple GPUs, from counts and published rates; not measured.

    python -m bench.metal_prediction        a minute or two; writes bench/results/metal_prediction.json

The kernels run on the emulated grid (tests/metal), which counts what they do: bytes, loads, collective
operations, arithmetic. Two contexts give what a block costs and what a split costs before its first block.
The rates are those that public microbenchmarks of M1 GPUs report (philipturner/metal-benchmarks), and Apple's
and others' figures for cores, clock and bandwidth; where nobody published one it is an assumption, marked so.
What is left out: registers and occupancy, caches, latency, launches, clock changes. On a Mac run
bench/decode_attention.py, which measures.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from kernels import BLOCK_TOKENS, FORMATS, CacheView, Format, TileLayout, codec
from kernels.metal import Launcher, Plan
from kernels.metal.launcher import row_class
from tests.metal.as_mlx import EmulatedMetal
from tests.metal.emulator.counts import SIMD_WIDTH, count_arithmetic

RESULT = Path(__file__).parent / "results" / "metal_prediction.json"
NUM_TOKENS = 131_072
SCHEDULERS = 4
"""Simdgroup instructions that a core starts per cycle: 128 lanes."""
REACHED = 0.85
"""ASSUMPTION: the share of peak arithmetic or bandwidth that a well-fed kernel reaches."""

# Cycles for which one of a core's four schedulers is busy. Shifts, conversions and exp2 have a pipeline of
# their own: 4 cycles alone, but 4.84 for one beside three plain instructions, and we have ten plain for each.
PLAIN = {"float": 1, "integer": 1}
COMPLEX = ("shift", "multiply", "convert", "exp")
PUBLISHED = {**PLAIN, **dict.fromkeys(COMPLEX, 1.84), "divide": 10}
PUBLISHED_ALONE = {**PLAIN, **dict.fromkeys(COMPLEX, 4), "divide": 10}
ASSUMED = {
    "simdgroup_multiply_accumulate": 16,  # 1,024 operations at the rate of plain fma
    **dict.fromkeys(("simd_shuffle", "simd_shuffle_xor", "simd_any"), 2),
    **dict.fromkeys(("simd_max", "simd_sum"), 10),
    "threadgroup_barrier": 4 * 2,  # of four simdgroups
    "load": 2,
    "threadgroup_access": 1,
}


@dataclass(frozen=True)
class Chip:
    name: str
    cores: int
    clock_ghz: float
    gigabytes_per_s: float


CHIPS = [Chip("M1 Max", 32, 1.296, 400), Chip("M2 Ultra", 76, 1.398, 800), Chip("M4 Max", 40, 1.578, 546)]


@dataclass(frozen=True)
class Costs:
    """Of one KV head. Counts are simdgroup instructions."""

    per_block: dict[str, float]
    per_split: dict[str, float]
    """Before its first block and after its last."""
    tail: dict[str, float]
    """Of a tail of one token."""
    combine: dict[str, float]
    """Of all rows of the KV head, with the splits of the long context."""
    bytes_per_element: float
    """Bytes of tiles that lanes asked for per number of K and V; of int4c 0.539 stand in memory."""
    bytes_per_load: float
    threadgroup_bytes: int
    num_splits: int


def view_of(num_blocks: int, head_dim: int, format: Format) -> CacheView:
    mx.random.seed(0)
    shape = (1, num_blocks * BLOCK_TOKENS, head_dim)
    tiles = codec.encode(mx.random.normal(shape), mx.random.normal(shape), format)
    none, one = (
        mx.zeros((1, 0, head_dim), mx.float16),
        mx.random.normal((1, 1, 1, head_dim)).astype(mx.float16),
    )
    return CacheView(none, none, tiles, num_blocks, one, one, format=format)


def instructions(metal: EmulatedMetal, kernel: str) -> defaultdict[str, float]:
    """What the last run of a kernel executed; 0 of any other."""
    statistics = metal.statistics[kernel]
    counts = dict(Counter(count_arithmetic(metal.prepared[kernel])) + Counter(statistics.operations))
    of_memory = {
        "load": sum(statistics.loads.values()) / SIMD_WIDTH,
        "threadgroup_access": statistics.threadgroup_accesses / SIMD_WIDTH,
    }
    return defaultdict(float, counts | of_memory)


def count(group: int, head_dim: int, num_kv_heads: int, format: Format = "int4c") -> Costs:
    metal = EmulatedMetal()
    q = mx.random.normal((1, group, 1, head_dim)).astype(mx.float16)

    def run(num_blocks: int, max_splits: int) -> None:
        launcher = Launcher(metal.metal_kernel, Plan(max_splits=max_splits))
        launcher.decode_attention(q, view_of(num_blocks, head_dim, format), head_dim**-0.5)

    few, many, splits = 16, 80, 5
    run(few, max_splits=splits)
    several = instructions(metal, "longleaf_split")
    run(few, max_splits=1)
    one = instructions(metal, "longleaf_split")
    tile_bytes = metal.statistics["longleaf_split"].bytes_read["tiles"]
    run(many, max_splits=1)
    statistics = metal.statistics["longleaf_split"]
    longer = instructions(metal, "longleaf_split")
    per_block = {k: (longer[k] - one[k]) / (many - few) for k in longer}
    per_split = {k: max(0.0, several[k] - one[k]) / (splits - 1) for k in one}
    elements = 2 * BLOCK_TOKENS * head_dim
    num_splits = Plan().num_splits(NUM_TOKENS // BLOCK_TOKENS, num_kv_heads)
    run(num_splits, max_splits=num_splits)
    return Costs(
        per_block=per_block,
        per_split=per_split,
        tail={k: max(0.0, one[k] - few * per_block[k] - per_split[k]) for k in one},
        combine=dict(instructions(metal, "longleaf_combine")),
        bytes_per_element=(statistics.bytes_read["tiles"] - tile_bytes) / (many - few) / elements,
        bytes_per_load=statistics.bytes_read["tiles"] / statistics.loads["tiles"],
        threadgroup_bytes=statistics.threadgroup_bytes,
        num_splits=num_splits,
    )


def cycles(counts: dict[str, float], published: Mapping[str, float] = PUBLISHED) -> float:
    return sum({**published, **ASSUMED}[kind] * n for kind, n in counts.items())


def predict(
    chip: Chip, costs: Costs, num_q_heads: int, num_kv_heads: int, head_dim: int, format: Format
) -> dict[str, object]:
    floor_bytes = NUM_TOKENS // BLOCK_TOKENS * num_kv_heads * TileLayout(head_dim, format).tile_bytes
    floor_ms = floor_bytes / chip.gigabytes_per_s / 1e6
    partial_ms = 2 * 4 * num_q_heads * costs.num_splits * head_dim / chip.gigabytes_per_s / 1e6

    def times(published: Mapping[str, float]) -> tuple[float, float, float]:
        """Arithmetic of the split, the combine, both with the floor: milliseconds."""
        per_ms = chip.cores * SCHEDULERS * chip.clock_ghz * 1e6 / num_kv_heads
        blocks = NUM_TOKENS // BLOCK_TOKENS * cycles(costs.per_block, published)
        splits = costs.num_splits * cycles(costs.per_split, published) + cycles(costs.tail, published)
        arithmetic_ms = (blocks + splits) / per_ms
        combine_ms = max(cycles(costs.combine, published) / per_ms, partial_ms)
        return arithmetic_ms, combine_ms, max(arithmetic_ms, floor_ms) + combine_ms

    arithmetic_ms, combine_ms, peak_ms = times(PUBLISHED)
    alone_ms = times(PUBLISHED_ALONE)[2]
    return {
        "chip": chip.name,
        "format": format,
        "num_tokens": NUM_TOKENS,
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "row_class": row_class(num_q_heads // num_kv_heads, head_dim),
        "num_splits": costs.num_splits,
        "floor_ms": round(floor_ms, 4),
        "arithmetic_ms": round(arithmetic_ms, 4),
        "combine_ms": round(combine_ms, 4),
        "predicted_at_peak_ms": round(peak_ms, 4),
        "predicted_at_peak_no_overlap_ms": round(alone_ms, 4),
        "predicted_ms": round(peak_ms / REACHED, 4),
        "of_floor_at_peak": round(floor_ms / peak_ms, 3),
        "of_floor_at_peak_no_overlap": round(floor_ms / alone_ms, 3),
        "of_floor": round(REACHED * floor_ms / peak_ms, 3),
    }


def main() -> None:
    rows, counted = [], []
    print("PREDICTION from counts and published rates; no Mac was involved.\n")
    shapes = [(64, 8, 128), (32, 8, 128), (16, 8, 128), (64, 8, 64), (32, 4, 256)]
    cases: list[tuple[int, int, int, Format]] = [(*shape, "int4c") for shape in shapes]
    cases += [(q, 8, 128, format) for format in FORMATS[1:] for q in (64, 16)]
    for num_q_heads, num_kv_heads, head_dim, format in cases:
        group = num_q_heads // num_kv_heads
        costs = count(group, head_dim, num_kv_heads, format)
        per_token = {k: round(n / BLOCK_TOKENS, 3) for k, n in costs.per_block.items() if n}
        counted.append(
            {
                "kernel": "split",
                "format": format,
                "group": group,
                "head_dim": head_dim,
                "row_class": row_class(group, head_dim),
                "bytes_loaded_per_element": round(costs.bytes_per_element, 4),
                "bytes_per_load": round(costs.bytes_per_load, 2),
                "threadgroup_bytes": costs.threadgroup_bytes,
                "instructions_per_token": per_token,
                "cycles_per_token": round(cycles(costs.per_block) / BLOCK_TOKENS, 2),
                "cycles_per_split": round(cycles(costs.per_split)),
                "barriers_per_split": costs.per_split["threadgroup_barrier"],
                "cycles_of_combine": round(cycles(costs.combine)),
            }
        )
        heads = f"{num_q_heads}/{num_kv_heads}"
        print(f"{format}, {heads} heads, D={head_dim}, per token and KV head: {per_token}")
        rows += [predict(chip, costs, num_q_heads, num_kv_heads, head_dim, format) for chip in CHIPS]
    print("\nPREDICTED, one layer, 128K tokens (ms)")
    print(
        "chip      format  heads     D   floor  arith.  combine    peak"
        "  of floor  no overlap  at 85 % of peak"
    )
    for r in rows:
        heads = f"{r['num_q_heads']}/{r['num_kv_heads']}"
        print(
            f"{r['chip']:9} {r['format']:7} {heads:6} {r['head_dim']:4} {r['floor_ms']:7.3f} "
            f"{r['arithmetic_ms']:7.3f} {r['combine_ms']:8.4f} {r['predicted_at_peak_ms']:7.3f} "
            f"{r['of_floor_at_peak']:9.1%} {r['of_floor_at_peak_no_overlap']:11.1%} "
            f"{r['predicted_ms']:8.3f} {r['of_floor']:6.1%}"
        )
    record = {
        "kind": "prediction",
        "cycles_published": PUBLISHED,
        "cycles_published_alone": PUBLISHED_ALONE,
        "cycles_assumed": ASSUMED,
        "share_of_peak_assumed": REACHED,
        "chips": [chip.__dict__ for chip in CHIPS],
        "counts": counted,
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"bench": "metal_prediction", "kind": "prediction", "result": str(RESULT)}))


if __name__ == "__main__":
    main()
