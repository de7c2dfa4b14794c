"""A loaded model as the engine walks it: embed, layers, head. Loads it with mlx_lm; owns no KV."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from jobs import ModelCard
from kernels import TileLayout
from worker.engine import attention
from worker.engine.architectures import VERIFIED_ARCHITECTURES, head_dim, refusal
from worker.engine.errors import EngineError
from worker.engine.fingerprint import fingerprint
from worker.engine.memory import device_bytes, require_memory

KV_FORMAT = "int4c"


@dataclass
class Model:
    """The parts of a model in the order in which a token passes through them."""

    embed: nn.Module
    layers: list[nn.Module]
    norm: nn.Module
    head: Any
    tokenizer: Any
    """mlx_lm's TokenizerWrapper."""
    eos_token_ids: frozenset[int]
    num_kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    card: ModelCard
    config: dict[str, Any]
    """config.json's content."""
    folder: Path

    def logits(self, h: mx.array) -> mx.array:
        """(1, n, hidden) → (1, vocab): the logits that follow the last position."""
        last: mx.array = self.head(self.norm(h[:, -1:]))[:, -1]
        return last.astype(mx.float32)


def load(folder: Path, model_id: str, memory_bytes: int | None = None) -> Model:
    """Load an MLX model folder.

    On a CPU the weights become float32: MLX has no SIMD for its other types there.

    Args:
        memory_bytes: what the model may take; the device's memory where None.

    Raises:
        EngineError: `unsupported_architecture`, `unsupported_head_size`, `memory_exceeded` or
            `model_unreadable`; all but the last before weights are read.
    """
    attention.install()
    from mlx_lm.utils import load_model, load_tokenizer

    config = _read_config(folder)
    architecture = config.get("model_type", "unknown")
    if reason := refusal(config):
        raise EngineError(
            "unsupported_architecture",
            f"Model {model_id} {reason}; choose a model of one of: {', '.join(VERIFIED_ARCHITECTURES)}.",
            architecture=architecture,
            verified=list(VERIFIED_ARCHITECTURES),
        )
    try:
        dim = head_dim(config)
        layout = TileLayout(dim)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            "unsupported_head_size", f"Model {model_id}: its head size cannot be served: {error}."
        ) from error
    try:
        require_memory(model_id, config, 1, memory_bytes or device_bytes())
    except KeyError as error:
        raise EngineError("model_unreadable", f"{folder}/config.json states no {error}.") from error
    try:
        module, config = load_model(folder)
        tokenizer = load_tokenizer(folder, eos_token_ids=_eos_token_ids(folder, config))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise EngineError(
            "model_unreadable", f"Model {model_id} could not be loaded from {folder}: {error}"
        ) from error
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    if on_cpu:
        from worker.dense import dequantize_weights

        dequantize_weights(module)
        module.set_dtype(mx.float32)
        mx.eval(module.parameters())
    args, body = module.args, module.model
    num_kv_heads = args.num_key_value_heads
    num_layers = len(body.layers)
    kv_bytes = num_layers * num_kv_heads * 2 * dim * layout.bits_per_element / 8
    card = ModelCard(
        id=model_id,
        architecture=architecture,
        context_tokens=int(config["max_position_embeddings"]),
        num_layers=num_layers,
        num_q_heads=args.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        kv_format=KV_FORMAT,
        kv_bytes_per_token=kv_bytes,
        weights_bytes=sum(array.nbytes for _, array in tree_flatten(module.parameters())),
        fingerprint=fingerprint(folder, KV_FORMAT),
        device=_device_name(on_cpu),
    )
    head = body.embed_tokens.as_linear if args.tie_word_embeddings else module.lm_head
    return Model(
        embed=body.embed_tokens,
        layers=list(body.layers),
        norm=body.norm,
        head=head,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        num_kv_heads=num_kv_heads,
        head_dim=dim,
        dtype=body.norm.weight.dtype,
        card=card,
        config=config,
        folder=folder,
    )


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise EngineError(
            "model_unreadable",
            f"{folder} is not a model folder: config.json could not be read ({error}); "
            "run `longleaf up`, which makes it, or name another model.",
        ) from error
    if not isinstance(config, dict):
        raise EngineError("model_unreadable", f"{folder}/config.json holds no object.")
    return config


def _eos_token_ids(folder: Path, config: dict[str, Any]) -> list[int]:
    """Every token that ends an answer: generation_config.json knows more of them than config.json."""
    found: list[int] = []
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.exists() else {}
    for source in (generation, config):
        ids = source.get("eos_token_id")
        found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return sorted(set(found))


def _device_name(on_cpu: bool) -> str:
    if on_cpu:
        return "cpu"
    name = mx.device_info().get("device_name", "unknown")
    return f"gpu ({name})"
