"""What a worker's card says of memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import ModelCard
from worker.engine.planner import plan
from worker.prediction import with_peaks

CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def card(context_tokens: int = 8192, device: str = "cpu") -> ModelCard:
    return ModelCard(
        id="m",
        architecture="llama",
        context_tokens=context_tokens,
        num_layers=30,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        kv_format="int4c",
        kv_bytes_per_token=1.0,
        weights_bytes=1,
        fingerprint="f",
        device=device,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize(("context", "last"), [(8192, [4096, 8192]), (5000, [4096, 5000]), (200, [1, 200])])
def test_the_points_go_from_one_token_to_the_context(folder: Path, context: int, last: list[int]) -> None:
    found = with_peaks(card(context), folder)
    tokens = [n for n, _ in found.peak_points]
    assert (tokens[0], tokens[-2:]) == (1, last)
    assert tokens == sorted(set(tokens))
    assert dict(found.peak_points)[context] == plan(CONFIG, context, on_cpu=True).total_bytes


def test_a_gpu_with_memory_of_its_own_needs_other_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    found = with_peaks(card(device="gpu (NVIDIA H200)"), folder)
    assert dict(found.peak_points)[8192] == plan(CONFIG, 8192, on_cuda=True).total_bytes


@pytest.mark.parametrize("config", [None, "not json", "[]", "{}"])
def test_a_folder_that_says_too_little_leaves_the_card_as_it_is(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert with_peaks(card(), tmp_path) == card()
