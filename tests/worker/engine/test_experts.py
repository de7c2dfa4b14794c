import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from worker.engine.experts import state_row_strides

NUM_EXPERTS, WIDTH, NUM_ROWS = 4, 192, 80
INDICES = mx.array([i * NUM_EXPERTS // NUM_ROWS for i in range(NUM_ROWS)], mx.uint32)


class Layer(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.experts = SwitchGLU(WIDTH, WIDTH, NUM_EXPERTS, bias=bias)
        self.o_proj = nn.Linear(WIDTH, WIDTH)


@pytest.fixture
def expert():
    mx.random.seed(2)
    layer = Layer()
    layer.experts.down_proj.bias = mx.random.normal((NUM_EXPERTS, WIDTH))
    state_row_strides([layer])
    mx.eval(layer.parameters())
    return layer.experts.down_proj


def expanded():
    """Rows whose axis of one, as `mx.expand_dims` makes it, has a stride of one."""
    rows = mx.random.normal((NUM_ROWS, WIDTH))
    mx.eval(rows)
    return rows, mx.expand_dims(rows, -2)


def one_by_one(expert, rows):
    bias = expert.bias if "bias" in expert else mx.zeros((NUM_EXPERTS, WIDTH))
    return mx.stack([expert.weight[e] @ row + bias[e] for row, e in zip(rows, INDICES.tolist(), strict=True)])


def test_rows_whose_axis_of_one_has_a_stride_of_one_are_multiplied_right(expert):
    rows, x = expanded()
    out = expert(x, INDICES, sorted_indices=True)
    # Such a product is one of tensor cores on CUDA, which round their inputs to 10 bits.
    assert mx.allclose(out[:, 0], one_by_one(expert, rows), atol=0.02)


def test_what_is_multiplied_has_the_strides_of_rows(expert, monkeypatch):
    _, x = expanded()
    mx.eval(x)
    assert memoryview(x).strides == (4 * WIDTH, 4, 4), "MLX no longer makes such arrays"
    seen, product = [], mx.gather_mm
    monkeypatch.setattr(mx, "gather_mm", lambda x, *args, **more: seen.append(x) or product(x, *args, **more))
    mx.eval(expert(x, INDICES, sorted_indices=True), seen)
    assert [memoryview(given).strides for given in seen] == [(4 * WIDTH, 4 * WIDTH, 4)]


@pytest.mark.skipif(not mx.cuda.is_available(), reason="MLX has no CUDA device here")
def test_mlx_itself_gets_it_wrong():
    rows, x = expanded()
    expert = SwitchLinear(WIDTH, WIDTH, NUM_EXPERTS, bias=False)
    out = expert(x, INDICES, sorted_indices=True)
    wrong = not mx.allclose(out[:, 0], one_by_one(expert, rows), atol=0.02)
    assert wrong, "MLX multiplies them right by now: worker/engine/experts.py may go"


def test_others_stay_as_they_are():
    layer = Layer(bias=False)
    quantised = Layer()
    nn.quantize(quantised, 32, 4)
    state_row_strides([layer, quantised])
    kinds = {type(part) for each in (layer, quantised) for _, part in each.experts.named_modules()}
    assert not any(kind.__name__ == "_OfRows" for kind in kinds)
