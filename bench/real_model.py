"""What the benches share that make a model folder of a GGUF: files of JSON, one question to both engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker import accelerate

accelerate.prepare_cpu()  # before MLX is loaded

import mlx.core as mx  # noqa: E402

from worker.engine.engine import Document, Engine, Sampling  # noqa: E402
from worker.engine.report import Silent  # noqa: E402

QUESTION = "What is the capital of France?"
DOCUMENT = "France is a country in Europe. Its capital is Paris, and its largest river is the Loire. "


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def by_mlx_lm(folder: Path, tokens: list[int], num_tokens: int) -> str:
    """mlx_lm's own greedy answer to a prompt."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load

    model, wrapper, *_ = load(str(folder))
    model.set_dtype(mx.float32)
    steps = generate_step(mx.array(tokens), model, max_tokens=num_tokens)
    return str(wrapper.decode([int(token) for token, _ in steps]))


def ask_both(folder: Path) -> None:
    """Print what mlx_lm and the engine answer to one question about two documents."""
    engine = Engine.load(folder, folder.name, None)
    # Short, so that both compute it exactly; and longer than a window, with blocks.
    for text in ("", DOCUMENT * 32):
        documents = [Document("d", text)] if text else []
        tokens = engine._prompts.build(documents, QUESTION).tokens.tolist()
        answer = engine.generate(documents, QUESTION, Sampling(8), Silent())
        print(f"{len(tokens)} tokens  mlx_lm: {by_mlx_lm(folder, tokens, 8)!r}  ours: {answer.text!r}")
    print(folder)
