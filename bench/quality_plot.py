"""KL against bits per element, drawn as SVG by hand."""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

from bench.svg import BOTTOM, HEIGHT, LEFT, TOP, WIDTH, frame, level

RIGHT = 150
COLOURS = {"deployment": "#1f6f4a", "stress": "#b3541e"}


def write(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """One point a row of `format`, `prefill`, `setting`, `bits` and `kl_mean`, which is above 0."""
    decades = [math.log10(row["kl_mean"]) for row in rows]
    low, high = math.floor(min(decades)), math.ceil(max(decades))

    def x(bits: float) -> float:
        return LEFT + (bits - 4) / 12.5 * (WIDTH - LEFT - RIGHT)

    def y(kl: float) -> float:
        return TOP + (high - math.log10(kl)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = frame(title, "bits per element, everything counted", "mean KL(exact || quantised), nats", RIGHT)
    for power in range(low, high + 1):
        parts += level(y(10.0**power), RIGHT, f"1e{power}")
    for bits in range(4, 17, 2):
        at = x(bits)
        parts.append(f'<path d="M{at:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="#eee"/>')
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{bits}</text>')
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: -row["kl_mean"]):
        at_x, at_y, colour = x(row["bits"]), y(row["kl_mean"]), COLOURS[row["setting"]]
        label_y = at_y + 4
        while any(abs(at_x - a) < 120 and abs(label_y - b) < 11 for a, b in taken):
            label_y += 1
        taken.append((at_x, label_y))
        # A filled mark is what a job's own prefill gives.
        fill = colour if row["prefill"] == "layer-major" else "white"
        name = escape(f"{row['format']}, {row['prefill']}")
        parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="{fill}" stroke="{colour}"/>')
        parts.append(
            f'<text x="{at_x + 7:.1f}" y="{label_y:.1f}" fill="{colour}" font-size="10">{name}</text>'
        )
    for i, (setting, colour) in enumerate(COLOURS.items()):
        parts.append(f'<text x="{WIDTH - 90}" y="{TOP + 16 * i}" fill="{colour}">{setting}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")
