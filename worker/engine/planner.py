"""How much memory a model needs for a number of tokens, from config.json's content alone.

Imports no MLX and reads no weights. The sizes of the KV format stand here once more, in bytes, and a test
holds them against the engine's own. What lives at once in a prefill was found by measuring peaks on a CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from worker.engine.architectures import head_dim

SINK_TOKENS, BLOCK_TOKENS, TAIL_TOKENS, QUERY_TOKENS = 64, 128, 2048, 16
CHUNK_TOKENS, CPU_CHUNK_TOKENS = 2048, 256
SUFFIX_TOKENS, OUTPUT_TOKENS = 512, 512
"""An instruction and an answer of usual length, where the caller knows no better."""
_FUSED_HEAD_DIMS = (64, 80, 128)
"""Head sizes of MLX's fused prefill attention on a GPU; for others it lays out all scores of a chunk."""
_TIED_BY_DEFAULT = ("llama", "mistral", "smollm3")


@dataclass(frozen=True)
class Plan:
    """What `num_tokens` of prompt and answer need; all in bytes."""

    num_tokens: int
    weights_bytes: int
    kv_fp16_bytes_per_token: int
    """What an ordinary cache takes, for comparison."""
    kv_bytes_per_token: float
    """int4c with its scales and means."""
    kv_bytes: int
    """int4c blocks and dense sinks and tails of all layers."""
    hidden_bytes: int
    """The prefix's hidden states, kept from layer to layer."""
    layer_bytes: int
    """One layer's exact keys and values."""
    activations_bytes: int
    """The widest moment of one chunk in one layer."""
    working_bytes: int
    """The most that prefill needs beside weights and KV."""

    @property
    def kv_fp16_bytes(self) -> int:
        return self.kv_fp16_bytes_per_token * self.num_tokens

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.working_bytes


def plan(
    config: dict[str, Any],
    num_tokens: int,
    num_suffix: int = SUFFIX_TOKENS,
    num_output: int = OUTPUT_TOKENS,
    on_cpu: bool = False,
) -> Plan:
    """Predict the peak of one request.

    Args:
        config: of an architecture that `architectures.refusal` accepts.
        num_tokens: prompt and answer together.
        num_suffix: tokens of the prompt behind the last whole block of the reusable prefix.
        num_output: tokens of the answer.
        on_cpu: whether weights and activations become dense float32, as they do there.

    Raises:
        KeyError: if the config lacks a size.
    """
    element = 4 if on_cpu else _element_bytes(config)
    dim, num_layers, width = head_dim(config), config["num_hidden_layers"], config["hidden_size"]
    num_kv_heads = _num_kv_heads(config)
    num_kv = 2 * num_kv_heads * dim  # numbers that a token leaves in a layer
    chunk = min(CPU_CHUNK_TOKENS if on_cpu else CHUNK_TOKENS, num_tokens)

    num_new = min(chunk, num_suffix)
    num_tail = _tail_room(num_suffix, num_output, num_new)
    num_behind = min(num_tokens, TAIL_TOKENS, num_suffix + num_output)  # dense, in no block
    num_blocks = -(-max(0, num_tokens - SINK_TOKENS - num_behind) // BLOCK_TOKENS)
    dense_bytes = (SINK_TOKENS + num_tail) * num_kv * element
    kv_bytes = num_layers * (num_blocks * num_kv_heads * _tile_bytes(dim) + dense_bytes)

    hidden_bytes = num_tokens * width * element
    layer_bytes = num_tokens * num_kv * element
    activations_bytes = chunk * _widest_activation(config) * element
    if not on_cpu and dim not in _FUSED_HEAD_DIMS:
        activations_bytes += config["num_attention_heads"] * chunk * num_tokens * element
    # Stage one: a chunk passes a layer, or the encoder copies the layer's keys and values.
    stage_one = hidden_bytes + layer_bytes + max(activations_bytes, layer_bytes)
    # Stage two: the layer is decoded, joined with its sinks and then with its tail. The new tokens' keys and
    # values of all layers wait for one evaluation.
    waiting = num_layers * num_kv * element * num_new
    stage_two = 3 * layer_bytes + activations_bytes * num_new // chunk + waiting
    return Plan(
        num_tokens=num_tokens,
        weights_bytes=weights_bytes(config, on_cpu),
        kv_fp16_bytes_per_token=2 * num_kv * num_layers,
        kv_bytes_per_token=num_layers * num_kv_heads * _tile_bytes(dim) / BLOCK_TOKENS,
        kv_bytes=kv_bytes,
        hidden_bytes=hidden_bytes,
        layer_bytes=layer_bytes,
        activations_bytes=activations_bytes,
        working_bytes=max(stage_one, stage_two),
    )


def most_tokens(
    config: dict[str, Any],
    memory_bytes: int,
    num_suffix: int = SUFFIX_TOKENS,
    num_output: int = OUTPUT_TOKENS,
    on_cpu: bool = False,
) -> int:
    """The largest number of tokens, up to the model's context, whose plan fits; 0 if none does."""
    low, high = 0, config["max_position_embeddings"]
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan(config, middle, num_suffix, num_output, on_cpu).total_bytes <= memory_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return int(low)


def weights_bytes(config: dict[str, Any], on_cpu: bool = False) -> int:
    """Bytes of the weights in memory, scales and biases of quantised ones included."""
    quantization = config.get("quantization") or {}
    element = _element_bytes(config)
    total = 0
    for path, num_rows, num_columns in _matrices(config):
        own = quantization.get(path, quantization)
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
    # Norms: two in a layer, one behind the last, and those of queries and keys.
    num_norms = (2 * config["num_hidden_layers"] + 1) * config["hidden_size"]
    if config["model_type"].startswith("qwen3"):
        num_norms += 2 * config["num_hidden_layers"] * head_dim(config)
    return int(total + num_norms * (4 if on_cpu else element))


def machine_bytes() -> int:
    """The memory of this machine."""
    return int(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")


def _tail_room(num_suffix: int, num_output: int, num_new: int) -> int:
    """Tokens that a layer's tail has room for at its largest: the buffer doubles up to its limit."""
    room = max(BLOCK_TOKENS + QUERY_TOKENS, num_new)
    while room < num_suffix + num_output and room < TAIL_TOKENS + QUERY_TOKENS:
        room = min(2 * room, TAIL_TOKENS + QUERY_TOKENS)
    # A chunk is appended before anything is encoded.
    return max(room, min(TAIL_TOKENS + num_new, num_suffix))


def _matrices(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(path in the model, rows, columns) of every matrix; the experts of a layer are one."""
    width, dim = config["hidden_size"], head_dim(config)
    num_q, num_kv = config["num_attention_heads"] * dim, _num_kv_heads(config) * dim
    yield "model.embed_tokens", config["vocab_size"], width
    if not config.get("tie_word_embeddings", config["model_type"] in _TIED_BY_DEFAULT):
        yield "lm_head", config["vocab_size"], width
    for layer in range(config["num_hidden_layers"]):
        path = f"model.layers.{layer}"
        if config["model_type"] == "phi3":
            yield f"{path}.self_attn.qkv_proj", num_q + 2 * num_kv, width
        else:
            yield f"{path}.self_attn.q_proj", num_q, width
            yield f"{path}.self_attn.k_proj", num_kv, width
            yield f"{path}.self_attn.v_proj", num_kv, width
        yield f"{path}.self_attn.o_proj", width, num_q
        mlp = f"{path}.{'block_sparse_moe' if config['model_type'] == 'mixtral' else 'mlp'}"
        num_experts, inner = _experts(config, layer)
        if num_experts:
            yield f"{mlp}.gate", num_experts, width
            mlp += ".switch_mlp"
        num_experts = num_experts or 1
        if config["model_type"] == "phi3":
            yield f"{mlp}.gate_up_proj", 2 * inner, width
        else:
            yield f"{mlp}.gate_proj", num_experts * inner, width
            yield f"{mlp}.up_proj", num_experts * inner, width
        yield f"{mlp}.down_proj", num_experts * width, inner


def _experts(config: dict[str, Any], layer: int) -> tuple[int, int]:
    """(number of experts, 0 in a dense layer; inner width)."""
    if config["model_type"] == "mixtral":
        return int(config["num_local_experts"]), int(config["intermediate_size"])
    if config["model_type"] == "qwen3_moe":
        sparse = (layer + 1) % config["decoder_sparse_step"] == 0
        if config["num_experts"] and sparse and layer not in config["mlp_only_layers"]:
            return int(config["num_experts"]), int(config["moe_intermediate_size"])
    return 0, int(config["intermediate_size"])


def _widest_activation(config: dict[str, Any]) -> int:
    """Numbers per token that live at once in the widest moment of a layer."""
    width, dim = config["hidden_size"], head_dim(config)
    # Before and after RoPE, and the attention's output.
    widest = 3 * config["num_attention_heads"] * dim + 4 * _num_kv_heads(config) * dim
    for layer in range(config["num_hidden_layers"]):
        num_experts, inner = _experts(config, layer)
        if num_experts:
            # A token is copied for each of its experts, and so are their outputs until they are summed.
            widest = max(widest, config["num_experts_per_tok"] * 3 * (inner + width))
        else:
            # phi3 halves one product for gate and up, and the halves are copies.
            widest = max(widest, (4 if config["model_type"] == "phi3" else 3) * inner)
    return int(width + widest)


def _num_kv_heads(config: dict[str, Any]) -> int:
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def _element_bytes(config: dict[str, Any]) -> int:
    return 4 if (config.get("torch_dtype") or config.get("dtype")) == "float32" else 2


def _tile_bytes(dim: int) -> int:
    """One KV head of one block: codes and scales of keys and values, and the keys' mean."""
    num_groups = -(-dim // 64)
    return 2 * BLOCK_TOKENS * (dim // 2 + 2 * num_groups) + 2 * dim
