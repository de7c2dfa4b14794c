from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from worker import accelerate

ROOT = Path(__file__).parents[2]
HERE = sys.platform == "linux" and not accelerate._has_gpu_build()
"""Where MLX's products can be sent to OpenBLAS at all."""

# A new process each time: what is loaded before MLX cannot be taken back. Prints: in force, products
# counted, right answers (rows, columns, batches, both operands turned or not), right complex answer.
PRODUCTS = """
import logging, sys
from pathlib import Path
logging.basicConfig(format="%(levelname)s %(message)s")
from worker.accelerate import num_products, prepare_cpu
in_force = prepare_cpu(Path(sys.argv[1]))
import mlx.core as mx
import numpy as np
mx.random.seed(1)
worst, num_made = 0.0, 0
for left, right in [((5, 577), (577, 33)), ((1, 577), (577, 33)), ((5, 577), (577, 1)), ((1, 577), (577, 1)),
                    ((3, 4, 1, 65), (3, 4, 65, 127)), ((2, 7, 19), (2, 19, 1))]:
    for turn_a in (False, True):
        for turn_b in (False, True):
            a = mx.random.normal(left[:-2] + left[:-3:-1] if turn_a else left)
            b = mx.random.normal(right[:-2] + right[:-3:-1] if turn_b else right)
            a, b = a.swapaxes(-1, -2) if turn_a else a, b.swapaxes(-1, -2) if turn_b else b
            exact = np.array(a, dtype=np.float64) @ np.array(b, dtype=np.float64)
            worst = max(worst, float(np.abs(np.array(a @ b) - exact).max()))
            num_made += int(np.prod(left[:-2]))
z = mx.array([[1 + 2j, 3j], [0j, 1j]]) @ mx.array([[1j, 0j], [2 + 0j, 1j]])
right = np.allclose(np.array(z), [[-2 + 7j, -3], [2j, -1]])
print(in_force, num_products() - num_made if in_force else 0, worst < 1e-4, right)
"""


def run(cache_dir: Path, code: str = PRODUCTS, **environment: str) -> tuple[str, str]:
    """(stdout, stderr) of `code` in a Python of its own with the cache folder as its argument."""
    command = [sys.executable, "-c", code, str(cache_dir)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def hide(tmp_path: Path, package: str) -> str:
    """A PYTHONPATH that puts a `package` with nothing in it before the installed one."""
    (tmp_path / "hidden" / package).mkdir(parents=True)
    (tmp_path / "hidden" / package / "__init__.py").touch()
    return str(tmp_path / "hidden")


def test_every_product_of_mlx_goes_to_openblas_and_is_right(tmp_path: Path) -> None:
    out, err = run(tmp_path)
    # The complex product is one more than those that the loop made.
    assert out == ("True 1 True True" if HERE else "False 0 True True")
    assert "WARNING" not in err


def test_the_shim_is_built_once_and_nothing_else_is_left(tmp_path: Path) -> None:
    if not HERE:
        assert accelerate.prepare_cpu(tmp_path) is False
        return
    run(tmp_path)
    (library,) = tmp_path.glob("*.so")
    built = library.stat().st_ino
    run(tmp_path)
    assert library.stat().st_ino == built
    assert {path.name for path in tmp_path.iterdir()} == {library.name, ".lock"}


def test_concurrent_builds_make_one_library(tmp_path: Path) -> None:
    folder = tmp_path / "100 %20 é"  # LLVM writes digits over each % of a path that it is given
    code = "import sys, pathlib, worker.accelerate as a; print(a.prepare_cpu(pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(folder)]
    builds = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert {build.communicate()[0].strip() for build in builds} == {str(HERE)}
    assert len(list(folder.glob("*.so"))) == (1 if HERE else 0)


@pytest.mark.parametrize(
    ("package", "said"),
    [("ziglang", "compiler of the ziglang wheel failed"), ("scipy_openblas32", "no libscipy_openblas")],
)
def test_a_missing_part_is_one_warning_and_mlx_still_works(tmp_path: Path, package: str, said: str) -> None:
    out, err = run(tmp_path / "cache", PYTHONPATH=hide(tmp_path, package))
    assert out.split()[0] == "False"
    assert out.endswith("True True")
    if HERE:
        (warning,) = [line for line in err.splitlines() if line.startswith("WARNING")]
        assert "reference BLAS" in warning
        assert said in warning


def test_a_damaged_library_is_one_warning_and_mlx_still_works(tmp_path: Path) -> None:
    run(tmp_path)
    for library in tmp_path.glob("*.so"):
        library.write_bytes(b"no library")
    out, err = run(tmp_path)
    assert out.split()[0] == "False" or not HERE
    assert out.endswith("True True")
    assert err.count("WARNING") == (1 if HERE else 0)


def test_too_late_is_said(tmp_path: Path) -> None:
    out, err = run(tmp_path, "import mlx.core\n" + PRODUCTS)
    assert out.split()[0] == "False"
    assert ("imported before" in err) == HERE


def test_the_users_thread_count_stays(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib, worker.accelerate as a; a.prepare_cpu(pathlib.Path(sys.argv[1]))\n"
        "print(os.environ['OPENBLAS_NUM_THREADS'], os.environ['OPENBLAS_CORETYPE'])"
    )
    out, _ = run(tmp_path, code, OPENBLAS_NUM_THREADS="1", OPENBLAS_CORETYPE="Haswell")
    assert out == "1 Haswell"
