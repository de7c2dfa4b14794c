"""Recall by length and depth, one panel for each format and case, as an SVG."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any

CELL_WIDTH, CELL_HEIGHT, NUM_DEPTHS, GAP, LEFT, TOP = 34, 13, 10, 26, 44, 62
ACROSS = 6
"""Panels in a row."""


def write(path: Path, title: str, rows: list[dict[str, Any]]) -> None:
    """Every task of `rows` counts; a cell without a question stays empty."""
    lengths = sorted({row["num_tokens"] for row in rows})
    cells: dict[str, dict[tuple[int, int], list[float]]] = {}
    for row in rows:
        case = "restored" if row["restored"] else "nonce" if row["nonce"] else "cold"
        panel = cells.setdefault(f"{row['format']} {case}", defaultdict(lambda: [0.0, 0.0]))
        cell = panel[int(row["depth"] * NUM_DEPTHS), lengths.index(row["num_tokens"])]
        cell[0] += row["recall"] * row["num_questions"]
        cell[1] += row["num_questions"]
    panel_width, panel_height = len(lengths) * CELL_WIDTH + GAP, NUM_DEPTHS * CELL_HEIGHT + 2 * GAP
    width = LEFT + min(ACROSS, len(cells)) * panel_width
    height = TOP + -(-len(cells) // ACROSS) * panel_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT}" y="34">percent of questions answered right; across: thousands of tokens; '
        "down: where in the document the facts stand, its start at the top</text>",
    ]
    for number, (name, panel) in enumerate(cells.items()):
        x0, y0 = LEFT + number % ACROSS * panel_width, TOP + number // ACROSS * panel_height
        parts.append(f'<text x="{x0}" y="{y0 - 4}" font-weight="bold">{escape(name)}</text>')
        for i, length in enumerate(lengths):
            at = x0 + (i + 0.5) * CELL_WIDTH
            parts.append(
                f'<text x="{at}" y="{y0 + NUM_DEPTHS * CELL_HEIGHT + 11}" text-anchor="middle">'
                f"{length / 1024:.0f}K</text>"
            )
        for (depth, i), (right, asked) in sorted(panel.items()):
            x, y, share = x0 + i * CELL_WIDTH, y0 + depth * CELL_HEIGHT, right / asked
            parts.append(
                f'<rect x="{x}" y="{y}" width="{CELL_WIDTH - 1}" height="{CELL_HEIGHT - 1}" '
                f'fill="{_colour(share)}"/>'
                f'<text x="{x + CELL_WIDTH / 2}" y="{y + 10}" text-anchor="middle">{100 * share:.0f}</text>'
            )
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


def _colour(share: float) -> str:
    """From red over yellow to green."""
    red, green = min(1.0, 2 - 2 * share), min(1.0, 2 * share)
    return f"rgb({int(120 + 135 * red)},{int(120 + 135 * green)},120)"
