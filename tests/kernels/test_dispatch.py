"""Which kernels are used where, and what happens when a device's own are not to be trusted."""

import mlx.core as mx
import pytest

import kernels
from kernels import cpu, cuda, dispatch, metal, plain
from tests.kernels import rounding
from tests.kernels.attention_cases import make_view, queries


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setattr(dispatch, "_native", True)


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="MLX computes on a GPU here")
def test_a_cpu_takes_the_library(native):
    assert dispatch.backend() is cpu.library()


@pytest.mark.parametrize("device", [cuda, metal])
def test_a_gpu_takes_its_own_kernels(native, monkeypatch, device):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    for module in (cuda, metal):
        monkeypatch.setattr(module, "available", lambda module=module: module is device)
    assert dispatch.backend() is device
    assert dispatch.reads_device_order() == (device is cuda)


def test_without_native_kernels_the_plain_ones_answer(native):
    kernels.disable_native()
    view, q = make_view(2), queries(4, 1, 64)
    assert dispatch.backend() is plain
    assert dispatch.cpu_library() is None
    out = kernels.decode_attention(q, view, 0.125)
    rounding.assert_within_contract(out, rounding.cached_attention(q, view, 0.125))


@pytest.mark.skipif(cuda.available(), reason="CUDA reads an order of its own")
def test_elsewhere_tiles_are_canonical_in_memory():
    tiles = make_view(2).tiles
    assert kernels.from_canonical(tiles, 64) is tiles
    assert kernels.to_canonical(tiles, 64) is tiles
