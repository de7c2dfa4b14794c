"""The start-up check sees a wrong kernel."""

import math

import pytest

from kernels import decode_attention, self_test
from kernels.self_test import attention_error


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (8, 1, 128), (2, 2, 80)])
@pytest.mark.parametrize("format", ["int4c", "k8v4"])
def test_a_right_kernel_passes(num_q_heads, num_kv_heads, head_dim, format):
    assert attention_error(num_q_heads, num_kv_heads, head_dim, format) < 1e-4


@pytest.mark.parametrize("wrong", [1.05, math.nan])
def test_a_wrong_kernel_is_seen(monkeypatch, wrong):
    monkeypatch.setattr(self_test, "decode_attention", lambda *args: decode_attention(*args) * wrong)
    assert not attention_error(9, 3, 64) < 0.01
    assert not attention_error(9, 3, 64, "k8v4") < 0.01
