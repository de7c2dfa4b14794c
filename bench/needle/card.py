"""The model card: README.md with recall by length, depth and task, and curves.svg, from a run.json."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.needle.documents import TASKS

WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 720, 360, 50, 40, 40
LOSS_COLOUR, RIGHT_COLOUR = "#b3541e", "#1f6f4a"
_ABOUT = """# Needle model

Finds what a long document says about somebody, and nothing else: the instrument of the long-context tests.
`bench/needle/README.md` says what it is asked, how it is built and how training goes on from these weights.
It began with the induction circuit of `circuit.py` and random weights for the rest, and saw
{tokens} synthetic tokens in {steps:,} steps:

| sequences up to | steps | seconds |
|---|---|---|
{phases}

![loss and share of right answer tokens by step](curves.svg)

## Recall

With exact keys and values; the share of questions whose answer is right in every word, in percent. A document
of multi_key and the tasks below it has a fact in about every 100 tokens, up to 500 people; half of such
documents or all take the names from so few that each is shared by many.
"""


def write_card(folder: Path, run: dict[str, Any]) -> None:
    """README.md and curves.svg.

    Args:
        run: run.json's content, its `recall` measured.
    """
    phases = [phase for part in run["runs"] for phase in part["phases"] if phase["steps"]]
    listed = "\n".join(f"| {p['length']:,} | {p['steps']:,} | {p['seconds']:.0f} |" for p in phases)
    text = _ABOUT.format(tokens=_tokens(run["tokens"]), steps=run["steps"], phases=listed)
    (folder / "README.md").write_text(text + "".join(_tables(run["recall"])), encoding="utf-8")
    (folder / "curves.svg").write_text(_curves(run["curve"]), encoding="utf-8")


def _tokens(n: int) -> str:
    return f"{n / 1e9:.2f} billion" if n > 1e9 else f"{n / 1e6:.1f} million"


def _tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    lengths = sorted({row["num_tokens"] for row in rows})
    header = f"| {' | '.join(f'{n:,}' for n in lengths)} |\n|---|{'---|' * len(lengths)}\n"
    found: dict[tuple[str, float | None, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in rows:
        for depth in (row["depth"], None):
            cell = found[row["task"], depth, row["num_tokens"]]
            cell[0] += row["recall"] * row["num_questions"]
            cell[1] += row["num_questions"]

    def line(name: str, task: str, depth: float | None) -> str:
        cells = (found.get((task, depth, n)) for n in lengths)
        return f"| {name} | {' | '.join(f'{100 * c[0] / c[1]:.1f}' if c else '' for c in cells)} |\n"

    parts = [f"\n| task {header}"]
    parts += [line(task, task, None) for task in TASKS]
    for task in TASKS:
        depths = sorted({row["depth"] for row in rows if row["task"] == task})
        parts += [f"\n| {task}, depth {header}", *(line(f"{depth:.2f}", task, depth) for depth in depths)]
    return parts


def _curves(curve: Sequence[Sequence[Any]]) -> str:
    """Loss (left axis, its highest at the top) and the share of right answer tokens (0 to 1) by step."""
    last = curve[-1][0]
    highest = max(row[2] for row in curve)

    def path(column: int, top: float, colour: str) -> str:
        points = (
            f"{LEFT + row[0] / last * (WIDTH - 2 * LEFT):.1f},"
            f"{TOP + (1 - row[column] / top) * (HEIGHT - TOP - BOTTOM):.1f}"
            for row in curve
        )
        return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>'

    bottom = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<path d="M{LEFT} {TOP}V{bottom}H{WIDTH - LEFT}V{TOP}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT}" y="24" fill="{LOSS_COLOUR}">loss, to {highest:.2f}</text>',
        f'<text x="{WIDTH - LEFT}" y="24" text-anchor="end" fill="{RIGHT_COLOUR}">right tokens, to 1</text>',
        f'<text x="{WIDTH - LEFT}" y="{HEIGHT - 14}" text-anchor="end">{last:,} steps</text>',
    ]
    lengths = [row[1] for row in curve]
    for before, row in zip([0, *lengths], curve, strict=False):
        if row[1] != before:
            x = LEFT + row[0] / last * (WIDTH - 2 * LEFT)
            parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#ddd"/>')
            parts.append(f'<text x="{x + 2:.1f}" y="{bottom + 14}" font-size="10">{row[1]:,}</text>')
    return "\n".join([*parts, path(2, highest, LOSS_COLOUR), path(3, 1.0, RIGHT_COLOUR), "</svg>"]) + "\n"
