import mlx.core as mx
import pytest

from kernels import prefill_attention, slices


@pytest.fixture
def arrays():
    """In 16 bits, which our C++ leaves to MLX."""
    mx.random.seed(4)
    q = mx.random.normal((1, 6, 200, 64)).astype(mx.float16)
    k, v = (mx.random.normal((1, 2, 1000, 64)).astype(mx.float16) for _ in "kv")
    mx.eval(q, k, v)
    return q, k, v


def num_calls(call, monkeypatch):
    seen, attention = [], mx.fast.scaled_dot_product_attention
    with monkeypatch.context() as patch:
        patch.setattr(
            mx.fast, "scaled_dot_product_attention", lambda *a, **k: seen.append(1) or attention(*a, **k)
        )
        return call(), len(seen)


@pytest.mark.parametrize("sinks", [None, mx.array([-2.0, 0, 1, 3, 9, 50], mx.float16)], ids=["", "sinks"])
@pytest.mark.parametrize("rows", [1, 7, 64, 199])
def test_slices_give_what_the_whole_gives(arrays, monkeypatch, rows, sinks):
    whole = mx.fast.scaled_dot_product_attention(*arrays, scale=0.125, mask="causal", sinks=sinks)
    monkeypatch.setattr(slices, "FUSED_HEAD_DIMS", ())
    monkeypatch.setattr(slices, "SCORES_BYTES", rows * 6 * 1000 * 2)
    out, found = num_calls(lambda: prefill_attention(*arrays, 0.125, sinks), monkeypatch)
    assert found == -(-200 // rows)
    assert mx.allclose(out, whole, atol=2e-3)


def test_a_row_that_is_larger_than_the_limit_is_a_slice(arrays, monkeypatch):
    monkeypatch.setattr(slices, "FUSED_HEAD_DIMS", ())
    monkeypatch.setattr(slices, "SCORES_BYTES", 1)
    q, k, v = arrays
    out, found = num_calls(lambda: prefill_attention(q[:, :, :3], k, v, 0.125), monkeypatch)
    assert (found, out.shape) == (3, (1, 6, 3, 64))


def test_what_fits_is_one_call(arrays, monkeypatch):
    _, found = num_calls(lambda: prefill_attention(*arrays, 0.125), monkeypatch)
    assert found == 1


def test_memory_is_that_of_a_slice(monkeypatch):
    """With heads for which no device has a fused kernel."""
    q = mx.random.normal((1, 6, 200, 144)).astype(mx.float16)
    k, v = (mx.random.normal((1, 2, 4000, 144)).astype(mx.float16) for _ in "kv")
    mx.eval(q, k, v)
    scores = 6 * 200 * 4000 * 2

    def peak(limit):
        monkeypatch.setattr(slices, "SCORES_BYTES", limit)
        before = mx.get_active_memory()
        mx.clear_cache()
        mx.reset_peak_memory()
        mx.eval(prefill_attention(q, k, v, 0.125))
        return mx.get_peak_memory() - before

    assert peak(scores) > scores
    assert peak(scores // 20) < 0.3 * scores


@pytest.mark.skipif(mx.default_device() == mx.Device(mx.cpu), reason="there is no GPU here")
def test_a_fused_kernel_takes_all_queries_at_once(arrays, monkeypatch):
    monkeypatch.setattr(slices, "SCORES_BYTES", 1)
    _, found = num_calls(lambda: prefill_attention(*arrays, 0.125), monkeypatch)
    assert found == 1


def test_sinks_take_weight_in_float32_too(arrays):
    """Where our C++ takes the rest."""
    q, k, v = (x.astype(mx.float32) for x in arrays)
    sinks = mx.array([-2.0, 0, 1, 3, 9, 50])
    out = prefill_attention(q, k, v, 0.125, sinks)
    whole = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal", sinks=sinks)
    assert mx.allclose(out, whole, atol=1e-5)
    assert mx.abs(out[:, 5]).max() < 1e-6  # the last head's sink takes all
