"""How the CUDA launcher cuts a call, which needs no GPU to decide."""

import pytest

from kernels.cuda import plan
from kernels.cuda.device import Device
from kernels.formats import FORMATS, TileLayout


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
@pytest.mark.parametrize("rows", [1, 8, 9, 32, 256])
@pytest.mark.parametrize("shared", [101376, 166912, 232448])
@pytest.mark.parametrize("format", FORMATS)
def test_every_build_fits_the_shared_memory_of_its_device(head_dim, rows, shared, format):
    layout, on = TileLayout(head_dim, format), Device(100, shared, True)
    build = plan.build_for(layout, rows, on)
    assert build.threads >= 32
    assert build.shared_bytes(layout) * build.per_sm <= on.shared_bytes


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("per_batch", [1, 3, 5, 8, 24, 32])
@pytest.mark.parametrize("batch", [1, 2, 7])
def test_no_row_group_touches_more_batch_rows_than_counted(rows, per_batch, batch):
    total = batch * per_batch
    touched = [
        len({r // per_batch for r in range(first, min(first + rows, total))})
        for first in range(0, total, rows)
    ]
    assert max(touched) <= plan.batches_touched(rows, per_batch, batch)


H200 = Device(132, 232448, True)


def test_a_device_of_many_processors_makes_no_more_partials_than_the_limit():
    many = Device(9_000, 232448, True)
    assert plan.cut(plan.Simple(), many, 1, 1, 1, 64, 143, 9_000).partials <= plan.MAX_PARTIALS


def test_a_short_context_takes_few_ctas_and_a_long_one_all_that_run_at_once():
    build = plan.build_for(TileLayout(128), 8, H200)
    short, long = (plan.cut(build, H200, 1, 8, 8, 64, 143, n) for n in (8, 1024))
    assert (short.streams, short.workers) == (2, 8)
    assert (long.streams, long.workers, long.num_ctas) == (16, 4, 132)


@pytest.mark.parametrize("num_tail", [144, 288, 1152, 2064])
@pytest.mark.parametrize("num_blocks", [16, 256, 512, 1024, 8192])
def test_a_worker_is_done_before_the_streams(num_blocks, num_tail):
    """By times that were measured, in slices of a ring; short contexts wait for one item's first piece."""
    build = plan.build_for(TileLayout(128), 4, H200)
    cut = plan.cut(build, H200, 1, 8, 4, 64, num_tail, num_blocks)
    pieces = -(-(-(-num_tail // 16) + 4) // (cut.dense * build.warps))
    items = -(-8 * cut.dense // cut.workers)
    assert items * (3.3 + 2.1 * pieces) <= max(6, 1.25 * (cut.each + 1))


def test_without_blocks_all_ctas_take_dense_pieces():
    build = plan.build_for(TileLayout(128), 8, H200)
    cut = plan.cut(build, H200, 1, 8, 8, 0, 4096, 0)
    assert (cut.streams, cut.dense, cut.num_ctas) == (0, 16, 128)


def test_many_rows_with_long_windows_make_no_more_partials_than_the_limit():
    build = plan.build_for(TileLayout(128), 16, H200)
    assert plan.cut(build, H200, 16, 8, 1, 0, 8192, 0).partials <= plan.MAX_PARTIALS
