"""Tiny random models of each verified architecture: our engine against mlx_lm's own generation."""

import json
import shutil

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.utils import _get_classes, load_model

from cache_store import SnapshotStore
from worker.engine import attention
from worker.engine import model as model_loader
from worker.engine.architectures import VERIFIED_ARCHITECTURES, WHY_NOT
from worker.engine.engine import Document, Engine, EngineError, Sampling
from worker.engine.kv_cache import KVCache
from worker.engine.prefill import prefill_prefix, prefill_suffix
from worker.engine.report import Silent

attention.install()

SHAPE = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "intermediate_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
HEADS_FILL_THE_WIDTH = {"hidden_size": 256, "num_attention_heads": 4}
"""For architectures without a head size of their own."""
OWN_SHAPE = {
    "mixtral": HEADS_FILL_THE_WIDTH | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": HEADS_FILL_THE_WIDTH | {"partial_rotary_factor": 0.75},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 96,
        "norm_topk_prob": True,
    },
    "smollm3": {"no_rope_layer_interval": 2},
}
"""What sets an architecture apart from llama is used: experts, partial rotation, layers without rotation."""
WORDS = "the tide rose and the keeper wrote the hour and the height of the water in the book "


@pytest.fixture(scope="module", params=VERIFIED_ARCHITECTURES)
def folder(request, smollm2, tmp_path_factory):
    """A model folder with random weights large enough that greedy choices differ from step to step."""
    path = tmp_path_factory.mktemp(request.param)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(smollm2 / name, path / name)
    config = SHAPE | OWN_SHAPE.get(request.param, {}) | {"model_type": request.param, "eos_token_id": 2}
    (path / "config.json").write_text(json.dumps(config))
    make, args = _get_classes(config)
    mx.random.seed(5)
    model = make(args.from_dict(config))
    weights = {
        name: mx.ones(w.shape) if "norm" in name else mx.random.normal(w.shape) * 2 / w.shape[-1] ** 0.5
        for name, w in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return path


def prompt_tokens(engine, documents, instruction):
    return engine._prompts.build(documents, instruction).tokens


def by_mlx_lm(folder, tokens, num_tokens):
    """mlx_lm's own greedy generation, with its own cache and loader."""
    from mlx_lm.generate import generate_step

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    steps = generate_step(mx.array(tokens), model, max_tokens=num_tokens)
    return [int(token) for token, _ in steps]


class Tokens(Silent):
    """Collects the text as it comes."""

    def __init__(self):
        self.text = ""

    def delta(self, text):
        self.text += text


def test_short_prompts_give_mlx_lms_tokens(folder):
    """Without a prefix of whole blocks the cache is dense, so nothing may differ from mlx_lm's own."""
    engine = Engine(model_loader.load(folder, "tiny"), None)
    documents = [Document("d", WORDS * 5)]
    tokens = prompt_tokens(engine, documents, "What?")
    assert len(tokens) < 170
    report = Tokens()
    output = engine.generate(documents, "What?", Sampling(12), report)
    expected = by_mlx_lm(folder, tokens, 12)
    if 2 in expected:
        expected = expected[: expected.index(2)]
    assert len(set(expected)) > 3
    assert output.usage.output_tokens == len(expected)
    # The streaming detokenizer leaves out the space before the first word.
    assert report.text == engine._model.tokenizer.decode(expected).removeprefix(" ")


def divergence(exact, other):
    """KL divergence of the next token's distribution, in nats."""
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (exact, other))
    return float((mx.exp(log_p) * (log_p - log_q)).sum())


def test_the_compressed_prefix_is_closer_to_exact_than_mlx_lms_four_bits(folder):
    """448 prefix tokens, 384 of them in int4c at 4.31 bits; mlx_lm's cache spends 4.5 on all of them."""
    model = model_loader.load(folder, "tiny")
    engine = Engine(model, None)
    peer, _ = load_model(folder)
    peer.set_dtype(mx.float32)
    ours, theirs = [], []
    for word in ("tide", "keeper", "hour", "height", "water", "book"):
        tokens = prompt_tokens(engine, [Document("d", WORDS * 26)], f"What of the {word}?")
        exact = peer(mx.array(tokens)[None])[:, -1]

        cache = KVCache(len(model.layers), model.num_kv_heads, model.head_dim, model.dtype)
        prefill_prefix(model, cache, tokens[:448], 2, Silent())
        assert cache.num_blocks == 3
        ours.append(divergence(exact, prefill_suffix(model, cache, tokens[448:], 0, Silent())))

        quantized = [QuantizedKVCache(group_size=64, bits=4) for _ in model.layers]
        peer(mx.array(tokens[:448])[None], cache=quantized)
        theirs.append(divergence(exact, peer(mx.array(tokens[448:])[None], cache=quantized)[:, -1]))
    assert 0 < sum(ours) < 0.7 * sum(theirs), (ours, theirs)


def test_restored_equals_cold(folder, tmp_path):
    model = model_loader.load(folder, "tiny")
    store = SnapshotStore(tmp_path / "s", 100_000_000, min_free_bytes=0)
    documents = [Document("d", WORDS * 40)]
    cold = Engine(model, store).generate(documents, "What?", Sampling(20), Silent())
    restored = Engine(model, store).generate(documents, "What?", Sampling(20), Silent())
    assert restored.usage.cached_tokens > 500
    assert restored.text == cold.text


def refused(tmp_path, **changes):
    """The refusal of a config; nothing else of the folder is looked at."""
    config = SHAPE | {"model_type": "llama"} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError) as caught:
        model_loader.load(tmp_path, "other")
    assert caught.value.problem.code == "unsupported_architecture"
    return str(caught.value)


@pytest.mark.parametrize("architecture", [*WHY_NOT, "unheard_of"])
def test_another_architecture_is_refused_by_name(tmp_path, architecture):
    message = refused(tmp_path, model_type=architecture)
    assert f"{architecture!r}, which is not verified" in message
    assert WHY_NOT.get(architecture, "") in message
    assert "llama" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 1024}, "window of 1,024 tokens"),
        ({"model_type": "phi3", "sliding_window": 2047}, "window of 2,047 tokens"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window layers"),
        ({"attention_bias": True}, "keys have a bias"),
        ({"model_type": "qwen3_moe", "rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": None}, "rope_theta"),
        ({"max_position_embeddings": None}, "max_position_embeddings as None"),
    ],
)
def test_what_a_verified_architecture_may_hide_is_refused(tmp_path, changes, reason):
    assert reason in refused(tmp_path, **changes)


@pytest.mark.parametrize("shape", [{"head_dim": 72}, {"model_type": "phi3", "hidden_size": 6 * 72}])
def test_a_head_size_without_a_format_is_refused(tmp_path, shape):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"model_type": "llama"} | shape))
    with pytest.raises(EngineError, match=r"head size.*72"):
        model_loader.load(tmp_path, "other")


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_broken_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(EngineError, match=r"config\.json"):
        model_loader.load(tmp_path, "broken")
