"""MLX's caches, in a process of their own: what it reads once cannot be set in this one."""

import os
import subprocess
import sys

import mlx.core as mx
import pytest

from worker.mlx_environment import WANTED

NEW_SHAPES = """
import mlx.core as mx
keys = mx.zeros((1, 1, 1200, 64), mx.float16)
for n in range(600):
    k = keys[:, :, : 600 + n]
    mx.eval(mx.fast.scaled_dot_product_attention(keys[:, :, :16], k, k, scale=0.1, mask="causal"))
"""


def run(code, **environment):
    given = {name: value for name, value in os.environ.items() if name not in WANTED} | environment
    return subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=300, check=False
    )


PRINT = """
import os, sys
from worker.mlx_environment import prepare_mlx
prepare_mlx()
assert not any(name.startswith("mlx") for name in sys.modules)
names = "MLX_ENABLE_CACHE_THRASHING_CHECK", "MLX_CUDA_SDPA_CACHE_SIZE", "CUDA_VISIBLE_DEVICES"
print(*(os.environ[name] for name in names))
"""


def test_it_is_set_before_mlx_is_there():
    assert run(PRINT).stdout.split() == ["0", "1024", "0"]


def test_what_the_environment_says_stands():
    found = run(PRINT, MLX_CUDA_SDPA_CACHE_SIZE="7", CUDA_VISIBLE_DEVICES="1").stdout
    assert found.split() == ["0", "7", "1"]


@pytest.mark.skipif(not mx.cuda.is_available(), reason="MLX has no CUDA device here")
def test_a_process_may_meet_any_number_of_shapes():
    alone = run(NEW_SHAPES, CUDA_VISIBLE_DEVICES="0")
    assert "Cache thrashing" in alone.stderr, "MLX no longer refuses: worker/mlx_environment.py may go"
    assert run(f"from worker.mlx_environment import prepare_mlx\nprepare_mlx()\n{NEW_SHAPES}").returncode == 0
