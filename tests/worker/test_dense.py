from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from worker.dense import dequantize_weights


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
