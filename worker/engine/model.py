"""A loaded model as the engine walks it: embed, layers, norm, head. Loads it with mlx_lm; owns no KV."""

from __future__ import annotations

import glob
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from jobs import ModelCard
from kernels import TileLayout
from prompts import PromptBuilder, PromptError
from worker.engine import attention
from worker.engine.architectures import VERIFIED_ARCHITECTURES, is_unverified, refusal
from worker.engine.errors import EngineError
from worker.engine.experts import state_row_strides
from worker.engine.fingerprint import fingerprint
from worker.engine.key_bits import describe, fewest_bits
from worker.engine.kv_cache import KVCache
from worker.engine.memory import device_bytes, require_memory
from worker.engine.products import join_products
from worker.engine.shapes import KEYS_OF_4_BITS, KEYS_OF_8_BITS, LayerShape, layer_shapes, text_config
from worker.engine.unverified import require_same_model
from worker.engine.walk import Layer, walk


@dataclass
class Model:
    """The parts of a model in the order in which a token passes through them."""

    embed: Callable[[mx.array], mx.array]
    layers: list[Layer]
    modules: list[nn.Module]
    """Where each layer's weights are."""
    norm: Callable[[mx.array], mx.array]
    head: Callable[[mx.array], mx.array]
    shapes: list[LayerShape]
    """What each layer keeps of a token."""
    tokenizer: Any
    """mlx_lm's TokenizerWrapper."""
    eos_token_ids: frozenset[int]
    dtype: mx.Dtype
    card: ModelCard
    config: dict[str, Any]
    """config.json's content, the text model's sizes at its top."""
    folder: Path
    prompts: PromptBuilder

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache(self.shapes, self.dtype)

    def logits(self, h: mx.array) -> mx.array:
        """(1, n, hidden) → (1, vocab): the logits that follow the last position."""
        last: mx.array = self.head(self.norm(h[:, -1:]))[:, -1]
        return last.astype(mx.float32)


@contextmanager
def _plain(folder: Path) -> Iterator[Path]:
    """The folder by a path that mlx_lm, which takes it for a pattern, reads as it is."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="longleaf-") as name:
        link = Path(name) / "model"
        link.symlink_to(folder.absolute())
        yield link


def load(folder: Path, model_id: str, memory_bytes: int | None = None, unverified: bool = False) -> Model:
    """Load an MLX model folder.

    On a CPU the weights become float32: MLX has no SIMD for its other types there.

    Args:
        memory_bytes: what model and requests may take; what the device may use where None.
        unverified: take an architecture that nobody has verified, if it computes what mlx_lm's model does.

    Raises:
        EngineError: `unsupported_architecture`, `unsupported_head_size`, `memory_exceeded`,
            `no_chat_template` or `model_unreadable`; all but the last before weights are read, where nothing
            has to be compared.
    """
    attention.install()
    from mlx_lm.utils import load_model, load_tokenizer

    memory_bytes = memory_bytes or device_bytes()
    config = _read_config(folder)
    architecture = config.get("model_type", "unknown")
    if reason := refusal(config, unverified):
        compare = ", or set LONGLEAF_UNVERIFIED_MODEL=1 to have it compared with mlx_lm's when it is loaded"
        raise EngineError(
            "unsupported_architecture",
            f"Model {model_id} {reason}; choose a model of one of: {', '.join(VERIFIED_ARCHITECTURES)}"
            f"{compare if is_unverified(architecture) and not unverified else ''}.",
            architecture=architecture,
            verified=list(VERIFIED_ARCHITECTURES),
        )
    try:
        shapes = layer_shapes(config)
        for shape in shapes:
            TileLayout(shape.head_dim, shape.format)
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(
            "unsupported_head_size", f"Model {model_id}: its head size cannot be served: {error}."
        ) from error
    raw, config = config, text_config(config)
    try:
        require_memory(model_id, config, 1, memory_bytes)
    except KeyError as error:
        raise EngineError("model_unreadable", f"{folder}/config.json states no {error}.") from error
    try:
        prompts = PromptBuilder(folder)
    except PromptError as error:
        raise EngineError(error.code, f"Model {model_id}: {error}.") from error
    try:
        with _plain(folder) as plain:
            module, _ = load_model(plain)
        tokenizer = load_tokenizer(folder, eos_token_ids=_eos_token_ids(folder, raw))
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
    if is_unverified(architecture):
        require_same_model(model_id, module, config, shapes)
    parts = walk(module, architecture)
    if not on_cpu:
        join_products(parts.modules)
        state_row_strides(parts.modules)
    if config["model_type"] not in (*KEYS_OF_4_BITS, *KEYS_OF_8_BITS):
        shapes = fewest_bits(parts, shapes, tokenizer)
    full = [shape for shape in shapes if shape.window is None and shape.source is None]
    kv_bits = sum(
        2 * shape.num_kv_heads * shape.head_dim * TileLayout(shape.head_dim, shape.format).bits_per_element
        for shape in full
    )
    kv_format = describe(shapes)
    card = ModelCard(
        id=model_id,
        architecture=architecture,
        context_tokens=int(config["max_position_embeddings"]),
        num_layers=len(shapes),
        num_q_heads=config["num_attention_heads"],
        num_kv_heads=full[0].num_kv_heads,
        head_dim=full[0].head_dim,
        kv_format=kv_format,
        kv_bytes_per_token=kv_bits / 8,
        weights_bytes=sum(array.nbytes for _, array in tree_flatten(module.parameters())),
        fingerprint=fingerprint(folder, kv_format),
        device=_device_name(on_cpu),
        memory_bytes=memory_bytes,
        can_think=prompts.can_think,
    )
    return Model(
        embed=parts.embed,
        layers=parts.layers,
        modules=parts.modules,
        norm=parts.norm,
        head=parts.head,
        shapes=shapes,
        tokenizer=tokenizer,
        eos_token_ids=frozenset(tokenizer.eos_token_ids),
        dtype=parts.dtype,
        card=card,
        config=config,
        folder=folder,
        prompts=prompts,
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
