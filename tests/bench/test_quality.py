"""The quality bench on the real small model, over short windows of the demo's report."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache as MlxKVCache
from mlx_lm.models.cache import QuantizedKVCache

from bench import quality, quality_plot, teacher_forced
from bench.divergence import Divergence, divergence
from bench.teacher_forced import CodedLayer, Window, as_mlx, as_tiles
from kernels import FORMATS, TileLayout
from tests.worker.engine.tiny import load_tiny
from worker import models
from worker.engine.model import load

TEXT = Path(__file__).parents[2] / "examples" / "report.md"
PREFIX, SUFFIX = 192, 64


@pytest.fixture(scope="module")
def model():
    return load(models.ensure("smollm2-135m-instruct", models.default_models_dir()), "smollm2")


@pytest.fixture(scope="module")
def tokens(model):
    return np.array(model.tokenizer.encode(TEXT.read_text()), np.uint32)


@pytest.fixture(scope="module")
def window(tokens):
    return Window(tokens[: PREFIX + SUFFIX + 1], PREFIX)


@pytest.fixture(scope="module")
def exact(model, window):
    return teacher_forced.exact(model, window)


def kl(a, b, window):
    return float(divergence(a, b, window.targets).kl.mean())


def through(model, window, caches, fed):
    """Logits of the model's layers over caches of mlx_lm's own, which its attention reads in its own way."""
    ids = mx.array(fed)[None]
    h = model.embed(ids)
    for layer, cache in zip(model.layers, caches, strict=True):
        h = layer.args[0](h, mask="causal", cache=cache)
    return np.array(model.head(model.norm(h))[0])[-len(window.targets) :]


def test_divergence_is_that_of_the_definition():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.5, 0.25]
    logits = [np.log(np.array([x], np.float32)) + 3 for x in (p, q)]
    found = divergence(*logits, np.array([1]))
    assert found.kl[0] == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5), rel=1e-6)
    assert found.flips.tolist() == [True]
    assert found.summary()["perplexity"] == pytest.approx(2, rel=1e-6)
    assert found.summary()["perplexity_delta"] == pytest.approx(2 - 4, rel=1e-6)


def test_divergences_join_in_order():
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((70, 11)).astype(np.float32) for _ in "ab")
    targets = rng.integers(0, 11, 70)
    whole = divergence(a, b, targets)
    halves = [divergence(a[i : i + 35], b[i : i + 35], targets[i : i + 35]) for i in (0, 35)]
    assert np.array_equal(Divergence.join(halves).kl, whole.kl)
    assert (whole.kl > 0).all()


def test_exact_against_itself_costs_nothing(model, window, exact):
    again = divergence(exact, teacher_forced.exact(model, window), window.targets).summary()
    assert (again["kl_mean"], again["flip_rate"], again["perplexity_delta"]) == (0, 0, 0)
    assert again["num_tokens"] == SUFFIX
    assert 1 < again["perplexity"] < 100


def test_fewer_bits_cost_more(model, window, exact):
    num_all = len(window.fed)

    def cost(codec):
        return kl(exact, teacher_forced.chunk_major(model, window, codec, 0, num_all), window)

    int8, int4c, two_bits = (cost(c) for c in (as_tiles("int8"), as_tiles("int4c"), as_mlx(bits=2)))
    assert 0 < 10 * int8 < int4c < two_bits / 10


def test_a_coded_prefix_is_closer_than_coding_everything(model, window, exact):
    num_all, codec = len(window.fed), as_tiles("affine4")
    ends_dense = teacher_forced.chunk_major(model, window, codec, 64, window.num_coded)
    nothing_dense = teacher_forced.chunk_major(model, window, codec, 0, num_all)
    assert 0 < kl(exact, ends_dense, window) < kl(exact, nothing_dense, window) / 2


def test_the_peer_keeps_mlx_lms_codes_and_attends_as_mlx_lm(model, window):
    """Layer by layer: through a whole model, codes that rounding decides set two equal runs apart."""
    h = model.embed(mx.array(window.fed)[None])
    for layer in model.layers[:6]:
        theirs = QuantizedKVCache(group_size=64, bits=4)
        ours = CodedLayer(len(window.fed), model.shapes[0], model.dtype)
        ours.codec = as_mlx()
        expected, out = (layer.args[0](h, mask="causal", cache=cache) for cache in (theirs, ours))
        for kept, coded in zip(ours.held(), theirs.keys_and_values(), strict=True):
            assert mx.array_equal(kept, mx.dequantize(*coded, group_size=64, bits=4))
        assert mx.abs(out - expected).max() < 1e-5 * mx.abs(expected).max()
        h = expected


def test_the_peer_costs_what_mlx_lms_cache_costs(model, window, exact):
    caches = [QuantizedKVCache(group_size=64, bits=4) for _ in model.layers]
    theirs = kl(exact, through(model, window, caches, window.fed), window)
    ours = kl(exact, teacher_forced.chunk_major(model, window, as_mlx(), 0, len(window.fed)), window)
    assert ours == pytest.approx(theirs, rel=0.2)


def test_the_peers_generate_is_exact_for_its_first_step(model, window, exact):
    caches = [MlxKVCache() for _ in model.layers]
    through(model, window, caches, window.fed[:PREFIX])
    coded = [cache.to_quantized(group_size=64, bits=4) for cache in caches]
    theirs = kl(exact, through(model, window, coded, window.fed[PREFIX:]), window)
    ours = kl(exact, teacher_forced.mlx_lm_generate(model, window, as_mlx()), window)
    assert ours == pytest.approx(theirs, rel=0.2)


def test_windows_are_the_same_each_time_and_begin_as_every_text_does(tokens):
    first, second = (quality.windows(tokens, [1, 2], 256, 128, 3) for _ in range(2))
    assert [w.tokens.tolist() for w in first] == [w.tokens.tolist() for w in second]
    assert all(w.tokens[:2].tolist() == [1, 2] and len(w.tokens) == 256 + 128 + 1 for w in first)
    assert len({tuple(w.tokens) for w in first}) == 3
    text = tokens.tolist()
    for w in first:
        assert len(w.targets) == 128
        part = w.tokens[2:].tolist()
        assert any(text[i : i + len(part)] == part for i in range(len(text)))


def test_a_text_without_room_for_a_window_is_refused(tokens):
    with pytest.raises(ValueError, match="a text of 300 tokens has no window of 385"):
        quality.windows(tokens[:300], [], 256, 128, 1)


@pytest.mark.parametrize("prefix", ["100", "300"])
def test_lengths_that_are_not_whole_blocks_are_refused(prefix, capsys):
    with pytest.raises(SystemExit):
        quality.parse(["folder", "--text", "book", "--prefix-tokens", prefix])
    assert "a multiple of 128" in capsys.readouterr().err


@pytest.fixture(scope="module")
def rows(model, tokens):
    arguments = ["folder", "--text", "report.md", "--prefix-tokens", str(PREFIX), "--windows", "1"]
    options = quality.parse([*arguments, "--suffix-tokens", str(SUFFIX)])
    return quality.measure(model, {"report.md": tokens}, [], options)


def test_a_restored_prefix_gives_the_cold_runs_logits_bit_for_bit(rows):
    restored = [row for row in rows if row["restored"]]
    assert restored
    assert [row["restored_difference"] for row in restored] == [0.0] * len(restored)
    for row in restored:
        cold = {**row, "restored": False, "restored_difference": None}
        assert cold in rows


def test_every_format_has_its_rows_and_its_bits(rows, model):
    rows = [row for row in rows if row["text"] == "all" and not row["restored"]]
    of = {(row["format"], row["prefill"], row["setting"]): row for row in rows}
    assert len(of) == len(rows)
    num_blocks = (PREFIX - 64) // 128
    for name in FORMATS:
        tiles = TileLayout(model.shapes[0].head_dim, name).bits_per_element
        assert of[name, "chunk-major", "stress"]["bits"] == tiles
        dense = PREFIX + SUFFIX - num_blocks * 128
        expected = (num_blocks * 128 * tiles + dense * 16) / (PREFIX + SUFFIX)
        assert of[name, "chunk-major", "deployment"]["bits"] == pytest.approx(expected)
    assert of["mlx-lm 4-bit", "generate", "deployment"]["bits"] == 4.5
    assert of["fp16", "chunk-major", "stress"]["bits"] == 16
    assert of["fp16", "chunk-major", "stress"]["kl_mean"] < of["int8", "chunk-major", "stress"]["kl_mean"]


def test_the_engines_prefill_is_closer_than_the_peer(rows):
    found = {
        (row["format"], row["prefill"]): row["kl_mean"] for row in rows if row["setting"] == "deployment"
    }
    assert 0 < found["int4c", "layer-major"] < 0.35 * found["mlx-lm 4-bit", "generate"]


def test_table_and_plot_show_every_row(rows, tmp_path, capsys):
    quality.print_table(rows)
    together = [row for row in rows if row["text"] == "all"]
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(together)
    path = tmp_path / "plot.svg"
    quality_plot.write(path, "a < b", together)
    circles = ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) == len(together)


def test_a_model_of_mixed_formats_runs_as_it_was_loaded(tokens, tmp_path):
    smollm2 = models.ensure("smollm2-135m-instruct", models.default_models_dir())
    qwen2 = load_tiny(tmp_path, smollm2, "qwen2")
    window = Window(tokens[:385], 320)
    truth = teacher_forced.exact(qwen2, window)
    formats = ["int4c", quality.MIXED, "k8v4"]
    runs = [
        run
        for run in quality.runs(qwen2, window, formats, ["deployment"], tmp_path / "snapshots")
        if run.case.prefill == "layer-major"
    ]
    assert [run.restored_difference for run in runs if run.case.restored] == [0.0] * 3
    four, mixed, eight = (run for run in runs if not run.case.restored)
    assert four.bits < mixed.bits < eight.bits
    assert kl(truth, mixed.logits, window) < kl(truth, four.logits, window) / 2
