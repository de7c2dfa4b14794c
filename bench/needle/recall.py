"""Recall through the engine: questions about one document, its KV held in one format or another.

Knows what a format is to the engine, how an exact answer is made beside it, and two faults that a test of
long contexts must notice. Knows no table and no file of results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from bench.needle import words
from bench.needle.documents import Document, Question, is_right
from cache_store import SnapshotStore
from kernels import TileLayout, from_canonical, to_canonical
from worker.engine import model as model_loader
from worker.engine.engine import Document as EngineDocument
from worker.engine.engine import Engine, Request, Sampling
from worker.engine.kv_cache import CompressedLayer, ExactLayer, KVCache
from worker.engine.model import Model
from worker.engine.report import Silent

MODEL_FOLDER = Path(__file__).parent / "model"
EXACT = "exact"
MAX_ANSWER_TOKENS = 64
CHUNK_TOKENS = 256 if mx.default_device() == mx.Device(mx.cpu) else 2048
SNAPSHOT_BYTES = 1 << 40

Damage = Callable[[np.ndarray, TileLayout], np.ndarray]
"""Canonical tiles (num_blocks, num_kv_heads, tile_words) uint32 → others of the same shape."""


def load_model(folder: Path = MODEL_FOLDER) -> Model:
    return model_loader.load(folder, "needle")


def engine_of(model: Model, format: Any, store: SnapshotStore | None) -> Engine:
    """An engine whose layers hold their blocks in `format`. Formats must not share a store."""
    shapes = [replace(shape, format=format) for shape in model.shapes]
    return Engine(replace(model, shapes=shapes), store)


@dataclass(frozen=True)
class Asked:
    answers: list[str]
    right: list[bool]
    cached_tokens: int
    """Tokens of the first question's prompt that were known before."""

    @property
    def recall(self) -> float:
        return sum(self.right) / len(self.right)


def ask(engine: Engine, document: Document, questions: Sequence[Question], reuse: bool = True) -> Asked:
    """Greedy answers, each to its own request, as jobs get them."""
    text = EngineDocument("needle", words.text(document.ids))
    requests = [Request(words.text(q.ids), Sampling(MAX_ANSWER_TOKENS), Silent()) for q in questions]
    outputs = engine.answer([text], requests, reuse)
    answers = [output.text for output in outputs]
    return _asked(questions, answers, outputs[0].usage.cached_tokens)


def ask_exactly(model: Model, document: Document, questions: Sequence[Question]) -> Asked:
    """The same with keys and values as the model computes them."""
    builder = model.prompts
    text = EngineDocument("needle", words.text(document.ids))
    prompts = [builder.build([text], words.text(q.ids)) for q in questions]
    end = prompts[0].document_end
    longest = max(len(p.tokens) for p in prompts) + MAX_ANSWER_TOKENS
    layers = [ExactLayer(longest, shape, model.dtype) for shape in model.shapes]
    _advance(model, layers, prompts[0].tokens[:end])
    answers = []
    for prompt in prompts:
        for layer in layers:
            layer.offset = end
        token = _advance(model, layers, prompt.tokens[end:])
        said: list[int] = []
        while token not in model.eos_token_ids and len(said) < MAX_ANSWER_TOKENS:
            said.append(token)
            token = _advance(model, layers, np.array([token], np.uint32))
        answers.append(str(model.tokenizer.decode(said)))
    return _asked(questions, answers, 0)


def damage_cache(engine: Engine, damage: Damage) -> None:
    """Change the blocks that the engine holds in memory, which the next question about them reads."""
    cache = engine._held.cache
    assert isinstance(cache, KVCache), "ask the engine first: it holds no prefix yet"
    for layer in cache.compressed:
        _damage_layer(layer, damage)


def values_of_the_next_block(tiles: np.ndarray, layout: TileLayout) -> np.ndarray:
    """Every block's keys lead to the values of its neighbour: an index that is off by one.

    Moving keys and values together would change nothing: attention does not ask in which order they lie.
    """
    shifted = tiles.copy()
    shifted[..., layout.k_words :] = np.roll(tiles[..., layout.k_words :], 1, axis=0)
    return shifted


def two_bits(tiles: np.ndarray, layout: TileLayout) -> np.ndarray:
    """Four-bit codes lose their lower half, of keys and of values."""
    return _with_codes(tiles, layout, 0xCCCCCCCC, 0x22222222)


def one_bit(tiles: np.ndarray, layout: TileLayout) -> np.ndarray:
    """Of four-bit codes only the sign is left, of keys and of values."""
    return _with_codes(tiles, layout, 0x88888888, 0x44444444)


DAMAGES: dict[str, Damage] = {"two_bits": two_bits, "one_bit": one_bit, "shifted": values_of_the_next_block}
"""Faults in int4c blocks."""


def _with_codes(tiles: np.ndarray, layout: TileLayout, kept: int, instead: int) -> np.ndarray:
    changed = tiles.copy()
    for first, num_words in ((0, layout.k_codes_words), (layout.k_words, layout.v_codes_words)):
        codes = changed[..., first : first + num_words]
        codes[...] = (codes & kept) | instead
    return changed


def _damage_layer(layer: CompressedLayer, damage: Damage) -> None:
    dim, format, num_blocks = layer.shape.head_dim, layer.shape.format, layer.num_blocks
    tiles = np.array(to_canonical(layer.tiles[:num_blocks], dim, format))
    damaged = mx.array(damage(tiles, TileLayout(dim, format)))
    layer.tiles[:num_blocks] = from_canonical(damaged, dim, format)
    mx.eval(layer.tiles)


def _advance(model: Model, layers: list[ExactLayer], tokens: np.ndarray) -> int:
    """Feed tokens; the likeliest one after them."""
    ids = mx.array(tokens)[None]
    for start in range(0, len(tokens), CHUNK_TOKENS):
        some = ids[:, start : start + CHUNK_TOKENS]
        h = model.embed(some)
        for layer, kept in zip(model.layers, layers, strict=True):
            h = layer(h, some, kept)
            mx.eval(h, kept.arrays())
    return int(np.array(model.logits(h).argmax()))


def _asked(questions: Sequence[Question], answers: list[str], cached_tokens: int) -> Asked:
    right = [is_right(q, answer) for q, answer in zip(questions, answers, strict=True)]
    return Asked(answers, right, cached_tokens)
