"""What MLX reads from the environment, the GPUs when it is imported, the rest later. Must not import MLX."""

from __future__ import annotations

import os

WANTED = {
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_SDPA_CACHE_SIZE": "1024",
    "CUDA_VISIBLE_DEVICES": "0",
}


def prepare_mlx() -> None:
    """Let MLX serve a process that meets new shapes all its life; call before MLX is imported.

    On NVIDIA GPUs its caches count what they ever took in and raise an error from twice their size on:
    attention's, of 256 plans, after some five hundred pairs of lengths, of which every document and every
    question has a new one. A document of 1M tokens has 512 chunks, each a plan, which every layer passes
    through in turn: a cache of fewer would find none of them. And MLX should see one GPU: where it saw two,
    the first prompt of a model ended the process. What the environment says already stands.
    """
    for name, value in WANTED.items():
        os.environ.setdefault(name, value)
