"""The planner's numbers: against public sizes, against what the engine lays out, against measured peaks."""

import copy
import json
import shutil
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

from bench.random_models import SHAPES
from kernels import BLOCK_TOKENS, MAX_QUERIES, TileLayout, slices
from tests.worker.engine.test_architectures import OWN_SHAPE, SHAPE, tiny_config
from tests.worker.engine.test_memory import MAC
from worker import plan as command
from worker.engine import model as model_loader
from worker.engine import planner, prefill, window
from worker.engine.architectures import VERIFIED_ARCHITECTURES
from worker.engine.engine import Engine, EngineError
from worker.engine.kv_cache import SINK_TOKENS, TAIL_TOKENS, KVCache, blocks_end
from worker.engine.planner import machine_bytes, most_tokens, plan
from worker.engine.report import Silent
from worker.engine.shapes import LayerShape
from worker.engine.weights import weights_bytes

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FOUR_BITS = {"torch_dtype": "bfloat16", "quantization": {"group_size": 64, "bits": 4}}
LLAMA_70B_4BIT = (
    LLAMA_8B
    | FOUR_BITS
    | {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672, "num_attention_heads": 64}
)
QWEN3_4B_4BIT = FOUR_BITS | {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
# The makers' count of parameters; GB of weights, KV fp16, KV int4c, prefill and total at 131,072 tokens.
GOLDEN = [
    (LLAMA_8B, 8_030_261_248, [16.06, 17.18, 4.74, 2.15, 22.94]),
    (LLAMA_70B_4BIT, 70_553_706_496, [39.69, 42.95, 11.84, 3.22, 54.75]),
    (QWEN3_4B_4BIT, 4_022_468_096, [2.26, 19.33, 5.33, 1.74, 9.34]),
]


@pytest.mark.parametrize(("config", "num_parameters", "golden"), GOLDEN, ids=["8B", "70B", "4B"])
def test_public_shapes_at_131072_tokens(config, num_parameters, golden):
    dense = {key: value for key, value in config.items() if key != "quantization"}
    assert weights_bytes(dense) == 2 * num_parameters
    found = plan(config, 131072)
    sizes = (
        found.weights_bytes,
        found.kv_fp16_bytes,
        found.kv_bytes,
        found.working_bytes,
        found.total_bytes,
    )
    assert [round(size / 1e9, 2) for size in sizes] == golden
    assert found.kv_fp16_bytes_per_token / found.kv_bytes_per_token == pytest.approx(3.71, abs=0.005)


def test_scores_that_are_laid_out_take_no_more_with_more_tokens():
    """Of heads of 512, for which no GPU has a fused kernel: a chunk's scores would take 17 GB at once."""
    config = SHAPES["gemma-4-31b"]
    dense = {key: value for key, value in config.items() if key != "quantization"}
    assert weights_bytes(dense) / 2 == pytest.approx(30.7e9, rel=1e-3)  # as its makers say
    short, long = (plan(config, num_tokens) for num_tokens in (16384, 131072))
    assert short.activations_bytes == long.activations_bytes < 2e9
    assert long.total_bytes < 27e9


def test_its_constants_are_the_engines():
    assert (planner.SINK_TOKENS, planner.BLOCK_TOKENS) == (SINK_TOKENS, BLOCK_TOKENS)
    assert planner.WINDOW_SPARE_TOKENS == window.SPARE_TOKENS
    assert planner.CHUNK_TOKENS == prefill.CHUNK_TOKENS
    assert planner.CPU_CHUNK_TOKENS == prefill.CPU_CHUNK_TOKENS
    assert (planner.TAIL_TOKENS, planner.QUERY_TOKENS) == (TAIL_TOKENS, MAX_QUERIES)
    assert (planner.FUSED_HEAD_DIMS, planner.SCORES_BYTES) == (slices.FUSED_HEAD_DIMS, slices.SCORES_BYTES)
    assert KVCache([LayerShape(1, 64)], mx.float32).arrays()[-1].shape[2] == planner._tail_room(0, 0, 0)
    for dim in (64, 80, 96, 112, 128, 192, 256, 512):
        for format in ("int4c", "k8v4"):
            shape = LayerShape(1, dim, format=format)
            assert planner._tile_bytes(shape) == TileLayout(dim, format).tile_bytes


@pytest.mark.parametrize("architecture", VERIFIED_ARCHITECTURES)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_those_of_mlx_lms_model(architecture, tied):
    config = tiny_config(architecture) | {"vocab_size": 100, "torch_dtype": "float32"}
    config.get("text_config", config)["tie_word_embeddings"] = tied
    make, args = _get_classes(config)
    model = make(args.from_dict(copy.deepcopy(config)))
    if tied and architecture.startswith("gemma3"):
        # These learn that they are tied from weights without a head.
        getattr(model, "language_model", model).sanitize({})
    parameters = tree_flatten(model.parameters())
    assert weights_bytes(config) == sum(array.nbytes for _, array in parameters)


def test_a_matrix_with_bits_of_its_own_is_counted_so():
    path = "model.layers.3.mlp.down_proj"
    eight = {"quantization": FOUR_BITS["quantization"] | {path: {"group_size": 64, "bits": 8}}}
    extra = weights_bytes(QWEN3_4B_4BIT | eight) - weights_bytes(QWEN3_4B_4BIT)
    assert extra == 2560 * 9728 // 2


def measured_and_planned(model, num_blocks):
    """Peaks of a prefill beside the weights, which would hide an error of the rest."""
    num_tokens, num_suffix = blocks_end(num_blocks) + 100, 100
    tokens = np.random.default_rng(0).integers(0, 40000, num_tokens).astype(np.uint32)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    cache = model.new_cache()
    prefill.prefill_prefix(model, cache, tokens[:-num_suffix], 0, Silent())
    mx.eval(prefill.prefill_suffix(model, cache, tokens[-num_suffix:], 0, Silent()))
    measured = mx.get_peak_memory() - before
    found = plan(model.config, num_tokens, num_suffix, num_output=0, on_cpu=True)
    assert found.weights_bytes == pytest.approx(model.card.weights_bytes, rel=0.001)
    return measured, found.kv_bytes + found.working_bytes


@pytest.mark.parametrize("num_blocks", [8, 16])
def test_the_measured_peak_is_within_15_percent(model, num_blocks):
    measured, planned = measured_and_planned(model, num_blocks)
    assert planned == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    "architecture", ["gpt_oss", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe"]
)
def test_the_measured_peak_of_other_layers_is_within_15_percent(architecture, smollm2, tmp_path):
    """Layers wide enough that their activations count."""
    wide = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 1024}
    wide |= {"moe_intermediate_size": 256, "tie_word_embeddings": True}
    config = SHAPE | OWN_SHAPE.get(architecture, {}) | wide | {"model_type": architecture, "eos_token_id": 2}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2 / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    make, args = _get_classes(config)
    weights = dict(tree_flatten(make(args.from_dict(config)).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, {"format": "mlx"})
    del weights
    measured, planned = measured_and_planned(model_loader.load(tmp_path, "wide"), 8)
    assert planned == pytest.approx(measured, rel=0.15)


def test_the_most_tokens_just_fit():
    limit = 50_000_000_000
    most = most_tokens(LLAMA_70B_4BIT, limit)
    assert 0 < most < 131072
    assert plan(LLAMA_70B_4BIT, most).total_bytes <= limit < plan(LLAMA_70B_4BIT, most + 1).total_bytes
    assert most_tokens(LLAMA_70B_4BIT, 39_000_000_000) == 0


def test_a_request_that_cannot_fit_is_refused_with_the_numbers(model, document, answer):
    long, short = document(1500), document(300)
    limit = plan(model.config, 1000, num_suffix=30, num_output=16, on_cpu=True).total_bytes
    engine = Engine(model, None, memory_bytes=limit)
    with pytest.raises(EngineError, match=r"the limit is 0\.\d\d GB.*tokens would fit") as caught:
        answer(engine, long)
    problem = caught.value.problem
    assert problem.code == "memory_exceeded"
    assert problem.params["predicted_bytes"] > problem.params["limit_bytes"] == limit
    assert 500 < problem.params["fitting_tokens"] < 1500
    assert answer(engine, short).usage.output_tokens > 0


def test_a_model_that_cannot_fit_is_refused_before_its_weights_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    with pytest.raises(EngineError, match="no document would fit") as caught:
        model_loader.load(tmp_path, "big", memory_bytes=10_000_000_000)
    assert caught.value.problem.code == "memory_exceeded"


def test_a_config_without_a_size_is_refused(tmp_path):
    config = {key: value for key, value in LLAMA_8B.items() if key != "vocab_size"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="states no 'vocab_size'"):
        model_loader.load(tmp_path, "odd")


def test_the_table_of_a_model_folder(tmp_path, capsys):
    folder = tmp_path / "mlx-community--big"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_70B_4BIT))
    options = ["--context", "131072", "--models-dir", str(tmp_path)]
    assert command.main(["mlx-community/big", "--memory", "64GB", *options]) == 0
    fitting = capsys.readouterr().out
    assert command.main([str(folder), "--memory", "48GB", *options]) == 0
    short = capsys.readouterr().out
    for number in ("39.69 GB", "42.95 GB", "11.84 GB", "3.22 GB", "54.75 GB"):
        assert number in fitting
    assert fitting.split("fits in 64.00 GB?")[1].split()[0] == "yes"
    assert short.split("fits in 48.00 GB?")[1].split()[0] == "no"


def test_a_gguf_is_planned_as_what_it_was_made_into(tmp_path, capsys):
    (tmp_path / "big.Q4").mkdir()
    (tmp_path / "big.Q4" / "config.json").write_text(json.dumps(LLAMA_70B_4BIT))
    assert command.main(["/far/big.Q4.gguf", "--memory", "64GB", "--models-dir", str(tmp_path)]) == 0
    assert "39.69 GB" in capsys.readouterr().out


def test_without_a_size_it_is_planned_for_what_this_device_may_use(tmp_path, capsys, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B_4BIT))
    monkeypatch.setattr(mx, "device_info", lambda: MAC)
    assert command.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.split("fits in 51.54 GB?")[1].split()[0] == "no"
    assert command.main([str(tmp_path), "--cpu"]) == 0
    assert f"fits in {machine_bytes() / 1e9:.2f} GB?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"model_type": "gemma2"}, [], "'gemma2', which is not verified: it caps its attention scores"),
        ({}, ["--context", "200000"], "context of 131072"),
        ({}, ["--memory", "much"], "--memory much"),
        ({"vocab_size": None}, [], "states no 'vocab_size'"),
    ],
)
def test_what_cannot_be_planned_exits_with_2(tmp_path, capsys, changes, options, reason):
    config = {key: value for key, value in (LLAMA_8B | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert command.main([str(tmp_path), *options]) == 2
    assert reason in capsys.readouterr().err


def test_planning_for_another_machine_loads_no_mlx(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    code = (
        f"import sys, worker.plan; worker.plan.main([{str(tmp_path)!r}, '--memory', '64GB']); "
        "print(*{n.partition('.')[0] for n in sys.modules})"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "mlx" not in loaded.split()


def test_the_table_names_the_most_bits_that_a_model_may_need(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {"model_type": "qwen2"}))
    assert command.main([str(tmp_path), "--memory", "64GB"]) == 0
    assert "KV k8v4" in capsys.readouterr().out
