"""What a model card says of memory: the planner's prediction, made by the parent, which loads no MLX."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from jobs import ModelCard
from worker.engine.planner import plan

log = logging.getLogger("worker.prediction")

FEWEST_TOKENS = 256


def with_peaks(card: ModelCard, folder: Path) -> ModelCard:
    """The card with `peak_points`, up to the context.

    They are at powers of two, where a chunk of prefill has its full size and the prediction bends. A card is
    given back as it is where the folder's config.json states too little.
    """
    on_cpu = card.device == "cpu"
    on_cuda = not on_cpu and sys.platform != "darwin"
    counts = [1]
    tokens = FEWEST_TOKENS
    while tokens < card.context_tokens:
        counts.append(tokens)
        tokens *= 2
    counts.append(card.context_tokens)
    try:
        config = json.loads((folder / "config.json").read_text())
        points = [(n, plan(config, n, on_cpu=on_cpu, on_cuda=on_cuda).total_bytes) for n in counts]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s: its memory is not predicted (%s: %s)", card.id, type(error).__name__, error)
        return card
    return card.model_copy(update={"peak_points": points})
