"""The KV formats: how 128 tokens of one KV head become one tile of bytes.

A layer's compressed KV is one array `tiles` of shape (num_blocks, num_kv_heads, tile_words) uint32,
the same in memory and on disk. A tile holds one KV head of one block, little-endian:

    | part      | bytes                | meaning                                                      |
    |-----------|----------------------|--------------------------------------------------------------|
    | k_codes   | 128 * D * k_bits / 8 | [token][channel] codes, channel 0 in the lowest bits         |
    | k_scales  | 128 * G * 2          | [token][group] float16                                       |
    | k_mean    | D * 2                | [channel] float16, mean of the block's keys, not rotated     |
    | v_codes   | 128 * D * v_bits / 8 | as k_codes                                                   |
    | v_scales  | 128 * G * 2          | as k_scales                                                  |

with G = ceil(D / 64) groups of D / G channels.

    | format  | k_bits | v_bits | bits per element at D = 64 and 128 |
    |---------|--------|--------|------------------------------------|
    | int4c   | 4      | 4      | 4.31                               |
    | k8v4    | 8      | 4      | 6.31                               |
    | int8    | 8      | 8      | 8.31                               |
    | affine4 | 4      | 4      | 4.50                               |

The first three code x as c in 0..2^bits - 1 with x ≈ (c − midrise) · s, midrise = 7.5 or 127.5, in the
rotated basis x' = x · R, where R = diag(signs) · H / √D. H is the Hadamard matrix that
`mx.hadamard_transform` applies and `signs` a fixed vector of ±1. Keys are centred on the block's mean
before they are rotated.

`affine4` is MLX's own: x ≈ c · s + b per token and 64 channels, neither rotated nor centred. Biases
[token][group] float16 follow the scales, of keys in the place of k_mean and of values at the end. It is
there to be compared with.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import mlx.core as mx

BLOCK_TOKENS = 128
"""Tokens encoded and hashed together."""

Format = Literal["int4c", "k8v4", "int8", "affine4"]
FORMATS: tuple[Format, ...] = get_args(Format)


def midrise(bits: int) -> float:
    """The code that stands for zero: halfway between the two middle ones, 7.5 or 127.5."""
    return 2.0 ** (bits - 1) - 0.5


@dataclass(frozen=True)
class TileLayout:
    """Where the parts of a tile stand, in 32-bit words.

    Raises:
        ValueError: if the head size has no tile of this format.
    """

    head_dim: int
    format: Format = "int4c"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format {self.format!r} is none of: {', '.join(FORMATS)}")
        rotation(self.head_dim)
        if not self.rotated and self.group_size not in (32, 64, 128):
            raise ValueError(
                f"head size {self.head_dim} has no affine4 form: MLX quantises groups of 32, 64 or 128 "
                f"channels, not of {self.group_size}; use int4c"
            )

    @property
    def rotated(self) -> bool:
        """Whether codes stand for rotated, centred channels, or for affine ones as they are."""
        return self.format != "affine4"

    @property
    def k_bits(self) -> int:
        return 8 if self.format in ("k8v4", "int8") else 4

    @property
    def v_bits(self) -> int:
        return 8 if self.format == "int8" else 4

    @property
    def num_groups(self) -> int:
        return -(-self.head_dim // 64)

    @property
    def group_size(self) -> int:
        return self.head_dim // self.num_groups

    @property
    def k_codes_words(self) -> int:
        return BLOCK_TOKENS * self.head_dim * self.k_bits // 32

    @property
    def v_codes_words(self) -> int:
        return BLOCK_TOKENS * self.head_dim * self.v_bits // 32

    @property
    def scales_words(self) -> int:
        """Of keys or of values; affine biases take as many."""
        return BLOCK_TOKENS * self.num_groups // 2

    @property
    def k_offset_words(self) -> int:
        """The mean, or the keys' affine biases."""
        return self.head_dim // 2 if self.rotated else self.scales_words

    @property
    def k_words(self) -> int:
        """The first word of the value part."""
        return self.k_codes_words + self.scales_words + self.k_offset_words

    @property
    def tile_words(self) -> int:
        return self.k_words + self.v_codes_words + self.scales_words * (1 if self.rotated else 2)

    @property
    def tile_bytes(self) -> int:
        return 4 * self.tile_words

    @property
    def bits_per_element(self) -> float:
        """Bits spent on each number of K and V, scales and means included."""
        return 8 * self.tile_bytes / (2 * BLOCK_TOKENS * self.head_dim)


def layout_of_blocks(k: mx.array, v: mx.array, format: Format = "int4c") -> TileLayout:
    """The layout of the tiles that keys and values (num_kv_heads, tokens, head_dim) become.

    Raises:
        ValueError: if they are not whole blocks of one shape, or the head size has no form in this format.
    """
    if k.shape[1] % BLOCK_TOKENS or k.shape != v.shape:
        raise ValueError(
            f"keys {k.shape} and values {v.shape} must have one shape, whole {BLOCK_TOKENS}-token blocks"
        )
    return TileLayout(k.shape[2], format)


def layout_of_tiles(tiles: mx.array, head_dim: int, format: Format = "int4c") -> TileLayout:
    """The layout of tiles (num_blocks, num_kv_heads, tile_words) uint32.

    Raises:
        ValueError: if the last axis isn't the tile size of this head size.
    """
    layout = TileLayout(head_dim, format)
    if tiles.dtype != mx.uint32 or tiles.shape[-1] != layout.tile_words:
        raise ValueError(
            f"tiles {tiles.shape} {tiles.dtype} are not {format} tiles of head size {head_dim}: "
            f"expected uint32 with {layout.tile_words} words"
        )
    return layout


@cache
def rotation(head_dim: int) -> mx.array:
    """The orthonormal R of the int4c format, (head_dim, head_dim) float32: x' = x @ R, x = x' @ R.T.

    The signs are the bits of SHAKE-256("longleaf int4c"), most significant first, 1 meaning −1, so that
    every version and backend agrees on them.

    Raises:
        ValueError: if `mx.hadamard_transform` or the packing has no form for this head size.
    """
    m = head_dim
    while m % 2 == 0:
        m //= 2
    uneven_groups = head_dim % -(-head_dim // 64)
    if head_dim % 16 or uneven_groups or head_dim > 512 or m not in (1, 3, 5, 7):
        raise ValueError(
            f"head size {head_dim} has no int4c form: it must be a multiple of 16 up to 512, of even "
            "groups of at most 64, and 1, 12, 20 or 28 times a power of two "
            "(64, 80, 96, 112, 128, 192, 256, 512)"
        )
    digest = hashlib.shake_256(b"longleaf int4c").digest(head_dim // 8)
    signs = mx.array([-1.0 if digest[i // 8] >> (7 - i % 8) & 1 else 1.0 for i in range(head_dim)])
    matrix = signs[:, None] * mx.hadamard_transform(mx.eye(head_dim))
    mx.eval(matrix)
    return matrix
