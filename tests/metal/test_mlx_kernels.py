"""MLX's own Metal kernels, from the headers in its wheel, pass every check and agree with MLX on the CPU."""

import mlx.core as mx
import numpy as np
import pytest

from tests.metal.emulator import Options, Program, run_text


def program(call, *headers, constants=None):
    text = "".join(f'#include "mlx/backend/metal/kernels/{name}"\n' for name in headers)
    return Program(text, call, constants=constants)


def i32(x):
    return np.array([x], np.int32)


def u64(x):
    return np.array([x], np.uint64)


def numpy_type(dtype):
    return np.float32 if dtype == "float" else np.float16


def attention(q, k, v, causal=False):
    arrays = (mx.array(a.astype(np.float32))[None] for a in (q, k, v))
    mask = "causal" if causal else None
    scale = q.shape[-1] ** -0.5
    return np.array(mx.fast.scaled_dot_product_attention(*arrays, scale=scale, mask=mask, stream=mx.cpu)[0])


@pytest.mark.parametrize(
    ("dtype", "dim", "tokens", "q_heads", "heads", "causal", "queries", "seed"),
    [
        ("float", 64, 1, 4, 2, False, 1, 0),
        ("float", 128, 77, 4, 1, False, 1, 0),
        ("half", 128, 300, 4, 2, False, 1, 0),
        ("float", 64, 33, 2, 2, True, 4, 0),
        ("float", 64, 50, 2, 1, False, 1, 3),
    ],
)
def test_sdpa_vector(dtype, dim, tokens, q_heads, heads, causal, queries, seed):
    r = np.random.default_rng(0)
    q, k, v = (
        r.standard_normal((h, n, dim)).astype(numpy_type(dtype))
        for h, n in ((q_heads, queries), (heads, tokens), (heads, tokens))
    )
    out = np.zeros((q_heads, queries, dim), numpy_type(dtype))
    call = f"sdpa_vector<{dtype}, {dim}, {dim}>"
    strides = {6: u64(tokens * dim), 7: u64(dim), 8: u64(tokens * dim), 9: u64(dim)}
    scale = {10: np.array([dim**-0.5], np.float32)}
    run_text(
        program(call, "sdpa_vector.h", constants={"do_causal": int(causal)}),
        {0: q, 1: k, 2: v, 3: ("out", out), 4: i32(q_heads // heads), 5: i32(tokens), **strides, **scale},
        (q_heads * 1024, queries, 1),
        (1024, 1, 1),
        Options(seed=seed),
    )
    np.testing.assert_allclose(out, attention(q, k, v, causal), atol=2e-6 if dtype == "float" else 2e-3)


@pytest.mark.parametrize(
    ("dim", "tokens", "q_heads", "heads", "seed"), [(128, 100, 8, 2, 0), (64, 300, 4, 4, 1)]
)
def test_sdpa_in_two_passes(dim, tokens, q_heads, heads, seed):
    blocks, group = 32, q_heads // heads
    r = np.random.default_rng(1)
    q, k, v = (
        r.standard_normal((h, n, dim)).astype(np.float32)
        for h, n in ((q_heads, 1), (heads, tokens), (heads, tokens))
    )
    partial, out = np.zeros((q_heads, blocks, dim), np.float32), np.zeros((q_heads, dim), np.float32)
    sums, tops = np.zeros((2, q_heads, blocks), np.float32)
    strides = {8: u64(tokens * dim), 9: u64(dim), 10: u64(tokens * dim), 11: u64(dim)}
    scale = {12: np.array([dim**-0.5], np.float32)}
    outputs = {3: ("out", partial), 4: ("out", sums), 5: ("out", tops)}
    run_text(
        program(f"sdpa_vector_2pass_1<float, {dim}, {dim}>", "sdpa_vector.h", constants={"blocks": blocks}),
        {0: q, 1: k, 2: v, **outputs, 7: i32(tokens), **strides, **scale},
        (heads * 32, group, blocks),
        (32, group, 1),
        Options(seed=seed),
    )
    run_text(
        program(f"sdpa_vector_2pass_2<float, {dim}>", "sdpa_vector.h", constants={"blocks": blocks}),
        {0: partial, 1: sums, 2: tops, 3: ("out", out), 4: i32(blocks)},
        (q_heads * 1024, 1, 1),
        (1024, 1, 1),
        Options(seed=seed),
    )
    np.testing.assert_allclose(out, attention(q, k, v)[:, 0], atol=2e-6)


@pytest.mark.parametrize(("n", "dtype"), [(1000, "float"), (777, "float"), (1000, "half")])
def test_softmax(n, dtype):
    x = np.random.default_rng(2).standard_normal((5, n)).astype(numpy_type(dtype))
    out = np.zeros_like(x)
    kernel = program(f"softmax_single_row<{dtype}, float, 4>", "softmax.h")
    run_text(kernel, {0: x, 1: ("out", out), 2: i32(n)}, (5 * 256, 1, 1), (256, 1, 1))
    expected = np.array(mx.softmax(mx.array(x.astype(np.float32)), axis=-1, stream=mx.cpu))
    np.testing.assert_allclose(out, expected, atol=1e-6 if dtype == "float" else 1e-3)


@pytest.mark.parametrize(
    ("k", "n", "group", "dtype"), [(512, 32, 64, "float"), (1024, 64, 32, "float"), (512, 16, 64, "half")]
)
def test_quantised_matrix_vector(k, n, group, dtype):
    w = np.random.default_rng(3).standard_normal((n, k)).astype(numpy_type(dtype))
    x = np.random.default_rng(4).standard_normal((1, k)).astype(numpy_type(dtype))
    codes, scales, biases = (np.array(a) for a in mx.quantize(mx.array(w), group_size=group, bits=4))
    out = np.zeros((1, n), numpy_type(dtype))
    headers = ("quantized_utils.h", "steel/gemm/gemm.h", "quantized.h")
    kernel = program(f"affine_qmv_fast<{dtype}, {group}, 4, false>", *headers)
    buffers = {0: codes, 1: scales, 2: biases, 3: x, 4: ("out", out), 5: i32(k), 6: i32(n)}
    run_text(kernel, buffers, (32, n // 8 * 2, 1), (32, 2, 1))
    dequantised = mx.dequantize(mx.array(codes), mx.array(scales), mx.array(biases), group, 4)
    expected = x.astype(np.float32) @ np.array(dequantised).astype(np.float32).T
    np.testing.assert_allclose(out, expected, atol=1e-4 if dtype == "float" else 0.2)
