"""How a call is cut: the build of the split kernel for a head size, a row count and a device, and its CTAs.

Knows sizes, no arrays and no kernel text.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from kernels.cuda.device import Device
from kernels.formats import TileLayout

MAX_PARTIALS = 512
"""Of one row, tiles and dense ends together: the combine's work, which grows with them."""


@dataclass(frozen=True)
class Tensor:
    """split.cuh: a warp is a stream, with all rows of its CTA.

    row_tiles: 8-row tiles of queries. stages: 32-token slices in a warp's ring. queries_shared: q's
    fragments stay in shared memory. per_sm: CTAs of one multiprocessor. bulk: copies by cp.async.bulk.
    """

    row_tiles: int
    warps: int
    stages: int
    queries_shared: bool
    per_sm: int
    bulk: bool = True
    piece: int = 16
    parts_per_block: int = 4

    @property
    def merges(self) -> bool:
        """Whether the last CTA of a row group merges its partials; of 16 rows it would take longer than a
        launch of its own."""
        return self.row_tiles == 1

    @property
    def rows(self) -> int:
        return 8 * self.row_tiles

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def dense_rows(self) -> int:
        return self.rows

    @property
    def pieces_per_cta(self) -> int:
        return self.warps

    def slots(self, on: Device) -> int:
        """CTAs that run at once."""
        return on.num_multiprocessors * self.per_sm

    def stream_ctas(self, num_blocks: int) -> int:
        """The most CTAs of one head that get a slice for every warp."""
        return -(-4 * num_blocks // self.warps)

    @property
    def rings(self) -> int:
        return self.warps

    def shared_bytes(self, layout: TileLayout) -> int:
        """`Shared` in split.cuh."""
        head_dim, num_groups, rows = layout.head_dim, layout.num_groups, self.row_tiles
        mean = 2 * head_dim if layout.rotated else 0
        stage = (layout.tile_bytes - mean) // 4 + mean
        size = self.warps * self.stages * (stage + 8) + self.warps * rows * 64
        size = -(-size // 16) * 16
        size += 2 * rows * -(-head_dim // 32) * 512 + num_groups * rows * 64 + rows * 32
        return size + (0 if head_dim & (head_dim - 1) == 0 else self.warps * head_dim * 4)


@dataclass(frozen=True)
class Simple:
    """simple.cuh: float32, a warp a row."""

    rows: int = 8
    threads: int = 256
    per_sm: int = 2
    piece: int = 32
    dense_rows: int = 8
    pieces_per_cta: int = 2
    parts_per_block: int = 4
    rings: int = 1
    merges: bool = False

    def slots(self, on: Device) -> int:
        """CTAs that run at once."""
        return on.num_multiprocessors * self.per_sm

    def stream_ctas(self, num_blocks: int) -> int:
        return 4 * num_blocks

    def shared_bytes(self, layout: TileLayout) -> int:
        """`SimpleShared` in simple.cuh."""
        return 4 * (32 * (layout.head_dim + 1) + 2 * self.rows * layout.head_dim)


Build = Tensor | Simple

_ONE_ROW_TILE = {
    48: Tensor(1, 16, 4, True, 1),
    80: Tensor(1, 16, 3, True, 1),
    128: Tensor(1, 16, 2, True, 1),
    192: Tensor(1, 12, 2, True, 1),
    256: Tensor(1, 8, 2, True, 1),
    512: Tensor(1, 4, 2, True, 1),
}
_TWO_ROW_TILES = {
    128: Tensor(2, 4, 4, False, 2),
    256: Tensor(2, 4, 2, True, 2),
}
"""By the largest head size served: what registers and shared memory allow for int4c, measured on an H200."""


@cache
def build_for(layout: TileLayout, num_rows: int, on: Device) -> Build:
    """The build for 16-bit queries of `num_rows` rows per KV head that fits the device."""
    head_dim = layout.head_dim
    table = _TWO_ROW_TILES if num_rows > 8 and head_dim <= 256 else _ONE_ROW_TILE
    build = replace(table[min(d for d in table if d >= head_dim)], bulk=on.bulk_copies)
    while build.shared_bytes(layout) * build.per_sm > on.shared_bytes:
        if build.stages > 2:
            build = replace(build, stages=build.stages - 1)
        elif build.per_sm > 1:
            build = replace(build, per_sm=build.per_sm - 1)
        else:
            build = replace(build, warps=build.warps - max(1, build.warps // 4))
    return build


def batches_touched(rows: int, per_batch: int, batch: int) -> int:
    """The most batch rows that one group of `rows` query rows can belong to."""
    if per_batch % rows == 0:
        return 1
    if rows % per_batch == 0:
        return min(rows // per_batch, batch)
    return min((rows + per_batch - 2) // per_batch + 1, batch)


@dataclass(frozen=True)
class Cut:
    """How a launch is cut: `Cut` in common.cuh. each, more: how a head's tiles are dealt to its rings."""

    streams: int
    row_groups: int
    dense: int
    workers: int
    each: int
    more: int
    num_ctas: int

    @property
    def shape(self) -> tuple[int, ...]:
        """What the kernel reads, as a shape, which has no zeros."""
        numbers = (self.streams, self.row_groups, self.dense, self.workers, self.each, self.more)
        return tuple(n + 1 for n in numbers)

    @property
    def partials(self) -> int:
        return self.streams + self.dense


@cache
def cut(
    build: Build,
    on: Device,
    batch: int,
    num_kv_heads: int,
    per_batch: int,
    num_sinks: int,
    num_tail: int,
    num_blocks: int,
) -> Cut:
    """CTAs for tiles and for dense ends. per_batch: query rows per KV head of one batch row.

    As many streams as run at once, less the room for the workers. A worker that takes longer than the streams
    is what a call waits for: on an H200, over dense ends that no cache holds, an item takes as long as 3.3
    slices of every ring and 2.1 more for each piece of a warp, and a merge more where workers have several.
    """
    row_groups = -(-batch * per_batch // build.rows)
    groups, slots = num_kv_heads * row_groups, build.slots(on)
    # Of a ring, were all CTAs streams.
    slices = -(-num_blocks * build.parts_per_block * groups // (slots * build.rings))
    touched = batches_touched(build.dense_rows, per_batch, batch)
    num_pieces = -(-num_sinks // build.piece) + touched * -(-num_tail // build.piece)
    at_once = build.pieces_per_cta
    dense = min(-(-num_pieces // (at_once * min(max(1, slices // 4), 4))), MAX_PARTIALS // 2)
    items = groups * dense
    pieces = -(-num_pieces // max(1, at_once * dense))  # of a warp
    room = -(-items // max(1, slices // (4 + 4 * pieces)))
    streams = min(build.stream_ctas(num_blocks), max(1, (slots - room) // groups))
    streams = min(streams, MAX_PARTIALS // 2)
    idle = slots - groups * streams
    workers = min(items, idle) if idle > 0 else items
    each, more = divmod(num_blocks * build.parts_per_block, max(1, streams * build.rings))
    return Cut(streams, row_groups, dense, workers, each, more, groups * streams + workers)
