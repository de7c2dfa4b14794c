"""Models of real shapes with random 4-bit weights: what speed and memory depend on, without the download.

The shapes are those that the models' own config.json files state.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_COMMON = {
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "quantization": {"group_size": 64, "bits": 4},
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-4b": _COMMON
    | {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rope_theta": 5000000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA_3_ROPE,
        "tie_word_embeddings": False,
    },
    "llama-3.1-70b": _COMMON
    | {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA_3_ROPE,
        "tie_word_embeddings": False,
    },
    "gemma-4-31b": _COMMON
    | {
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "num_hidden_layers": 60,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "sliding_window": 1024,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
}


def make_module(config: dict[str, Any], dtype: mx.Dtype) -> nn.Module:
    """An mlx_lm module with random weights, quantised as its config says.

    One layer's dense weights at most are in memory at a time.
    """
    from mlx_lm.utils import _get_classes

    mx.random.seed(0)
    make, arguments = _get_classes(config)
    module: nn.Module = make(arguments.from_dict(config))
    module.set_dtype(dtype)
    nn.quantize(module, **config["quantization"])
    for layer in module.model.layers:
        mx.eval(layer.parameters())
    mx.eval(module.parameters())
    mx.clear_cache()
    return module
