import mlx.core as mx
import mlx.nn as nn
import pytest

from worker.dense import dense_for_now
from worker.engine.products import join_products, rows_joined


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


class Layer(nn.Module):
    def __init__(self, value_bits=4):
        super().__init__()
        self.q_proj = nn.QuantizedLinear(64, 96, bias=True, group_size=32)
        self.k_proj = nn.QuantizedLinear(64, 32, bias=True, group_size=32)
        self.v_proj = nn.QuantizedLinear(64, 32, bias=True, group_size=32, bits=value_bits)
        self.mlp = nn.Module()
        self.mlp.gate_proj = nn.QuantizedLinear(64, 160, bias=False, group_size=32)
        self.mlp.up_proj = nn.QuantizedLinear(64, 160, bias=False, group_size=32)

    def __call__(self, x):
        parts = (self.q_proj, self.k_proj, self.v_proj, self.mlp.gate_proj, self.mlp.up_proj)
        return [part(x) for part in parts]


def products_in(layer, x, monkeypatch):
    """What the layer gives, and how many products it took."""
    calls, product = [], mx.quantized_matmul
    with monkeypatch.context() as patch:
        patch.setattr(mx, "quantized_matmul", lambda *a, **k: calls.append(1) or product(*a, **k))
        return layer(x), len(calls)


def all_equal(these, those):
    return all(mx.array_equal(a, b) for a, b in zip(these, those, strict=True))


def test_a_single_row_takes_one_product_for_what_multiplies_the_same_input(rows, monkeypatch):
    layer, x = Layer(), rows[:1]
    wanted = layer(x)
    join_products([layer])
    given, num_products = products_in(layer, x, monkeypatch)
    assert num_products == 2
    assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(given, wanted, strict=True))
    again = layer(rows[1:2])
    assert not mx.allclose(again[0], given[0], atol=1e-2), "the first row's answer was kept"


def test_several_rows_are_multiplied_as_before(rows, monkeypatch):
    layer, x = Layer(), rows.reshape(1, 5, 64)
    wanted = layer(x)
    join_products([layer])
    given, num_products = products_in(layer, x, monkeypatch)
    assert num_products == 5
    assert all_equal(given, wanted)
    assert all_equal(layer(rows), [y.reshape(5, 1, -1) for y in wanted])


def test_joined_weights_are_not_held_twice():
    layer = nn.Module()
    layer.gate_proj, layer.up_proj = (nn.QuantizedLinear(1024, 4096, bias=False) for _ in range(2))
    mx.eval(layer.parameters())
    mx.clear_cache()
    before, size = mx.get_active_memory(), layer.up_proj.weight.nbytes
    join_products([layer])
    assert mx.get_active_memory() - before < size / 4
    assert mx.get_cache_memory() < size / 4


def test_joined_weights_can_be_dense_for_a_while(rows):
    layer = Layer()
    join_products([layer])
    before = layer(rows[:1])
    with dense_for_now(layer, mx.float32):
        assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(layer(rows[:1]), before, strict=True))
    assert all_equal(layer(rows[:1]), before)


def test_matrices_of_different_bits_stay_apart(rows, monkeypatch):
    layer = Layer(value_bits=8)
    wanted = layer(rows[:1])
    join_products([layer])
    assert type(layer.q_proj) is nn.QuantizedLinear
    given, num_products = products_in(layer, rows[:1], monkeypatch)
    assert num_products == 4
    assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(given, wanted, strict=True))


def test_matrices_that_are_not_quantised_stay_apart(rows):
    layer = Layer()
    layer.k_proj = nn.Linear(64, 32)
    wanted = layer(rows[:1])
    join_products([layer])
    assert type(layer.q_proj) is nn.QuantizedLinear
    assert all(mx.allclose(a, b, atol=1e-5) for a, b in zip(layer(rows[:1]), wanted, strict=True))
