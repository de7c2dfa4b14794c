"""What MLX reads from the environment when it is first used. Must not import MLX."""

from __future__ import annotations

import os

_WANTED = {
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1024",
    "CUDA_VISIBLE_DEVICES": "0",
}


def prepare_mlx() -> None:
    """Let MLX serve a process that meets new shapes all its life; call before MLX is imported.

    On NVIDIA GPUs its caches count what they ever took in and raise an error from twice their size on:
    attention's, of 256 plans, after some five hundred pairs of lengths, of which every document and every
    question has a new one. A document of 1M tokens has 512 chunks, each a plan, which every layer passes
    through in turn: a cache of fewer would find none of them. Where MLX sees more than one GPU it ends the
    process when the host reads an array. What the environment says already stands.
    """
    for name, value in _WANTED.items():
        os.environ.setdefault(name, value)
