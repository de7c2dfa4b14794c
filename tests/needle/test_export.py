"""A training run becomes a folder that the engine serves, with a card that says what was measured."""

import json
import xml.etree.ElementTree as ET

import mlx.core as mx
import numpy as np
import pytest

from bench.needle import words
from bench.needle.batches import CONTEXT_TOKENS
from bench.needle.documents import Filler, make_document, make_facts
from bench.needle.export import export
from bench.needle.recall import ask, ask_exactly, engine_of, load_model

SHAPE = {
    "vocab_size": words.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e10,
}
SIZES = {
    "model.embed_tokens": (words.VOCAB_SIZE, 64),
    "model.layers.0.self_attn.q_proj": (256, 64),
    "model.layers.0.self_attn.k_proj": (64, 64),
    "model.layers.0.self_attn.v_proj": (64, 64),
    "model.layers.0.self_attn.o_proj": (64, 256),
    "model.layers.0.mlp.gate_proj": (64, 64),
    "model.layers.0.mlp.up_proj": (64, 64),
    "model.layers.0.mlp.down_proj": (64, 64),
}
NORMS = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Exported from a run with random weights."""
    run = tmp_path_factory.mktemp("run")
    mx.random.seed(1)
    weights = {f"{name}.weight": mx.random.normal(size) / 8 for name, size in SIZES.items()}
    weights |= {f"{name}.weight": mx.ones(64) for name in NORMS}
    mx.save_safetensors(str(run / "weights.safetensors"), weights)
    (run / "shape.json").write_text(json.dumps(SHAPE))
    log = {
        "steps": 40,
        "tokens": 5_000_000,
        "runs": [{"phases": [{"length": 256, "steps": 40, "seconds": 3.2}]}],
        "curve": [[20, 256, 5.0, 0.25, []], [40, 256, 2.5, 0.75, []]],
        "recall": [
            {"task": "single_key", "num_tokens": 1024, "depth": 0.05, "num_questions": 3, "recall": 1.0},
            {"task": "single_key", "num_tokens": 1024, "depth": 0.95, "num_questions": 1, "recall": 0.0},
        ],
    }
    (run / "run.json").write_text(json.dumps(log))
    path = tmp_path_factory.mktemp("model")
    export(run, path)
    return path


def test_the_engine_answers_with_an_exported_folder(folder):
    model = load_model(folder)
    assert model.card.context_tokens == CONTEXT_TOKENS
    rng = np.random.default_rng(0)
    document = make_document(rng, Filler(rng, 500), 400, make_facts(rng, 3))
    engine = engine_of(model, "int4c", None)
    assert ask(engine, document, document.questions).recall == 0.0
    assert ask(engine, document, document.questions).cached_tokens > 0
    assert ask_exactly(model, document, document.questions).recall == 0.0


def test_the_card_weighs_recall_by_questions(folder):
    card = (folder / "README.md").read_text()
    assert "| single_key | 75.0 |" in card
    assert "| 0.05 | 100.0 |" in card
    assert "| 256 | 40 | 3 |" in card
    assert "5.0 million" in card


def test_the_curves_are_a_picture_of_loss_and_right_tokens(folder):
    lines = ET.parse(folder / "curves.svg").getroot().findall("{*}polyline")
    heights = [[float(point.split(",")[1]) for point in line.get("points").split()] for line in lines]
    assert heights[0][0] < heights[0][1]
    assert heights[1][0] > heights[1][1]
