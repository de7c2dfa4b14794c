import mlx.core as mx
import pytest

from kernels import prefill_attention, slices
from tests.kernels import rounding


@pytest.fixture
def arrays():
    """In 16 bits, which our C++ leaves to MLX."""
    mx.random.seed(4)
    q = mx.random.normal((1, 6, 200, 64)).astype(mx.float16)
    k, v = (mx.random.normal((1, 2, 1000, 64)).astype(mx.float16) for _ in "kv")
    mx.eval(q, k, v)
    return q, k, v


@pytest.fixture
def unfused(monkeypatch):
    monkeypatch.setattr(slices, "FUSED_HEAD_DIMS", ())


def num_slices(call, monkeypatch):
    """What `call` returns, and the rows of scores of every slice that was laid out."""
    seen, softmax = [], mx.softmax
    with monkeypatch.context() as patch:
        patch.setattr(mx, "softmax", lambda x, **more: seen.append(x.shape[0]) or softmax(x, **more))
        return call(), seen


def peak_bytes(call):
    """The most that lives at once beside what did before."""
    mx.synchronize()  # a GPU gives back what it made the inputs from when it is done
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(call())
    return mx.get_peak_memory() - before


@pytest.mark.parametrize("sinks", [None, mx.array([-2.0, 0, 1, 3, 9, 50], mx.float16)], ids=["", "sinks"])
@pytest.mark.parametrize("rows", [1, 7, 64, 199, 200])
def test_slices_give_what_the_whole_gives(arrays, unfused, monkeypatch, rows, sinks):
    whole = mx.fast.scaled_dot_product_attention(*arrays, scale=0.125, mask="causal", sinks=sinks)
    monkeypatch.setattr(slices, "SCORES_BYTES", rows * 3 * 1000 * 2)
    out, seen = num_slices(lambda: prefill_attention(*arrays, 0.125, sinks), monkeypatch)
    assert len(seen) == 2 * -(-200 // rows)
    assert max(seen) == 3 * rows
    assert (out.dtype, out.shape) == (whole.dtype, whole.shape)
    assert mx.allclose(out, whole, atol=2e-3)


def test_slices_of_a_larger_buffer_are_read_where_they_are(unfused, monkeypatch):
    """A copy of keys and values would be three times what a slice's scores take."""
    q = mx.random.normal((1, 4, 30, 64)).astype(mx.float16)
    buffer = mx.random.normal((1, 2, 21000, 64)).astype(mx.float16)
    k = v = buffer[:, :, :20000]
    monkeypatch.setattr(slices, "SCORES_BYTES", 10 * 2 * 20000 * 2)
    mx.eval(q, k)
    assert peak_bytes(lambda: prefill_attention(q, k, v, 0.125)) < 2 * slices.SCORES_BYTES
    assert 3 * slices.SCORES_BYTES < 20000 * 64 * 2


def test_a_row_that_is_larger_than_the_limit_is_a_slice(arrays, unfused, monkeypatch):
    monkeypatch.setattr(slices, "SCORES_BYTES", 1)
    q, k, v = arrays
    out, seen = num_slices(lambda: prefill_attention(q[:, :, :4], k, v, 0.125), monkeypatch)
    assert (seen, out.shape) == ([3] * 8, (1, 6, 4, 64))


def test_what_fits_is_left_to_mlx(arrays, unfused, monkeypatch):
    _, seen = num_slices(lambda: prefill_attention(*arrays, 0.125), monkeypatch)
    assert not seen


def test_memory_is_that_of_a_slice(unfused, monkeypatch):
    q = mx.random.normal((1, 6, 50, 144)).astype(mx.float16)
    k, v = (mx.random.normal((1, 2, 16000, 144)).astype(mx.float16) for _ in "kv")
    mx.eval(q, k, v)
    scores = 6 * 50 * 16000 * 2

    def peak(limit):
        monkeypatch.setattr(slices, "SCORES_BYTES", limit)
        return peak_bytes(lambda: prefill_attention(q, k, v, 0.125))

    assert peak(scores // 2) > 0.4 * scores
    assert peak(scores // 20) < 0.2 * scores


@pytest.mark.skipif(mx.default_device() == mx.Device(mx.cpu), reason="there is no GPU here")
def test_a_fused_kernel_takes_all_queries_at_once(arrays, monkeypatch):
    monkeypatch.setattr(slices, "SCORES_BYTES", 1)
    _, seen = num_slices(lambda: prefill_attention(*arrays, 0.125), monkeypatch)
    assert not seen


def test_sinks_take_weight_in_float32_too(arrays):
    """Where our C++ takes the rest."""
    q, k, v = (x.astype(mx.float32) for x in arrays)
    sinks = mx.array([-2.0, 0, 1, 3, 9, 50])
    out = prefill_attention(q, k, v, 0.125, sinks)
    exact = rounding.dense_attention(q, k, v, 0.125, sinks=rounding.wide(sinks).reshape(1, 2, 3, 1, 1))
    rounding.assert_within_contract(out, exact)
    assert mx.abs(out[:, 5]).max() < 1e-6  # the last head's sink takes all
