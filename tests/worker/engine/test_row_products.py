import mlx.core as mx
import mlx.nn as nn
import pytest

from worker.dense import dense_for_now
from worker.engine.row_products import rows_joined


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.QuantizedLinear(64, 96, bias=True, group_size=32)
        self.norm = nn.RMSNorm(64)

    def __call__(self, x):
        return self.up(self.norm(x))


@pytest.fixture
def rows():
    mx.random.seed(3)
    return mx.random.normal((5, 1, 64))


def test_rows_of_a_batch_come_out_as_rows_of_one_product(rows):
    pair = Pair()
    wanted = pair(rows.reshape(1, 5, 64)).reshape(5, 1, 96)
    with rows_joined([pair]):
        assert mx.array_equal(pair(rows), wanted)
    assert type(pair.up) is nn.QuantizedLinear


@pytest.mark.parametrize("shape", [(7, 64), (1, 7, 64)])
def test_one_sequence_passes_as_it_is(shape):
    pair, x = Pair(), mx.random.normal(shape)
    wanted = pair(x)
    with rows_joined([pair]):
        assert mx.array_equal(pair(x), wanted)


def test_joined_products_can_be_dense_for_a_while(rows):
    pair = Pair()
    with rows_joined([pair]):
        before = pair(rows)
        with dense_for_now(pair, mx.float32):
            assert mx.allclose(pair(rows), before, atol=1e-5)
        assert mx.array_equal(pair(rows), before)
