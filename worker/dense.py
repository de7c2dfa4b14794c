"""Quantised weights turned back into dense ones, for devices where a dense product is the faster one.

MLX's quantised product on a CPU is scalar code; a dense float32 product is one call of BLAS. On CUDA its
quantised product of many rows reaches a tenth of what a dense one does. It knows only `mlx.nn` layers, no
architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten


def dequantize_weights(model: nn.Module, dtype: mx.Dtype = mx.float32) -> None:
    """Replace every QuantizedLinear and QuantizedEmbedding of `model`, in place, by a dense one in `dtype`.

    A layer is evaluated before the next is touched, so that the peak is the dense model and one quantised
    layer. The values are those that the quantised product computes with: codes times scales plus biases.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, nn.QuantizedLinear | nn.QuantizedEmbedding):
            model.update_modules(tree_unflatten([(path, _dense(layer, dtype))]))


@contextmanager
def dense_for_now(layer: nn.Module, dtype: mx.Dtype) -> Iterator[None]:
    """Let every QuantizedLinear in `layer` compute with a dense copy of its weights meanwhile."""
    quantised = [(path, part) for path, part in layer.named_modules() if isinstance(part, nn.QuantizedLinear)]
    for path, part in quantised:
        layer.update_modules(tree_unflatten([(path, _dense(part, dtype))]))
    try:
        yield
    finally:
        for path, part in quantised:
            layer.update_modules(tree_unflatten([(path, part)]))


def _dense(layer: nn.QuantizedLinear | nn.QuantizedEmbedding, dtype: mx.Dtype) -> nn.Module:
    weight = mx.dequantize(
        layer.weight,
        layer.scales.astype(dtype),
        layer.biases.astype(dtype) if layer.biases is not None else None,
        group_size=layer.group_size,
        bits=layer.bits,
        mode=layer.mode,
    ).astype(dtype)
    mx.eval(weight)
    if isinstance(layer, nn.QuantizedEmbedding):
        embedding = nn.Embedding(1, 1)
        embedding.weight = weight
        return embedding
    # Made small: the constructor would draw random weights of the full size.
    linear = nn.Linear(1, 1, bias="bias" in layer)
    linear.weight = weight
    if "bias" in layer:
        linear.bias = layer.bias.astype(dtype)
    return linear
