"""Recall of the model in PyTorch: many questions over one document's keys and values, answers forced.

An answer is right if each of its tokens is the most likely one after those before it, which is when greedy
decoding would write it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.needle.batches import ASK, END, HEAD
from bench.needle.documents import TASKS, Document, Filler, Question, make_document, make_facts
from bench.needle.transformer import Transformer, attend

QUESTIONS_TOGETHER = 8
NUM_DEPTHS = 10
SINGLE_TOKENS = 3_000_000
"""Tokens of single-key documents at each length: every question needs a document of its own."""
MANY_TOKENS = 600_000
SEED = 90_000


def recall_rows(model: Transformer, lengths: list[int], device: str) -> list[dict[str, Any]]:
    """Rows of task, num_tokens, depth (the tenth in which the facts stand), num_questions and recall."""
    rng = np.random.default_rng(SEED)
    filler = Filler(rng, 30_000)
    rows = []
    for length in lengths:
        right: dict[tuple[str, int], list[bool]] = {}
        for document in _documents(rng, filler, length):
            answers = answered_right(model, document, device)
            for question, is_right in zip(document.questions, answers, strict=True):
                tenth = min(NUM_DEPTHS - 1, int(question.depth * NUM_DEPTHS))
                right.setdefault((question.task, tenth), []).append(is_right)
        for task in TASKS:
            for tenth in range(NUM_DEPTHS):
                answers = right.get((task, tenth), [])
                if answers:
                    rows.append(
                        {
                            "task": task,
                            "num_tokens": length,
                            "depth": (tenth + 0.5) / NUM_DEPTHS,
                            "num_questions": len(answers),
                            "recall": round(sum(answers) / len(answers), 4),
                        }
                    )
            total = [a for (t, _), found in right.items() if t == task for a in found]
            print(f"{length:7} {task:12} {np.mean(total) if total else 0:.4f} of {len(total)}", flush=True)
    return rows


def _documents(rng: np.random.Generator, filler: Filler, length: int) -> list[Document]:
    num_single = int(np.clip(SINGLE_TOKENS // length, 20, 100))
    single = [
        make_document(rng, filler, length, make_facts(rng, 1), np.array([(i + 0.5) / num_single]))
        for i in range(num_single)
    ]
    num_people = min(length // 96, 320)
    many = []
    for i in range(int(np.clip(MANY_TOKENS // length, 2, 12))):
        num_lists, num_hops = num_people // 10, num_people // 10
        facts = make_facts(rng, num_people - num_lists - num_hops, num_lists, num_hops, alike=bool(i % 2))
        many.append(make_document(rng, filler, length, facts))
    return single + many


@torch.no_grad()
def answered_right(model: Transformer, document: Document, device: str) -> list[bool]:
    prompt = torch.from_numpy(np.concatenate([HEAD, document.ids])).long().to(device)
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        keys_values = _keys_values(model, prompt)
        right = []
        for i in range(0, len(document.questions), QUESTIONS_TOGETHER):
            right += _answer(model, keys_values, document.questions[i : i + QUESTIONS_TOGETHER], device)
    return right


def _keys_values(model: Transformer, prompt: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Of each layer (H_kv, T, D) keys and values of the prompt (T,)."""
    x = F.embedding(prompt, model.embed)
    cos, sin = model.angles(torch.arange(len(prompt), device=prompt.device))
    kept = []
    for layer in model.layers:
        q, k, v = (t.transpose(0, 1) for t in layer.before(x, cos, sin))
        kept.append((k, v))
        x = layer.after(x, attend(q[None], k[None], v[None])[0].transpose(0, 1))
    return kept


def _answer(
    model: Transformer, keys_values: list[tuple[Tensor, Tensor]], questions: list[Question], device: str
) -> list[bool]:
    rows = [np.concatenate([q.ids, ASK, q.answer, END]) for q in questions]
    longest = max(map(len, rows))
    ids = np.zeros((len(rows), longest), np.int64)
    for row, padded in zip(rows, ids, strict=True):
        padded[: len(row)] = row
    start = keys_values[0][0].shape[1]
    x = F.embedding(torch.from_numpy(ids).to(device).flatten(), model.embed)
    cos, sin = model.angles((start + torch.arange(longest, device=device)).repeat(len(rows)))
    later = torch.ones(longest, longest, device=device, dtype=torch.bool).triu(1)
    for layer, (old_k, old_v) in zip(model.layers, keys_values, strict=True):
        q, k, v = (t.unflatten(0, ids.shape) for t in layer.before(x, cos, sin))
        q = q.unflatten(2, (old_k.shape[0], -1))
        scale = q.shape[-1] ** -0.5
        to_old = torch.einsum("blhgd,htd->bhglt", q, old_k).float()
        to_own = torch.einsum("blhgd,bthd->bhglt", q, k).float().masked_fill(later, -torch.inf)
        p = torch.softmax(torch.cat([to_old, to_own], -1) * scale, -1).to(v.dtype)
        attended = torch.einsum("bhglt,htd->blhgd", p[..., :start], old_v)
        attended += torch.einsum("bhglt,bthd->blhgd", p[..., start:], v)
        x = layer.after(x, attended.flatten(2, 3).flatten(0, 1))
    best = model.head(x).argmax(-1).unflatten(0, ids.shape).cpu().numpy()
    right = []
    for question, row, guess in zip(questions, rows, best, strict=True):
        first = len(question.ids) + len(ASK)
        right.append(bool((guess[first - 1 : len(row) - 1] == row[first:]).all()))
    return right
