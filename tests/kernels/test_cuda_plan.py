"""How the CUDA launcher cuts a call, which needs no GPU to decide."""

import pytest

from kernels.cuda import plan
from kernels.cuda.device import Device


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256, 512])
@pytest.mark.parametrize("rows", [1, 8, 9, 256])
@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_every_build_fits_the_shared_memory_of_its_device(head_dim, rows, shared):
    shape = plan.shape_for(head_dim, rows, Device(100, shared, True))
    assert shape.warps >= 1
    assert plan.shared_bytes(head_dim, shape) * shape.per_sm <= shared


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


def test_ctas_never_exceed_what_the_combine_can_hold():
    ctas, dense = plan.num_ctas(
        num_kv_heads=1, row_groups=1, slots=10_000, stream_ctas=9_000, dense_pieces=5_000, per_cta=2
    )
    assert ctas + dense <= plan.MAX_PARTIALS


def test_a_short_context_takes_few_ctas_and_a_long_one_all():
    cut = {"num_kv_heads": 8, "row_groups": 1, "slots": 132, "dense_pieces": 13, "per_cta": 16}
    assert plan.num_ctas(stream_ctas=2, **cut) == (3, 1)
    assert plan.num_ctas(stream_ctas=256, **cut) == (16, 1)
