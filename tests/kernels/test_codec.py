"""The codec: its error, its layout, its edges."""

import mlx.core as mx
import numpy as np
import pytest

from kernels import BLOCK_TOKENS, TileLayout
from kernels.codec import decode, encode, unpack
from kernels.formats import rotation
from tests.kernels import rounding

HEAD_DIMS = [64, 80, 96, 112, 128, 192, 256, 512]


def keys_and_values(head_dim, num_blocks=2, num_heads=2, seed=0):
    mx.random.seed(seed)
    shape = (num_heads, num_blocks * BLOCK_TOKENS, head_dim)
    offset = 4 * mx.random.normal((num_heads, 1, head_dim))
    return mx.random.normal(shape) + offset, mx.random.normal(shape)


def relative_error(x, y):
    return float(mx.linalg.norm(x - y) / mx.linalg.norm(x))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_round_trip_error_is_that_of_four_bits(head_dim):
    k, v = keys_and_values(head_dim)
    k2, v2 = decode(encode(k, v), head_dim)
    blocks = k.reshape(2, -1, BLOCK_TOKENS, head_dim)
    spread = blocks - blocks.mean(axis=2, keepdims=True)
    # 16 uniform levels on a Gaussian leave 0.0115 of its variance, 0.107 of its norm.
    assert relative_error(v, v2) < 0.115
    assert float(mx.linalg.norm(k - k2) / mx.linalg.norm(spread)) < 0.115


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_rotation_is_orthonormal(head_dim):
    r = rotation(head_dim)
    assert mx.allclose(r @ r.T, mx.eye(head_dim), atol=1e-5)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_bits_per_element_counts_every_byte(head_dim):
    layout = TileLayout(head_dim)
    k, v = keys_and_values(head_dim, num_blocks=3)
    tiles = encode(k, v)
    assert tiles.shape == (3, 2, layout.tile_words)
    assert tiles.nbytes * 8 / (k.size + v.size) == layout.bits_per_element
    if head_dim >= 64:
        assert layout.bits_per_element == 4.3125


def test_codes_are_packed_as_mlx_packs_them():
    k, v = keys_and_values(64, num_blocks=1, num_heads=1)
    parts = unpack(encode(k, v), 64)
    scales = parts.v_scales.astype(mx.float32)
    by_mlx = mx.dequantize(parts.v_codes, scales, -7.5 * scales, group_size=64, bits=4)
    tiles = encode(k, v)
    _, exact = rounding.decoded_numbers(tiles, 64)
    for values in (by_mlx[0] @ rotation(64).T, decode(tiles, 64)[1]):
        rounding.assert_within_contract(values, exact)


def test_a_tile_lies_as_the_table_says():
    """Read with numpy alone, by the byte offsets of kernels/formats.py."""
    head_dim = 128
    k, v = keys_and_values(head_dim, num_blocks=2, num_heads=2)
    raw = np.array(encode(k, v))[1, 1].tobytes()
    codes = np.frombuffer(raw, np.uint8, 128 * 64).reshape(128, 64)
    scales = np.frombuffer(raw, np.float16, 128 * 2, 8192).reshape(128, 2)
    mean = np.frombuffer(raw, np.float16, 128, 8192 + 512)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(128, 128)
    rotated = (nibbles.astype(np.float32) - 7.5) * scales.astype(np.float32).repeat(64, axis=1)
    keys = rotated @ np.array(rotation(head_dim)).T + mean.astype(np.float32)
    exact, _ = rounding.decoded_numbers(encode(k, v), head_dim)
    own = rounding.Exact(exact.truth[1, 128:], exact.variance[1, 128:])
    for found in (mx.array(keys), decode(encode(k, v), head_dim)[0][1, 128:]):
        rounding.assert_within_contract(found, own)
    assert TileLayout(head_dim).tile_bytes == len(raw) == 17_664


@pytest.mark.parametrize(
    ("format", "k_error", "v_error"),
    [("int4c", 0.115, 0.115), ("k8v4", 0.008, 0.115), ("int8", 0.008, 0.008), ("affine4", 0.13, 0.13)],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_format_loses_what_its_bits_lose(format, k_error, v_error, head_dim):
    """Shares of a Gaussian's norm: 16 searched levels 0.107, 256 levels over ±3.5 deviations about 0.007."""
    k, v = keys_and_values(head_dim, num_blocks=3)
    tiles = encode(k, v, format)
    assert tiles.nbytes * 8 / (k.size + v.size) == TileLayout(head_dim, format).bits_per_element
    k2, v2 = decode(tiles, head_dim, format=format)
    spread = k.reshape(k.shape[0], -1, BLOCK_TOKENS, head_dim)
    spread = spread - spread.mean(axis=2, keepdims=True) if format != "affine4" else k
    assert k_error / 2 < float(mx.linalg.norm(k - k2) / mx.linalg.norm(spread)) < k_error
    assert v_error / 2 < relative_error(v, v2) < v_error


def test_affine4_is_what_mlx_makes_of_the_same_numbers():
    k, v = keys_and_values(128)
    tiles = encode(k, v, "affine4")
    for x, decoded in zip((k, v), decode(tiles, 128, format="affine4"), strict=True):
        codes, scales, biases = mx.quantize(x, group_size=64, bits=4)
        stored = (p.astype(mx.float16).astype(mx.float32) for p in (scales, biases))
        assert mx.allclose(decoded, mx.dequantize(codes, *stored, group_size=64, bits=4), atol=1e-6)


@pytest.mark.parametrize(
    ("format", "words"), [("affine4", "head size 80 has no affine4"), ("int5", "none of")]
)
def test_a_format_that_does_not_exist_is_refused(format, words):
    with pytest.raises(ValueError, match=words):
        TileLayout(80, format)


def test_zeros_come_back_as_zeros():
    zeros = mx.zeros((1, BLOCK_TOKENS, 64))
    k, v = decode(encode(zeros, zeros), 64)
    assert mx.all(k == 0)
    assert mx.all(v == 0)


def test_equal_keys_come_back_exactly_and_constant_values_within_their_bits():
    ones = mx.full((1, BLOCK_TOKENS, 64), 3.0)
    k, v = decode(encode(ones, ones), 64)
    assert mx.all(k == 3.0)
    assert relative_error(ones, v) < 0.2


@pytest.mark.parametrize("size", [1e-4, 1e4])
def test_magnitudes_scale_through(size):
    k, v = keys_and_values(64)
    k2, v2 = decode(encode(k * size, v * size), 64)
    assert relative_error(v * size, v2) < 0.12
    assert relative_error(k * size, k2) < 0.12


def test_encoding_block_by_block_gives_the_same_tiles():
    k, v = keys_and_values(64, num_blocks=3)
    whole = encode(k, v)
    for i in range(3):
        part = slice(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
        assert mx.array_equal(encode(k[:, part], v[:, part])[0], whole[i])


def test_part_of_a_block_is_refused():
    with pytest.raises(ValueError, match="whole 128-token blocks"):
        encode(mx.zeros((1, 100, 64)), mx.zeros((1, 100, 64)))


@pytest.mark.parametrize("head_dim", [72, 40, 1024, 63, 176, 160])
def test_a_head_size_without_a_hadamard_form_is_refused(head_dim):
    with pytest.raises(ValueError, match=f"head size {head_dim}"):
        encode(mx.zeros((1, BLOCK_TOKENS, head_dim)), mx.zeros((1, BLOCK_TOKENS, head_dim)))


def test_tiles_of_another_head_size_are_refused():
    k, v = keys_and_values(64)
    with pytest.raises(ValueError, match="not int4c tiles of head size 128"):
        decode(encode(k, v), 128)
