"""Tiny random models of each verified architecture: our engine against mlx_lm's own generation."""

import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache as DenseCache
from mlx_lm.utils import _get_classes, load_model

from bench.teacher_forced import as_mlx
from cache_store import SnapshotStore
from worker.engine import attention, prefill
from worker.engine import model as model_loader
from worker.engine.architectures import VERIFIED_ARCHITECTURES, WHY_NOT
from worker.engine.decode import forward
from worker.engine.engine import Document, Engine, EngineError, Sampling
from worker.engine.kv_cache import KVCache
from worker.engine.prefill import prefill_prefix, prefill_suffix
from worker.engine.products import join_products
from worker.engine.report import Silent
from worker.engine.shapes import layer_shapes, text_config
from worker.engine.walk import walk

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
    "gemma3_text": {"sliding_window": 48, "sliding_window_pattern": 3, "query_pre_attn_scalar": 64},
    "gemma4": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 96,
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "layer_types": [
            f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "sliding", "full")
        ],
        "sliding_window": 48,
        "global_head_dim": 128,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": SHAPE["vocab_size"],
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "sliding_window": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "mistral": {
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "mixtral": HEADS_FILL_THE_WIDTH | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": HEADS_FILL_THE_WIDTH | {"partial_rotary_factor": 0.75},
    "qwen2": HEADS_FILL_THE_WIDTH,
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
"""What sets an architecture apart from llama is used: windows shorter than any prompt here, layers that read
another's keys and values, experts, partial rotation, layers without rotation."""
WORDS = "the tide rose and the keeper wrote the hour and the height of the water in the book "


def tiny_config(architecture):
    """config.json's content; of a text model beside vision the one inside, wrapped."""
    if architecture in ("gemma3", "gemma4"):
        inner = tiny_config(f"{architecture}_text") | OWN_SHAPE.get(architecture, {})
        return {"model_type": architecture, "text_config": inner, "vocab_size": SHAPE["vocab_size"]}
    return SHAPE | OWN_SHAPE.get(architecture, {}) | {"model_type": architecture, "eos_token_id": 2}


def random_weight(architecture, name, like):
    if architecture == "qwen2" and name.endswith("k_proj.bias") and "layers.1." not in name:
        return mx.random.normal(like.shape) * 20  # as in some layers of real ones
    if "norm" not in name:
        return mx.random.normal(like.shape) * 2 / like.shape[-1] ** 0.5
    if architecture.startswith("gemma3"):
        return mx.zeros(like.shape)  # one is added to it
    if architecture.startswith("gemma4") and "q_norm" in name:
        return mx.full(like.shape, like.shape[-1] ** -0.5)  # its attention has no other scale
    return mx.ones(like.shape)


def write_model(path, smollm2, config):
    """A model folder with random weights large enough that greedy choices differ from step to step."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(smollm2 / name, path / name)
    (path / "config.json").write_text(json.dumps(config))
    make, args = _get_classes(config)
    mx.random.seed(5)
    parameters = tree_flatten(make(args.from_dict(config)).parameters())
    weights = {name: random_weight(config["model_type"], name, w) for name, w in parameters}
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return path


@pytest.fixture(scope="module", params=VERIFIED_ARCHITECTURES)
def folder(request, smollm2, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(request.param), smollm2, tiny_config(request.param))


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


def test_prompts_longer_than_a_window_and_a_chunk_give_mlx_lms_tokens(folder, monkeypatch):
    """Without a prefix all is exact up to the tail's 2,048 tokens, windows and borrowed layers too."""
    monkeypatch.setattr(prefill, "CPU_CHUNK_TOKENS", 100)
    model = model_loader.load(folder, "tiny")
    tokens = prompt_tokens(Engine(model, None), [Document("d", WORDS * 30)], "What?")
    assert len(tokens) > 500
    cache = model.new_cache()
    logits = prefill_suffix(model, cache, tokens, 0, Silent())
    found = []
    for _ in range(12):
        found.append(int(mx.argmax(logits)))
        logits = forward(model, cache, mx.array([[found[-1]]]))[:, -1]
        mx.eval(logits, cache.arrays())
    assert found == by_mlx_lm(folder, tokens, 12)
    assert len(set(found)) > 3


def width(part):
    """Of what the part's weights multiply; 0 if it cannot be quantised."""
    return part.weight.shape[-1] if hasattr(part, "to_quantized") else 0


def test_joined_products_change_nothing_beyond_rounding(folder):
    """Weights stay quantised only on a GPU, so here they are quantised behind the loader's back."""
    module, config = load_model(folder)
    module.set_dtype(mx.float32)
    nn.quantize(module, 32, 4, class_predicate=lambda _, part: width(part) and width(part) % 32 == 0)
    parts, shapes = walk(module, config["model_type"]), layer_shapes(text_config(config))

    def logits_of_steps():
        cache = KVCache(shapes, mx.float32)
        return [forward(parts, cache, mx.array([[token]])) for token in (5, 17, 5, 900)]

    apart = logits_of_steps()
    join_products(parts.modules)
    num_joined = sum(hasattr(part, "group") for layer in parts.modules for _, part in layer.named_modules())
    assert num_joined >= (0 if config["model_type"] == "phi3" else 2 * sum(s.source is None for s in shapes))
    for a, b in zip(logits_of_steps(), apart, strict=True):
        assert mx.allclose(a, b, atol=1e-4 * float(mx.abs(b).max()))


def divergence(exact, other):
    """KL divergence of the next token's distribution, in nats."""
    log_p, log_q = (x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (exact, other))
    return float((mx.exp(log_p) * (log_p - log_q)).sum())


QUESTIONS = [f"What of the {word}?" for word in ("tide", "keeper", "hour", "height", "water", "book")]
MAX_DIVERGENCE = 0.01
"""With windows; mlx_lm has no 4-bit cache for some of these to compare with."""


class FourBitCache(DenseCache):
    """Holds the numbers of mlx_lm's 4-bit cache, whose own product MLX doesn't have on CUDA."""

    def update_and_fetch(self, k, v):
        return super().update_and_fetch(*as_mlx()(k, v))


def divergence_from_exact(folder, model, make_cache=None):
    """Of a question's first token behind 448 tokens, 384 of them in our blocks, or all in another cache."""
    engine = Engine(model, None)
    peer, _ = load_model(folder)
    peer.set_dtype(mx.float32)
    found = []
    for question in QUESTIONS:
        tokens = prompt_tokens(engine, [Document("d", WORDS * 26)], question)
        exact = peer(mx.array(tokens)[None])[:, -1]
        if make_cache:
            cache = make_cache()
            peer(mx.array(tokens[:448])[None], cache=cache)
            logits = peer(mx.array(tokens[448:])[None], cache=cache)[:, -1]
        else:
            cache = model.new_cache()
            prefill_prefix(model, cache, tokens[:448], 2, Silent())
            assert cache.num_blocks == 3
            logits = prefill_suffix(model, cache, tokens[448:], 0, Silent())
        found.append(divergence(exact, logits))
    return sum(found) / len(found)


def test_the_compressed_prefix_is_close_to_exact(folder, monkeypatch):
    """int4c spends 4.31 bits on a number, mlx_lm's 4-bit cache 4.5."""
    monkeypatch.setattr(prefill, "CPU_CHUNK_TOKENS", 100)
    model = model_loader.load(folder, "tiny")
    ours = divergence_from_exact(folder, model)
    if model.new_cache().windows:
        assert 0 < ours < MAX_DIVERGENCE
        return
    theirs = divergence_from_exact(folder, model, lambda: [FourBitCache() for _ in model.layers])
    assert 0 < ours < 0.7 * theirs


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
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 64}, "a window in every layer"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window as None"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "kind 'linear_attention'"),
        (
            {"model_type": "gemma3_text", "layer_types": ["full_attention"] * 3},
            "other than those that mlx_lm",
        ),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": 2, "final_logit_softcapping": 30.0},
            "final_logit_softcapping",
        ),
        (
            {"model_type": "gemma3_text", "sliding_window_pattern": 2, "use_bidirectional_attention": True},
            "ahead of a query",
        ),
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
