"""Architectures that nobody has verified: taken where they compute what mlx_lm's model does, by its name."""

import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from cache_store import SnapshotStore
from tests.worker.engine.test_architectures import (
    HEADS_FILL_THE_WIDTH,
    SHAPE,
    WORDS,
    Tokens,
    by_mlx_lm,
    prompt_tokens,
    write_model,
)
from worker.engine import model as model_loader
from worker.engine.architectures import WHY_NOT, refusal
from worker.engine.engine import Document, Engine, EngineError, Sampling
from worker.engine.kv_cache import CompressedLayer
from worker.engine.report import Silent
from worker.engine.shapes import layer_shapes
from worker.engine.unverified import require_same_model

PLAIN = {
    "ernie4_5": HEADS_FILL_THE_WIDTH | {"use_bias": False},
    "glm": {"attention_bias": True},
    "olmo2": HEADS_FILL_THE_WIDTH,
    "seed_oss": {"attention_bias": True, "attention_out_bias": False},
}
REFUSED = {
    "cohere": (HEADS_FILL_THE_WIDTH, "computes something else than in mlx_lm"),
    "cohere2": (HEADS_FILL_THE_WIDTH | {"num_hidden_layers": 4}, "more .* than all keys .*RotatingKVCache"),
    "gemma": ({}, "computes something else than in mlx_lm"),
    "internlm2": ({"bias": False}, "can't be walked one by one .*embed_tokens"),
    "phimoe": (HEADS_FILL_THE_WIDTH, "its weights take .* where memory is planned for"),
}


def make_folder(path, smollm2, architecture, **changes):
    config = SHAPE | {"model_type": architecture, "eos_token_id": 2, "layer_norm_eps": 1e-5} | changes
    return write_model(path, smollm2, config)


@pytest.mark.parametrize("architecture", PLAIN)
def test_a_plain_walk_gives_mlx_lms_tokens_and_the_same_restored(tmp_path, smollm2, caplog, architecture):
    folder = make_folder(tmp_path, smollm2, architecture, **PLAIN[architecture])
    model = model_loader.load(folder, "tiny", unverified=True)
    assert f"{architecture!r} is not verified; 4 layers at a time are" in caplog.text
    engine = Engine(model, SnapshotStore(tmp_path / "s", 100_000_000, min_free_bytes=0))
    short, report = [Document("d", WORDS * 5)], Tokens()
    engine.generate(short, "What?", Sampling(12), report)
    expected = by_mlx_lm(folder, prompt_tokens(engine, short, "What?"), 12)
    expected = expected[: expected.index(2)] if 2 in expected else expected
    assert report.text == model.tokenizer.decode(expected).removeprefix(" ")
    long = [Document("d", WORDS * 40)]
    cold = engine.generate(long, "What?", Sampling(20), Silent())
    restored = Engine(model, engine._store).generate(long, "What?", Sampling(20), Silent())
    assert restored.usage.cached_tokens > 500
    assert restored.text == cold.text


def test_a_deep_model_in_16_bits_is_compared_without_their_rounding_and_left_as_it_was(tmp_path, smollm2):
    """Of 24 random layers it alone makes 0.16 to 0.4 nats."""
    folder = make_folder(tmp_path, smollm2, "seed_oss", num_hidden_layers=24, **PLAIN["seed_oss"])
    module, config = load_model(folder)
    module.set_dtype(mx.bfloat16)
    before = dict(tree_flatten(module.parameters()))
    require_same_model("tiny", module, config, layer_shapes(config))
    after = dict(tree_flatten(module.parameters()))
    assert after.keys() == before.keys()
    assert all(
        after[name].dtype == mx.bfloat16 and mx.array_equal(after[name], before[name]) for name in before
    )


@pytest.mark.parametrize("broken", [0, 5])
def test_one_layer_that_computes_something_else_is_found(tmp_path, smollm2, broken):
    folder = make_folder(tmp_path, smollm2, "seed_oss", num_hidden_layers=6, **PLAIN["seed_oss"])
    module, config = load_model(folder)

    class Other(type(module.model.layers[broken])):
        def __call__(self, x, mask=None, cache=None):
            return super().__call__(x * (0.7 if isinstance(cache, CompressedLayer) else 1), mask, cache)

    module.model.layers[broken].__class__ = Other
    with pytest.raises(EngineError, match="computes something else than in mlx_lm"):
        require_same_model("tiny", module, config, layer_shapes(config))


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_is_no_plain_walk_is_refused_with_the_reason(tmp_path, smollm2, architecture):
    changes, reason = REFUSED[architecture]
    folder = make_folder(tmp_path, smollm2, architecture, **changes)
    with pytest.raises(EngineError, match=f"{architecture!r}, which is not verified, and .*{reason}"):
        model_loader.load(folder, "tiny", unverified=True)


@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": 1024}, {"layer_types": ["chunked_attention"] * 3}, {"attention_window_size": 64}],
)
def test_windows_are_refused_since_few_tokens_would_not_show_them(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "olmo2"} | changes))
    with pytest.raises(EngineError, match="with a window, which are served in verified"):
        model_loader.load(tmp_path, "tiny", unverified=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        {"use_sliding_window": False, "sliding_window": 1024, "max_window_layers": 2},
    ],
)
def test_windows_that_are_stated_and_not_in_use_are_none(changes):
    config = SHAPE | {"model_type": "olmo2"} | changes
    assert refusal(config, unverified=True) is None


@pytest.mark.parametrize("architecture", WHY_NOT)
def test_what_is_known_not_to_be_served_is_never_taken(tmp_path, architecture):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": architecture}))
    with pytest.raises(EngineError, match=f"is not verified: {WHY_NOT[architecture]}") as caught:
        model_loader.load(tmp_path, "tiny", unverified=True)
    assert "LONGLEAF_UNVERIFIED_MODEL" not in str(caught.value)


def test_a_refusal_names_the_setting(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "olmo2"}))
    with pytest.raises(EngineError, match=r"'olmo2', which is not verified; .* LONGLEAF_UNVERIFIED_MODEL=1"):
        model_loader.load(tmp_path, "tiny")
