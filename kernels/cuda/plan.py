"""How a call is cut: row tiles, warps, stages and CTAs for one head size, row count and device.

Knows sizes, no arrays and no kernel text. The kernels count pieces and partials in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kernels.cuda.device import Device
from kernels.formats import TileLayout

MAX_PARTIALS = 512
"""Of one row, tiles and dense ends together; the combine keeps a weight for each in shared memory."""
SIMPLE_WARPS = 8
SIMPLE_PIECES_PER_CTA = 2


@dataclass(frozen=True)
class Shape:
    """A build of the split kernel.

    row_tiles: 8-row tiles of queries a warp holds. stages: 32-token slices in a warp's ring.
    queries_shared: q's fragments stay in shared memory. per_sm: CTAs of one multiprocessor.
    """

    row_tiles: int
    warps: int
    stages: int
    queries_shared: bool
    per_sm: int

    @property
    def rows(self) -> int:
        return 8 * self.row_tiles


_ONE_ROW_TILE = {
    16: Shape(1, 16, 4, True, 1),
    32: Shape(1, 16, 4, True, 1),
    48: Shape(1, 16, 4, True, 1),
    64: Shape(1, 16, 3, True, 1),
    80: Shape(1, 16, 3, True, 1),
    96: Shape(1, 16, 2, True, 1),
    112: Shape(1, 16, 2, True, 1),
    128: Shape(1, 16, 2, True, 1),
    192: Shape(1, 12, 2, True, 1),
    256: Shape(1, 8, 2, True, 1),
    512: Shape(1, 4, 2, True, 1),
}
_TWO_ROW_TILES = {
    128: Shape(2, 4, 4, False, 2),
    192: Shape(2, 4, 2, True, 2),
    256: Shape(2, 4, 2, True, 2),
}


def shared_bytes(head_dim: int, shape: Shape) -> int:
    """Dynamic shared memory of a build: `Shared` in split.cuh."""
    layout = TileLayout(head_dim)
    rows, warps = shape.row_tiles, shape.warps
    stage = 34 * head_dim + 128 * layout.num_groups
    size = warps * shape.stages * (stage + 8) + warps * rows * 64
    size = -(-size // 16) * 16
    size += 2 * rows * (-(-head_dim // 32)) * 512 + layout.num_groups * rows * 64 + rows * 32
    return size + (0 if head_dim & (head_dim - 1) == 0 else warps * head_dim * 4)


@cache
def shape_for(head_dim: int, num_rows: int, on: Device) -> Shape:
    """The build for a head size and a number of query rows per KV head that fits the device."""
    two = num_rows > 8 and head_dim <= 256
    table = _TWO_ROW_TILES if two else _ONE_ROW_TILE
    shape = table[min(d for d in table if d >= head_dim)]
    while shared_bytes(head_dim, shape) * shape.per_sm > on.shared_bytes:
        if shape.per_sm > 1:
            shape = Shape(shape.row_tiles, shape.warps, shape.stages, shape.queries_shared, shape.per_sm - 1)
        elif shape.stages > 2:
            shape = Shape(shape.row_tiles, shape.warps, shape.stages - 1, shape.queries_shared, 1)
        else:
            shape = Shape(shape.row_tiles, shape.warps // 2, shape.stages, shape.queries_shared, 1)
    return shape


def batches_touched(rows: int, per_batch: int, batch: int) -> int:
    """The most batch rows that one group of `rows` query rows can belong to."""
    if per_batch % rows == 0:
        return 1
    if rows % per_batch == 0:
        return min(rows // per_batch, batch)
    return min((rows + per_batch - 2) // per_batch + 1, batch)


def num_ctas(
    *, num_kv_heads: int, row_groups: int, slots: int, stream_ctas: int, dense_pieces: int, per_cta: int
) -> tuple[int, int]:
    """CTAs of one row group and KV head, and how many of the first take dense pieces too.

    slots: CTAs that run at once. stream_ctas: the most that tiles can use. per_cta: dense pieces of a CTA.
    """
    wanted = max(1, -(-dense_pieces // per_cta))
    most = min(max(1, slots // (num_kv_heads * row_groups)), MAX_PARTIALS // 2)
    ctas = min(most, stream_ctas + wanted)
    return ctas, min(ctas, wanted)
