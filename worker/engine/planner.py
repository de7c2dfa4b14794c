"""How much memory a model needs for a number of tokens, from config.json's content alone.

Imports no MLX and reads no weights. The sizes of the KV format stand here once more, in bytes, and a test
holds them against the engine's own. What lives at once in a prefill was found by measuring peaks on a CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from worker.engine.shapes import LayerShape, layer_shapes, text_config
from worker.engine.weights import (
    dense_width,
    element_bytes,
    experts,
    largest_dense_layer_bytes,
    weights_bytes,
)

SINK_TOKENS, BLOCK_TOKENS, TAIL_TOKENS, QUERY_TOKENS = 64, 128, 2048, 16
WINDOW_SPARE_TOKENS = BLOCK_TOKENS + QUERY_TOKENS
CHUNK_TOKENS, CPU_CHUNK_TOKENS = 2048, 256
SUFFIX_TOKENS, OUTPUT_TOKENS = 512, 512
"""An instruction and an answer of usual length, where the caller knows no better."""
FUSED_HEAD_DIMS = (64, 80, 96, 128)
"""Head sizes of MLX's fused prefill attention on a GPU; for others it lays out scores, a slice at a time."""
SCORES_BYTES = 1 << 29
"""Of a slice."""


@dataclass(frozen=True)
class Plan:
    """What `num_tokens` of prompt and answer need; all in bytes."""

    num_tokens: int
    weights_bytes: int
    kv_fp16_bytes_per_token: int
    """What an ordinary cache takes in the layers that see all tokens, for comparison."""
    kv_format: str
    """Of blocks; loading a model may find that some of its layers need fewer bits."""
    kv_bytes_per_token: float
    """In blocks, with their scales and means."""
    window_bytes: int
    """What the layers take that see a window only, whatever the number of tokens."""
    kv_bytes: int
    """Blocks, dense sinks and tails, and windows of all layers."""
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
        return self.kv_fp16_bytes_per_token * self.num_tokens + self.window_bytes

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.working_bytes


def plan(
    config: dict[str, Any],
    num_tokens: int,
    num_suffix: int = SUFFIX_TOKENS,
    num_output: int = OUTPUT_TOKENS,
    on_cpu: bool = False,
    on_cuda: bool = False,
) -> Plan:
    """Predict the peak of one request.

    Args:
        config: of an architecture that `architectures.refusal` accepts.
        num_tokens: prompt and answer together.
        num_suffix: tokens of the prompt behind the last whole block of the reusable prefix.
        num_output: tokens of the answer.
        on_cpu: whether weights and activations become dense float32, as they do there.
        on_cuda: whether a layer's weights become dense while a long prefix passes through it.

    Raises:
        KeyError: if the config lacks a size.
    """
    config = text_config(config)
    own = [shape for shape in layer_shapes(config) if shape.source is None]
    full = [shape for shape in own if shape.window is None]
    element = 4 if on_cpu else element_bytes(config)
    chunk = min(CPU_CHUNK_TOKENS if on_cpu else CHUNK_TOKENS, num_tokens)

    num_new = min(chunk, num_suffix)
    num_tail = _tail_room(num_suffix, num_output, num_new)
    num_behind = min(num_tokens, TAIL_TOKENS, num_suffix + num_output)  # dense, in no block
    num_blocks = -(-max(0, num_tokens - SINK_TOKENS - num_behind) // BLOCK_TOKENS)
    block_bytes = sum(shape.num_kv_heads * _tile_bytes(shape) for shape in full)
    dense_bytes = (SINK_TOKENS + num_tail) * sum(map(_num_kv, full)) * element
    window_bytes = sum(
        # At the prefix's end, and with what follows.
        (2 * min(shape.window, num_tokens) + max(num_new, WINDOW_SPARE_TOKENS)) * _num_kv(shape) * element
        for shape in own
        if shape.window
    )
    kv_bytes = num_blocks * block_bytes + dense_bytes + window_bytes

    hidden_bytes = num_tokens * config["hidden_size"] * element
    layer_bytes = num_tokens * max(map(_num_kv, full)) * element
    activations_bytes = chunk * _widest_activation(config) * element
    scores_bytes = config["num_attention_heads"] * chunk * element
    # A window needs a mask, for which the scores are laid out: raw, masked and as weights.
    scores = [scores_bytes * min(num_tokens, shape.window + chunk) for shape in own if shape.window]
    if not on_cpu and any(shape.head_dim not in FUSED_HEAD_DIMS for shape in full):
        scores.append(min(scores_bytes * num_tokens, SCORES_BYTES))
    activations_bytes += 3 * max(scores, default=0)
    # Stage one: a chunk passes a layer, or the encoder copies the layer's keys and values.
    stage_one = hidden_bytes + layer_bytes + max(activations_bytes, layer_bytes)
    if on_cuda:
        stage_one += largest_dense_layer_bytes(config)
    # Stage two: the layer is decoded, joined with its sinks and then with its tail. The new tokens' keys and
    # values of all layers wait for one evaluation.
    waiting = sum(map(_num_kv, own)) * element * num_new
    stage_two = 3 * layer_bytes + activations_bytes * num_new // chunk + waiting
    return Plan(
        num_tokens=num_tokens,
        weights_bytes=weights_bytes(config, on_cpu),
        kv_fp16_bytes_per_token=2 * sum(map(_num_kv, full)),
        kv_format=full[0].format,
        kv_bytes_per_token=block_bytes / BLOCK_TOKENS,
        window_bytes=window_bytes,
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
    on_cuda: bool = False,
) -> int:
    """The largest number of tokens, up to the model's context, whose plan fits; 0 if none does."""
    low, high = 0, config["max_position_embeddings"]
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan(config, middle, num_suffix, num_output, on_cpu, on_cuda).total_bytes <= memory_bytes
        low, high = (middle, high) if fits else (low, middle - 1)
    return int(low)


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


def _widest_activation(config: dict[str, Any]) -> int:
    """Numbers per token that live at once in the widest moment of a layer."""
    width, architecture = config["hidden_size"], config["model_type"]
    widest = 0
    for layer, shape in enumerate(layer_shapes(config)):
        # Before and after RoPE, and the attention's output.
        heads = 3 * config["num_attention_heads"] + 4 * shape.num_kv_heads
        # phi3 halves one product for gate and up, and the halves are copies.
        inner = (4 if architecture == "phi3" else 3) * dense_width(config, layer)
        num_experts, expert_inner = experts(config, layer)
        if num_experts:
            # A token is copied for each of its experts, and so are their outputs until they are summed.
            num_chosen = config.get("num_experts_per_tok") or config["top_k_experts"]
            # gpt_oss clips, scales and gates in steps of their own.
            num_copies = 13 if architecture == "gpt_oss" else 3
            inner = max(inner, num_chosen * (num_copies * expert_inner + 3 * width))
        widest = max(widest, heads * shape.head_dim, inner)
    return int(width + widest)


def _num_kv(shape: LayerShape) -> int:
    """Numbers that a token leaves in a layer."""
    return 2 * shape.num_kv_heads * shape.head_dim


def _tile_bytes(shape: LayerShape) -> int:
    """One KV head of one block: codes and scales of keys and values, and the keys' mean."""
    dim, num_groups = shape.head_dim, -(-shape.head_dim // 64)
    k_bytes = dim if shape.format == "k8v4" else dim // 2
    return BLOCK_TOKENS * (k_bytes + dim // 2 + 4 * num_groups) + 2 * dim
