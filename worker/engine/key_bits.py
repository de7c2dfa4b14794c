"""Which layers need keys of 8 bits, found once for a model while it is loaded.

A key's bias is no block's mean any more once RoPE has turned it: it stays in what is coded and may leave too
little room for the rest. The weights don't show whether it does: of Qwen2.5-Coder 0.5B the layer whose bias
has the norm 393 needs 8 bits, those with 279 and 228 don't. So attention is computed with codes and without,
on a text of our own. The same weights on the same device give the same answer; it is part of the
fingerprint, so that a prefix is only restored into the formats that it was stored in.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from kernels import BLOCK_TOKENS, decode, encode, prefill_attention
from worker.engine.kv_cache import SINK_TOKENS, ExactLayer
from worker.engine.shapes import LayerShape
from worker.engine.walk import Walk

log = logging.getLogger("worker.engine")

MAX_ERROR = 0.2
"""Of attention's output, relative. Of the layers of Qwen2.5-Coder 0.5B one has 0.6, the others 0.01 to 0.1;
those of SmolLM2, whose keys have no bias, 0.005 to 0.08."""
_NUM_BLOCKS, _NUM_QUERIES = 2, 128
_NUM_TOKENS = SINK_TOKENS + _NUM_BLOCKS * BLOCK_TOKENS + _NUM_QUERIES
_TEXT = """\
The ferry left the north landing at six, an hour before the light, with eleven passengers and a cart of lamp
oil. Marta Quill kept the ledger in those years. She wrote down who crossed and what they paid, and in the
margin, where the company's clerk would never look, what they said of the weather and of each other. "Rain
by noon," she wrote on the fourth of March; "the miller says his daughter will not have the schoolmaster,
and the schoolmaster, who sat behind him, says nothing at all."

By 1884 the river had moved. It cut forty yards from the eastern bank in a single spring, took two orchards
and the foundations of a chapel, and left the old landing standing in a field of gravel. The company sent an
engineer, a Mr. Osgood, who measured the current at five places (2.1, 2.4, 3.0, 2.2 and 1.7 feet in a
second) and proposed a wall of stone. It would cost three thousand pounds, and it would hold, he thought,
for twenty years. They built half of it. The other half is still a drawing: blue ink on linen, folded in
eight.

What does one learn from such a book? First, that people cross a river for few reasons, and that most of
these are other people. Second, that prices change more slowly than anything else: a cow paid nine pence in
1861 and nine pence in 1890. Third, that a margin is the better page. When the bridge was opened the ferry
ran for one more season, empty on most days, since the charter required it; and on the last line of the last
volume there is no sum, only a note in another hand, which reads: "Mrs. Quill did not come down today. We
crossed without her, and counted nobody."
"""


class _ComparingLayer(ExactLayer):
    """Attends exactly, and notes how far off the newest queries are when blocks hold what is before them."""

    error = 0.0

    def attend(self, q: mx.array, scale: float, sinks: mx.array | None = None) -> mx.array:
        out = super().attend(q, scale, sinks)
        end = SINK_TOKENS + _NUM_BLOCKS * BLOCK_TOKENS
        held = self.held()
        middle_k, middle_v = (x[0, :, SINK_TOKENS:end] for x in held)
        coded = encode(middle_k, middle_v)
        blocks = decode(coded, q.shape[-1], q.dtype)
        k, v = (
            mx.concatenate([x[:, :, :SINK_TOKENS], block[None], x[:, :, end:]], axis=2)
            for x, block in zip(held, blocks, strict=True)
        )
        exact = out[:, :, -_NUM_QUERIES:].astype(mx.float32)
        off = prefill_attention(q[:, :, -_NUM_QUERIES:], k, v, scale, sinks).astype(mx.float32) - exact
        self.error = float(mx.linalg.norm(off) / mx.linalg.norm(exact))
        return out


def fewest_bits(parts: Walk, shapes: Sequence[LayerShape], tokenizer: Any) -> list[LayerShape]:
    """The shapes of a model without windows, with 4-bit keys in each layer whose attention stays what it was.

    Args:
        parts: the model, loaded.
        shapes: those that its config states, with the most bits that a layer may need.
        tokenizer: mlx_lm's, of this model.
    """
    ids = tokenizer.encode(_TEXT)
    tokens = mx.array((ids * -(-_NUM_TOKENS // len(ids)))[:_NUM_TOKENS])[None]
    hidden, found = parts.embed(tokens), []
    for index, (layer, shape) in enumerate(zip(parts.layers, shapes, strict=True)):
        cache = _ComparingLayer(_NUM_TOKENS, shape, parts.dtype)
        hidden = layer(hidden, tokens, cache)
        mx.eval(hidden)
        log.info("layer %d: 4-bit keys put attention off by %.2g", index, cache.error)
        # A NaN asks for more bits too.
        found.append(replace(shape, format="int4c") if cache.error <= MAX_ERROR else shape)
    return found


def describe(shapes: Sequence[LayerShape]) -> str:
    """The formats of the layers that have blocks, in one line; two models that share it share formats."""
    formats = {i: s.format for i, s in enumerate(shapes) if s.window is None and s.source is None}
    eight = [str(i) for i, name in formats.items() if name == "k8v4"]
    if not eight or len(eight) == len(formats):
        return next(iter(formats.values()))
    return f"int4c, k8v4 in layers {' '.join(eight)}"
