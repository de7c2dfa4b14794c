"""What each layer of a model keeps of a token, from config.json's content alone. Imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

_HEADS_FILL_THE_WIDTH = ("mixtral", "phi3", "qwen2")
KEYS_OF_4_BITS = (
    "gemma3_text",
    "gemma4_text",
    "llama",
    "mistral",
    "mixtral",
    "phi3",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
"""Whose keys have no bias, or are normalised behind it. Elsewhere RoPE may have turned one, which is no
block's mean any more then."""
KEYS_OF_8_BITS = ("gpt_oss",)
"""In all layers: no real one was looked at. Of what stands in neither, loading finds which layers need 8."""
_WRAPPED = {"gemma3": "gemma3_text", "gemma4": "gemma4_text"}
"""Text beside vision: the sizes stand in `text_config`."""
_WRAPPERS_HEADS = {"gemma3_text": (8, 4), "gemma4_text": (8, 1)}
"""Query and KV heads where a wrapped config states none, as mlx_lm has them."""
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    "gemma4_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 20,
        "sliding_window": 512,
        "sliding_window_pattern": 5,
        "max_position_embeddings": 131072,
        "use_double_wide_mlp": True,
        "tie_word_embeddings": True,
    },
    "gpt_oss": {"sliding_window": 128},
    "qwen2": {"max_position_embeddings": 32768, "tie_word_embeddings": True},
}
"""What published configs leave out, as mlx_lm fills it in."""


@dataclass(frozen=True)
class LayerShape:
    """The keys and values of one layer."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """A query sees its own token and the `window - 1` before it; None where it sees all."""
    source: int | None = None
    """The layer whose keys and values this one reads, having none of its own."""
    format: Literal["int4c", "k8v4"] = "int4c"
    """Of its blocks, one of `kernels.FORMATS`; from a config, with the most bits that the layer may need."""


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the text model's sizes at its top, and those stated that mlx_lm would fill in."""
    architecture = config.get("model_type", "unknown")
    if architecture in _WRAPPED:
        inner = _WRAPPED[architecture]
        num_q_heads, num_kv_heads = _WRAPPERS_HEADS[inner]
        outer = {key: config[key] for key in ("quantization", "torch_dtype", "dtype") if key in config}
        heads = {"num_attention_heads": num_q_heads, "num_key_value_heads": num_kv_heads}
        whole = outer | {"max_position_embeddings": 131072} | heads | config.get("text_config", {})
        whole["vocab_size"] = config.get("vocab_size", 262208 if architecture == "gemma3" else 262144)
        config = whole | {"model_type": inner}
        architecture = inner
    stated = {key: value for key, value in config.items() if value is not None}
    return _DEFAULTS.get(architecture, {}) | stated


def head_dim(config: dict[str, Any]) -> int:
    """Channels of one head, of a text config whose architecture is verified."""
    stated = None if config["model_type"] in _HEADS_FILL_THE_WIDTH else config.get("head_dim")
    return int(stated or config["hidden_size"] // config["num_attention_heads"])


def layer_types(config: dict[str, Any]) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer, as mlx_lm's model has it."""
    num_layers, architecture = config["num_hidden_layers"], config["model_type"]
    if architecture == "gemma3_text":
        pattern = config["sliding_window_pattern"]
        return [_type((i + 1) % pattern != 0) for i in range(num_layers)]
    if architecture in ("gemma4_text", "gpt_oss", "llama", "mistral") and config.get("layer_types"):
        return list(config["layer_types"])
    if architecture == "gemma4_text":
        pattern = config["sliding_window_pattern"]
        return [_type(i % pattern != pattern - 1) for i in range(num_layers)]
    return [_type(architecture == "gpt_oss" and i % 2 == 0) for i in range(num_layers)]


def layer_shapes(config: dict[str, Any]) -> list[LayerShape]:
    """The shape of every layer, of a config that `architectures.refusal` accepts.

    Raises:
        KeyError: if the config lacks a size.
    """
    config = text_config(config)
    num_kv_heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
    types, architecture = layer_types(config), config["model_type"]
    format: Literal["int4c", "k8v4"] = "int4c" if architecture in KEYS_OF_4_BITS else "k8v4"
    shapes = []
    for kind in types:
        dim, heads = head_dim(config), num_kv_heads
        if architecture == "gemma4_text" and kind == "full_attention":
            dim = int(config["global_head_dim"] or dim)
            if config.get("attention_k_eq_v"):
                heads = int(config.get("num_global_key_value_heads") or heads)
        window = int(config["sliding_window"]) if kind == "sliding_attention" else None
        shapes.append(LayerShape(heads, dim, window, format=format))
    num_shared = config["num_kv_shared_layers"] if architecture == "gemma4_text" else 0
    first = len(shapes) - num_shared
    for i in range(first, len(shapes)):
        source = max(j for j in range(first) if types[j] == types[i])
        shapes[i] = LayerShape(shapes[source].num_kv_heads, shapes[source].head_dim, shapes[i].window, source)
    return shapes


def _type(slides: bool) -> str:
    return "sliding_attention" if slides else "full_attention"
