"""How many bytes a model's weights take, from config.json's content alone. Imports no MLX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from worker.engine.shapes import layer_shapes, layer_types, text_config

_TIED_BY_DEFAULT = ("gemma3_text", "gemma4_text", "llama", "mistral", "smollm3")


def weights_bytes(config: dict[str, Any], on_cpu: bool = False) -> int:
    """Bytes of the weights in memory, scales and biases of quantised ones included.

    Raises:
        KeyError: if the config lacks a size.
    """
    config = text_config(config)
    quantization = config.get("quantization") or {}
    element = element_bytes(config)
    total = 0
    for path, num_rows, num_columns in _matrices(config):
        own = quantization.get(path) or quantization.get(f"language_model.{path}") or quantization
        own = quantization if own is True else own
        if on_cpu:
            total += 4 * num_rows * num_columns
        elif not own or num_columns % own["group_size"]:
            total += element * num_rows * num_columns
        else:
            # Affine groups have a scale and a bias, the float formats a scale of one byte.
            per_group = 2 * element if own.get("mode", "affine") == "affine" else 1
            num_groups = num_columns // own["group_size"]
            total += num_rows * (num_columns * own["bits"] // 8 + num_groups * per_group)
    return int(total + _num_vector_elements(config) * (4 if on_cpu else element))


def largest_dense_layer_bytes(config: dict[str, Any]) -> int:
    """Bytes of the largest layer's matrices made dense, experts left out."""
    config = text_config(config)
    sizes: dict[str, int] = {}
    for path, num_rows, num_columns in _matrices(config):
        if path.startswith("model.layers."):
            layer = path.split(".")[2]
            if ".self_attn." in path or not experts(config, int(layer))[0]:
                sizes[layer] = sizes.get(layer, 0) + element_bytes(config) * num_rows * num_columns
    return max(sizes.values())


def element_bytes(config: dict[str, Any]) -> int:
    """Of a weight or an activation that is not quantised."""
    return 4 if (config.get("torch_dtype") or config.get("dtype")) == "float32" else 2


def experts(config: dict[str, Any], layer: int) -> tuple[int, int]:
    """(number of experts, 0 in a dense layer; inner width) of a text config."""
    architecture = config["model_type"]
    if architecture in ("mixtral", "gpt_oss"):
        return int(config["num_local_experts"]), int(config["intermediate_size"])
    if architecture == "gemma4_text" and config.get("enable_moe_block"):
        return int(config["num_experts"]), int(config["moe_intermediate_size"])
    if architecture == "qwen3_moe":
        sparse = (layer + 1) % config["decoder_sparse_step"] == 0
        if config["num_experts"] and sparse and layer not in config["mlp_only_layers"]:
            return int(config["num_experts"]), int(config["moe_intermediate_size"])
    return 0, int(config["intermediate_size"])


def dense_width(config: dict[str, Any], layer: int) -> int:
    """Inner width of a layer's dense part; 0 if its experts are all that it has."""
    if config["model_type"] == "gemma4_text":
        borrows = layer_shapes(config)[layer].source is not None
        return int(config["intermediate_size"]) * (2 if borrows and config["use_double_wide_mlp"] else 1)
    num_experts, inner = experts(config, layer)
    return 0 if num_experts else inner


_MLP_PATHS = {"mixtral": "block_sparse_moe", "gemma4_text": "experts"}
_EXPERT_PATHS = {"gpt_oss": ".experts", "gemma4_text": ".switch_glu"}
_ROUTER_PATHS = {"gpt_oss": "mlp.router", "gemma4_text": "router.proj", "mixtral": "block_sparse_moe.gate"}


def _matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(path in the model, rows, columns) of every matrix; the experts of a layer are one."""
    width, architecture = config["hidden_size"], config["model_type"]
    num_layers, per_layer = config["num_hidden_layers"], _input_width(config)
    yield "model.embed_tokens", config["vocab_size"], width
    if architecture == "gpt_oss" or not config.get("tie_word_embeddings", architecture in _TIED_BY_DEFAULT):
        yield "lm_head", config["vocab_size"], width
    if per_layer:
        vocab = config["vocab_size_per_layer_input"]
        yield "model.embed_tokens_per_layer", vocab, num_layers * per_layer
        yield "model.per_layer_model_projection", num_layers * per_layer, width
    types = layer_types(config)
    for layer, shape in enumerate(layer_shapes(config)):
        path = f"model.layers.{layer}"
        num_q, num_kv = config["num_attention_heads"] * shape.head_dim, shape.num_kv_heads * shape.head_dim
        if architecture == "phi3":
            yield f"{path}.self_attn.qkv_proj", num_q + 2 * num_kv, width
        else:
            yield f"{path}.self_attn.q_proj", num_q, width
        if architecture != "phi3" and shape.source is None:
            yield f"{path}.self_attn.k_proj", num_kv, width
            if not (config.get("attention_k_eq_v") and types[layer] == "full_attention"):
                yield f"{path}.self_attn.v_proj", num_kv, width
        yield f"{path}.self_attn.o_proj", width, num_q
        num_experts, inner = experts(config, layer)
        if num_experts:
            yield f"{path}.{_ROUTER_PATHS.get(architecture, 'mlp.gate')}", num_experts, width
            mlp = _MLP_PATHS.get(architecture, "mlp") + _EXPERT_PATHS.get(architecture, ".switch_mlp")
            yield f"{path}.{mlp}.gate_proj", num_experts * inner, width
            yield f"{path}.{mlp}.up_proj", num_experts * inner, width
            yield f"{path}.{mlp}.down_proj", num_experts * width, inner
        if inner := dense_width(config, layer):
            if architecture == "phi3":
                yield f"{path}.mlp.gate_up_proj", 2 * inner, width
            else:
                yield f"{path}.mlp.gate_proj", inner, width
                yield f"{path}.mlp.up_proj", inner, width
            yield f"{path}.mlp.down_proj", width, inner
        if per_layer:
            yield f"{path}.per_layer_input_gate", per_layer, width
            yield f"{path}.per_layer_projection", width, per_layer


def _num_vector_elements(config: dict[str, Any]) -> int:
    """Norms, biases and scales: what is never quantised."""
    width, architecture, per_layer = config["hidden_size"], config["model_type"], _input_width(config)
    total = width + per_layer
    for layer, shape in enumerate(layer_shapes(config)):
        num_q, num_kv = config["num_attention_heads"] * shape.head_dim, shape.num_kv_heads * shape.head_dim
        num_experts, inner = experts(config, layer)
        total += 2 * width
        if architecture == "qwen2":
            total += num_q + 2 * num_kv
        if architecture.startswith("qwen3"):
            total += 2 * shape.head_dim
        if architecture == "gemma3_text":
            total += 2 * width + 2 * shape.head_dim
        if architecture == "gemma4_text":
            total += 2 * width + shape.head_dim * (2 if shape.source is None else 1) + 1
            total += width if per_layer else 0
            total += 4 * width + num_experts if num_experts else 0
        if architecture == "gpt_oss":
            total += num_q + 2 * num_kv + width + config["num_attention_heads"]
            total += num_experts * (1 + 2 * inner + width)
    return int(total)


def _input_width(config: dict[str, Any]) -> int:
    """What gemma4's layers are told of a token beside its hidden state."""
    return int(config["hidden_size_per_layer_input"] or 0) if config["model_type"] == "gemma4_text" else 0
