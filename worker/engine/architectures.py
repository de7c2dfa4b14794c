"""Which models the engine serves, and why it refuses the others. Reads a config.json's content alone."""

from __future__ import annotations

from typing import Any

VERIFIED_ARCHITECTURES = ("llama", "mistral", "mixtral", "phi3", "qwen3", "qwen3_moe", "smollm3")
"""Compared with mlx_lm's own generation in tests/worker/engine/test_architectures.py.

Every layer attends to the whole context and keeps plain keys and values.
"""

_KEY_BIAS = (
    "its keys have a bias, whose mean RoPE spreads over all channels, and 4 bits are too few for what is left"
)
_WINDOWS = "it has sliding-window layers, for which the cache has no form yet"
_HYBRID = "some of its layers keep a recurrent state, for which the cache has no form yet"
_LATENT = "it attends to compressed latents and not to keys and values"

WHY_NOT = {
    "qwen2": _KEY_BIAS,
    "qwen2_moe": _KEY_BIAS,
    "gemma2": "it caps its attention scores, which the decode kernel doesn't, and " + _WINDOWS,
    "gemma3": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "gemma3n": _WINDOWS + ", and layers that read another layer's keys and values",
    "gemma4": _WINDOWS + ", and layers that read another layer's keys and values",
    "gemma4_text": _WINDOWS + ", and layers that read another layer's keys and values",
    "gpt_oss": _WINDOWS,
    "qwen3_next": _HYBRID,
    "qwen3_5": _HYBRID,
    "mamba2": "it has no attention",
    "deepseek_v3": _LATENT,
}
"""The reasons for architectures that people ask for; the others are merely not verified."""

_ROPE_SCALING_IGNORED = ("mixtral", "qwen3_moe")
_ROPE_PARAMETERS_READ = ("qwen3",)
"""mlx_lm passes over what is not named here without a word; the model would read wrong positions."""


_HEADS_FILL_THE_WIDTH = ("mixtral", "phi3")


def head_dim(config: dict[str, Any]) -> int:
    """Channels of one head, of a config that `refusal` accepts."""
    stated = None if config["model_type"] in _HEADS_FILL_THE_WIDTH else config.get("head_dim")
    return int(stated or config["hidden_size"] // config["num_attention_heads"])


def refusal(config: dict[str, Any]) -> str | None:
    """Why a model with this config cannot be served, as the predicate of a sentence; None if it can."""
    architecture = config.get("model_type", "unknown")
    if architecture not in VERIFIED_ARCHITECTURES:
        reason = WHY_NOT.get(architecture)
        return (
            f"has the architecture {architecture!r}, which is not verified{': ' + reason if reason else ''}"
        )
    if "sliding_attention" in config.get("layer_types", ()):
        return "has sliding-window layers, for which the cache has no form yet"
    window, context = config.get("sliding_window"), config.get("max_position_embeddings")
    if not isinstance(context, int):
        return f"states max_position_embeddings as {context!r} in config.json; expected the context in tokens"
    if window and window < context and config.get("use_sliding_window", True) and "layer_types" not in config:
        return (
            f"attends to a window of {window:,} tokens in a context of {context:,}, "
            "for which the cache has no form yet"
        )
    if config.get("attention_bias") and architecture not in ("qwen3", "qwen3_moe"):
        return f"sets attention_bias: {_KEY_BIAS}"
    if config.get("rope_scaling") and architecture in _ROPE_SCALING_IGNORED:
        return f"sets rope_scaling, which mlx_lm does not read for {architecture!r}"
    if (
        config.get("rope_parameters")
        and config.get("rope_theta") is None
        and architecture not in _ROPE_PARAMETERS_READ
    ):
        return f"states rope_theta under rope_parameters alone, unread by mlx_lm for {architecture!r}"
    return None
