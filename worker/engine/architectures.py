"""Which models the engine serves, and why it refuses the others. Reads a config.json's content alone."""

from __future__ import annotations

from typing import Any

from worker.engine.shapes import KEYS_OF_4_BITS, layer_types, text_config

VERIFIED_ARCHITECTURES = (
    "gemma3",
    "gemma3_text",
    "gemma4",
    "gemma4_text",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Compared with mlx_lm's own generation in tests/worker/engine/test_architectures.py."""

_HYBRID = "some of its layers keep a recurrent state, for which the cache has no form yet"
_LATENT = "it attends to compressed latents and not to keys and values"

WHY_NOT = {
    "gemma2": "it caps its attention scores, which the decode kernel doesn't",
    "gemma3n": "its layers pass four streams of hidden states, for which the prefill has no walk yet",
    "qwen3_next": _HYBRID,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID,
    "falcon_h1": _HYBRID,
    "granitemoehybrid": _HYBRID,
    "jamba": _HYBRID,
    "lfm2": _HYBRID,
    "nemotron_h": _HYBRID,
    "mamba2": "it has no attention",
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm4_moe_lite": _LATENT,
    "kimi_linear": _LATENT,
}
"""The reasons for architectures that people ask for; the others are merely not verified."""

_ROPE_SCALING_IGNORED = ("mixtral", "qwen3_moe")
_ROPE_PARAMETERS_READ = ("qwen3", "gemma4_text")
_LAYER_TYPES_READ = ("gemma3_text", "gemma4_text", "gpt_oss", "llama", "mistral")
"""mlx_lm passes over what is not named here without a word; the model would compute something else."""
_KEYS_NORMALISED = ("qwen3", "qwen3_moe")
"""Behind the bias."""


def is_unverified(architecture: str) -> bool:
    """Whether nothing speaks against an architecture but that nobody has verified it."""
    return architecture not in VERIFIED_ARCHITECTURES and architecture not in WHY_NOT


def refusal(config: dict[str, Any], unverified: bool = False) -> str | None:
    """Why a model with this config cannot be served, as the predicate of a sentence; None if it can.

    Args:
        unverified: whether an architecture may be one that `is_unverified`.
    """
    architecture = config.get("model_type", "unknown")
    if architecture not in VERIFIED_ARCHITECTURES and not (unverified and is_unverified(architecture)):
        reason = WHY_NOT.get(architecture)
        return (
            f"has the architecture {architecture!r}, which is not verified{': ' + reason if reason else ''}"
        )
    config = text_config(config)
    architecture = config["model_type"]
    context = config.get("max_position_embeddings")
    if not isinstance(context, int):
        return f"states max_position_embeddings as {context!r} in config.json; expected the context in tokens"
    if is_unverified(architecture) and _states_windows(config):
        return "has layers with a window, which are served in verified architectures alone"
    if reason := _window_refusal(config):
        return reason
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(cap) and (architecture, cap) != ("gemma4_text", "final_logit_softcapping"):
            return f"sets {cap}, which mlx_lm does not read for {architecture!r}"
    if config.get("use_bidirectional_attention") in (True, "all"):
        return "attends to tokens ahead of a query, so no answer can be generated with it"
    if (
        config.get("attention_bias")
        and architecture in KEYS_OF_4_BITS
        and architecture not in _KEYS_NORMALISED
    ):
        return (
            "sets attention_bias: its keys have a bias, for which 4 bits may be too few, "
            f"and {architecture!r} is not verified with keys of 8"
        )
    if config.get("rope_scaling") and architecture in _ROPE_SCALING_IGNORED:
        return f"sets rope_scaling, which mlx_lm does not read for {architecture!r}"
    if (
        config.get("rope_parameters")
        and config.get("rope_theta") is None
        and architecture not in _ROPE_PARAMETERS_READ
    ):
        return f"states rope_theta under rope_parameters alone, unread by mlx_lm for {architecture!r}"
    return None


def _states_windows(config: dict[str, Any]) -> bool:
    """Whether any of a text config's words for windows is set; few tokens would not show that they are."""
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        return True
    sizes = [value for key, value in config.items() if "window" in key and type(value) is int]
    in_use = config.get("use_sliding_window", True)
    return bool(in_use) and any(0 < size < config["max_position_embeddings"] for size in sizes)


def _window_refusal(config: dict[str, Any]) -> str | None:
    """Why the windows that a text config states cannot be served; None if they can, or if there are none."""
    architecture, context = config["model_type"], config["max_position_embeddings"]
    stated, window = config.get("layer_types"), config.get("sliding_window")
    if not stated and architecture not in ("gemma3_text", "gemma4_text", "gpt_oss"):
        if window and window < context and config.get("use_sliding_window", True):
            return (
                f"attends to a window of {window:,} tokens in a context of {context:,}, "
                f"which mlx_lm does not do for {architecture!r} without layer_types"
            )
        return None
    if not isinstance(config.get("num_hidden_layers"), int):
        return None  # missed by whoever needs it
    if stated and "sliding_attention" in stated and architecture not in _LAYER_TYPES_READ:
        return f"has sliding-window layers, which mlx_lm does not make for {architecture!r}"
    if stated and (unknown := set(stated) - {"full_attention", "sliding_attention"}):
        return f"has layers of the kind {sorted(unknown)[0]!r}, for which the cache has no form"
    types = layer_types(config)
    if stated and architecture in _LAYER_TYPES_READ and list(stated) != types:
        return f"states layer_types other than those that mlx_lm makes for {architecture!r}"
    if "full_attention" not in types:
        return "attends to a window in every layer; the cache needs one that sees all"
    if "sliding_attention" in types and not (isinstance(window, int) and window > 1):
        return f"states sliding_window as {window!r} in config.json; expected tokens, at least 2"
    return None
