"""One llama-family GGUF file turned into an ordinary MLX model folder.

Owns what a GGUF's tensors and metadata mean. It knows no model names, downloads or caches, and it
refuses by name whatever it would have to guess at (other architectures and vocabularies, scaled rope,
unknown tensors) instead of making a folder that answers badly.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

CONVERTER_VERSION = 1
"""Part of every made folder's identity: raising it remakes the folders."""

GROUP_SIZE = 32
"""What `mx.load` gives Q4_0, Q4_1 and Q8_0 tensors: MLX affine groups of 32."""

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF names (inside `blk.N.` for those of a layer) to the names of `mlx_lm.models.llama`."""

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    # ByteLevel's own regex is GPT-2's.
    "gpt-2": BYTE_LEVEL,
    # Digits come apart one by one before GPT-2's regex sees them.
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
    },
}
"""`tokenizer.ggml.pre` to the pre-tokenizer of tokenizer.json."""

TOKEN_CONTROL, TOKEN_USER_DEFINED = 3, 4
TURN_ENDS = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>"}
"""Control tokens that end an answer even where `eos_token_id` names only one of them."""


class UnsupportedGGUF(ValueError):
    """The file is no GGUF that this converter covers; the message says what stood in the way."""


def convert(source: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and generation settings of the GGUF `source` into `folder`.

    Quantised tensors keep their codes (u32, float16 scales and biases, groups of 32); all others become
    float16. Raises UnsupportedGGUF, and OSError where the disk does not take the files.
    """
    try:
        loaded: Any = mx.load(str(source), format="gguf", return_metadata=True)
    except RuntimeError as error:
        raise UnsupportedGGUF(f"{source} cannot be read as GGUF: {error}") from error
    tensors: dict[str, mx.array] = loaded[0]
    metadata = {key: _plain(value) for key, value in loaded[1].items()}
    weights = {tensor_name(name): value for name, value in tensors.items()}
    config = _config(metadata, weights)
    tokenizer, tokenizer_config = tokenizer_files(metadata)
    config["eos_token_id"] = _turn_ends(metadata)

    weights = {
        name: value.astype(mx.float16) if value.dtype == mx.float32 else value
        for name, value in weights.items()
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    generation = {key: config[key] for key in config if key.endswith("_token_id")}
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer.json", tokenizer)
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "generation_config.json", generation)


def _config(metadata: dict[str, Any], weights: dict[str, mx.array]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedGGUF(f"architecture {architecture!r} is not covered; only 'llama' is")
    if metadata.get("llama.expert_count", 0):
        raise UnsupportedGGUF("mixture-of-experts llama is not covered")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise UnsupportedGGUF(f"rope scaling {metadata['llama.rope.scaling.type']!r} is not covered")

    num_heads = _need(metadata, "llama.attention.head_count")
    hidden_size = _need(metadata, "llama.embedding_length")
    head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedGGUF("rope over a part of the head is not covered")
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden_size,
        "num_hidden_layers": _need(metadata, "llama.block_count"),
        "intermediate_size": _need(metadata, "llama.feed_forward_length"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": _need(metadata, "llama.context_length"),
        "rms_norm_eps": _need(metadata, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        # GGUF holds q and k rows permuted for the rope of adjacent pairs: kept so, never un-permuted.
        "rope_traditional": True,
        "vocab_size": len(_need(metadata, "tokenizer.ggml.tokens")),
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "torch_dtype": "float16",
    }
    bits = _bits(weights, config)
    if bits:
        config["quantization"] = config["quantization_config"] = {"group_size": GROUP_SIZE, "bits": bits}
    for name in ("bos", "padding"):
        if (token := metadata.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            config[f"{name.removesuffix('ding')}_token_id"] = token
    return config


def _bits(weights: dict[str, mx.array], config: dict[str, Any]) -> int | None:
    """Bits of most quantised tensors (mlx_lm infers a deviating layer's from its shapes); None: all dense."""
    found: list[int] = []
    for name, scales in weights.items():
        if name.endswith(".scales"):
            packed = weights[name.removesuffix("scales") + "weight"]  # [rows, columns * bits / 32]
            found.append(packed.shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE))
    return max(set(found), key=found.count) if found else None


def tensor_name(
    name: str,
    known: Mapping[str, str] = TENSORS,
    kinds: Collection[str] = ("weight", "scales", "biases"),
    layout: str = "llama",
) -> str:
    """A GGUF tensor's name as mlx_lm has it.

    Args:
        known: names of tensors, inside `blk.N.` for those of a layer.
        kinds: what may stand behind the last dot.

    Raises:
        UnsupportedGGUF: for a name that is none of these; `layout` says whose they are.
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?([a-z_]+)\.([a-z]+)", name)
    if match is None or match[2] not in known or match[3] not in kinds:
        raise UnsupportedGGUF(f"tensor {name!r} is not covered by the {layout} layout")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{known[match[2]]}.{match[3]}"


def tokenizer_files(metadata: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) of a byte-level BPE vocabulary."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise UnsupportedGGUF(f"vocabulary {kind!r} is not covered; only byte-level BPE ('gpt2') is")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedGGUF(f"pre-tokenizer {pre!r} is not covered; accepted: {', '.join(PRE_TOKENIZERS)}")
    if metadata.get("tokenizer.ggml.add_bos_token") or metadata.get("tokenizer.ggml.add_eos_token"):
        raise UnsupportedGGUF("a vocabulary that adds its own BOS or EOS is not covered")

    tokens: list[str] = _need(metadata, "tokenizer.ggml.tokens")
    types: list[int] = _need(metadata, "tokenizer.ggml.token_type")
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == TOKEN_CONTROL,
        }
        for index, kind in enumerate(types)
        if kind in (TOKEN_CONTROL, TOKEN_USER_DEFINED)
    ]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in _need(metadata, "tokenizer.ggml.merges")],
        },
    }
    config = {
        # The class that takes tokenizer.json as it is; GPT2Tokenizer would rebuild its own pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _need(metadata, "llama.context_length"),
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return tokenizer, config


def _turn_ends(metadata: dict[str, Any]) -> list[int]:
    """Token ids that end an answer, the file's own EOS first."""
    eos = _need(metadata, "tokenizer.ggml.eos_token_id")
    named = zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"], strict=True)
    others = [i for i, (token, kind) in enumerate(named) if kind == TOKEN_CONTROL and token in TURN_ENDS]
    return [eos, *(i for i in others if i != eos)]


def _need(metadata: dict[str, Any], key: str) -> Any:
    if key not in metadata:
        raise UnsupportedGGUF(f"metadata {key!r} is missing")
    return metadata[key]


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, mx.array) else value


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
