from __future__ import annotations

from contextlib import suppress

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from worker.dense import dense_for_now, dequantize_weights


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.layers = [nn.Linear(64, 96, bias=bias) for bias in (True, False)]

    def __call__(self, ids: mx.array) -> mx.array:
        hidden = self.embed(ids)
        return self.embed.as_linear(hidden) + sum(
            layer(hidden).sum(-1, keepdims=True) for layer in self.layers
        )


def test_dense_layers_compute_what_the_quantised_ones_did() -> None:
    mx.random.seed(0)
    model = Small()
    nn.quantize(model, group_size=32, bits=4)
    ids = mx.array([[1, 7, 39]])
    before = model(ids)
    dequantize_weights(model)
    assert type(model.embed) is nn.Embedding
    assert [type(layer) for layer in model.layers] == [nn.Linear, nn.Linear]
    assert mx.allclose(model(ids), before, rtol=1e-4, atol=1e-4)


def test_nothing_quantised_is_left_behind() -> None:
    model = Small()
    nn.quantize(model, group_size=32, bits=4)
    dequantize_weights(model)
    parameters = dict(tree_flatten(model.parameters()))
    assert {value.dtype for value in parameters.values()} == {mx.float32}
    assert set(parameters) == {"embed.weight", "layers.0.weight", "layers.0.bias", "layers.1.weight"}


def test_a_model_without_quantised_layers_is_left_as_it_is() -> None:
    model = Small()
    weight = model.embed.weight
    dequantize_weights(model)
    assert model.embed.weight is weight


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_dense_only_for_a_while(fails) -> None:
    mx.random.seed(0)
    model = Small()
    nn.quantize(model, group_size=32, bits=4)
    quantised = list(model.layers)
    ids = mx.array([[1, 7, 39]])
    before = model(ids)
    with suppress(ArithmeticError), dense_for_now(model, mx.float32):
        assert [type(layer) for layer in model.layers] == [nn.Linear, nn.Linear]
        assert mx.allclose(model(ids), before, rtol=1e-4, atol=1e-4)
        if fails:
            raise ArithmeticError
    assert all(a is b for a, b in zip(model.layers, quantised, strict=True))
    assert mx.array_equal(model(ids), before)
