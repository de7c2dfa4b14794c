"""The real SmolLM2 folder, made once in the user's cache, and a tiny GGUF for what must be damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from worker import models


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in the default models folder, where every test shares it."""
    return models.ensure("smollm2-135m-instruct", models.default_models_dir())


TINY = {
    "general.architecture": "llama",
    "llama.block_count": mx.array(1, mx.uint32),
    "llama.embedding_length": mx.array(32, mx.uint32),
    "llama.feed_forward_length": mx.array(64, mx.uint32),
    "llama.attention.head_count": mx.array(2, mx.uint32),
    "llama.attention.head_count_kv": mx.array(1, mx.uint32),
    "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
    "llama.context_length": mx.array(128, mx.uint32),
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_end|>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": mx.array([3, 3, 1, 1, 1], mx.int32),
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": mx.array(1, mx.uint32),
}


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """write_gguf(**{metadata key: value or None}) -> path of a one-layer llama GGUF; None drops the key."""

    def write(name: str = "tiny.gguf", tensors: dict[str, mx.array] | None = None, **changes: Any) -> Path:
        metadata = {key: value for key, value in (TINY | changes).items() if value is not None}
        shapes = {
            "token_embd": (5, 32),
            "output_norm": (32,),
            "blk.0.attn_norm": (32,),
            "blk.0.attn_q": (32, 32),
            "blk.0.attn_k": (16, 32),
            "blk.0.attn_v": (16, 32),
            "blk.0.attn_output": (32, 32),
            "blk.0.ffn_norm": (32,),
            "blk.0.ffn_gate": (64, 32),
            "blk.0.ffn_up": (64, 32),
            "blk.0.ffn_down": (32, 64),
        }
        mx.random.seed(0)
        weights = {f"{key}.weight": mx.random.normal(shape) for key, shape in shapes.items()}
        path = tmp_path / name
        mx.save_gguf(str(path), weights | (tensors or {}), metadata)
        return path

    return write
