"""Time of one step against the length of the cache, both logarithmic, drawn as SVG by hand."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

from bench.svg import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, frame, level

RIGHT = 180
LINES = {
    "mlx_lm_quantized_ms": ("mlx-lm, 4-bit KV", "#b3541e"),
    "dequantize_sdpa_ms": ("dequantise + SDPA", "#8a6d1b"),
    "mlx_sdpa_fp16_ms": ("MLX SDPA", "#555555"),
    "ours_ms": ("int4c", "#1f6f4a"),
    "floor_ms": ("reading int4c", "#7aa5d6"),
}


def write(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Draw the rows of one head shape; those that miss a time leave that line's point out.

    Args:
        rows: of bench.decode_attention, of at least two lengths.
    """
    rows = sorted(rows, key=lambda row: row["num_tokens"])
    lengths = [math.log2(row["num_tokens"]) for row in rows]
    times = [math.log10(row[name]) for row in rows for name in LINES if row.get(name)]
    low, high = math.floor(min(times)), math.ceil(max(times))

    def x(num_tokens: int) -> float:
        return LEFT + (math.log2(num_tokens) - lengths[0]) / (lengths[-1] - lengths[0]) * (
            WIDTH - LEFT - RIGHT
        )

    def y(ms: float) -> float:
        return TOP + (high - math.log10(ms)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = frame(title, "tokens", "ms of one layer", RIGHT)
    for power in range(low, high + 1):
        parts += level(y(10.0**power), RIGHT, f"{10.0**power:g}")
    for row in rows:
        at = x(row["num_tokens"])
        label = f"{row['num_tokens'] // 1024}K"
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>')
    for name, (label, colour) in LINES.items():
        points = [(x(row["num_tokens"]), y(row[name])) for row in rows if row.get(name)]
        if not points:
            continue
        path_data = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        parts.append(f'<path d="M{path_data}" fill="none" stroke="{colour}" stroke-width="2"/>')
        a, b = points[-1]
        parts.append(f'<text x="{a + 8:.1f}" y="{b + 4:.1f}" fill="{colour}">{escape(label)}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
