"""The frame of a plot, as SVG by hand: no plotting package is among the dependencies."""

from __future__ import annotations

from html import escape

WIDTH, HEIGHT = 720, 440
LEFT, TOP, BOTTOM = 70, 40, 50


def frame(title: str, across: str, up: str, right: int) -> list[str]:
    """The first parts of a document: background, title and the names of both axes.

    Args:
        right: the margin on that side.
    """
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="14">{escape(title)}</text>',
        f'<text x="{(LEFT + WIDTH - right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        f"{escape(across)}</text>",
        f'<text transform="rotate(-90 16 {HEIGHT / 2})" x="16" y="{HEIGHT / 2}" text-anchor="middle">'
        f"{escape(up)}</text>",
    ]


def level(at: float, right: int, label: str) -> list[str]:
    """A line across at a height, and its name."""
    return [
        f'<path d="M{LEFT} {at:.1f}H{WIDTH - right}" stroke="#ddd"/>',
        f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>',
    ]
