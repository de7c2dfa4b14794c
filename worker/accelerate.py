"""OpenBLAS under MLX on Linux without a GPU, where MLX's wheel carries the reference BLAS.

Owns a small shared library, built once with the `ziglang` wheel and kept in the cache folder, that answers
libmlx's `cblas_*gemm` with those of the `scipy-openblas32` wheel. It knows no model and must not import MLX:
it works by being loaded first. Nothing here is needed for right answers, so nothing here raises.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path

import platformdirs

log = logging.getLogger(__name__)

SOURCE = Path(__file__).parent / "blas_shim.c"
# No libc and the oldest CPU of the architecture: the library is only jumps, and builds in a second.
FLAGS = ["-O2", "-shared", "-fPIC", "-nostdlib", "-mcpu=baseline"]
BUILD_TIMEOUT_S = 120

_shim: ctypes.CDLL | None = None


class _Unavailable(Exception):
    """Why OpenBLAS cannot stand in; ends in one warning."""


def prepare_cpu(cache_dir: Path | None = None) -> bool:
    """Send the matrix products of a CPU-only MLX on Linux to OpenBLAS; call before MLX is imported.

    True when it is in force. False where it does not apply (macOS, a GPU build of MLX) and, with one
    warning, where it could not be done. Sets OPENBLAS_NUM_THREADS to one less than the usable cores
    unless the environment has it: its threads wait for each other spinning, so with a core taken by
    anything else all of them stand still, and a product takes several times as long. `cache_dir` is
    for the built library, default the user's cache.
    """
    global _shim
    if _shim is not None:
        return True
    if sys.platform != "linux" or _has_gpu_build():
        return False
    try:
        if "mlx.core" in sys.modules:
            raise _Unavailable("MLX was imported before it could be prepared")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) - 1)))
        openblas = _openblas()
        shim = _built(cache_dir or Path(platformdirs.user_cache_dir("longleaf")) / "shim")
        # The shim's symbols come from OpenBLAS, libmlx's from the shim: global, and in this order.
        _load(openblas)
        _shim = _load(shim)
    except (_Unavailable, OSError) as error:
        log.warning(
            "reading documents is many times slower than it could be, on MLX's reference BLAS: %s", error
        )
        return False
    return True


def num_products() -> int:
    """Matrix products that went to OpenBLAS so far in this process; 0 where it is not in force."""
    return 0 if _shim is None else ctypes.c_ulong.in_dll(_shim, "longleaf_num_products").value


def _has_gpu_build() -> bool:
    return any(name.startswith("mlx-cuda") for name in _distribution_names())


def _distribution_names() -> list[str]:
    return [
        str(distribution.metadata["Name"]).lower().replace("_", "-")
        for distribution in metadata.distributions()
    ]


def _openblas() -> Path:
    spec = util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise _Unavailable("the package scipy-openblas32 is not installed")
    libraries = sorted((Path(spec.origin).parent / "lib").glob("libscipy_openblas*.so"))
    if not libraries:
        raise _Unavailable(f"no libscipy_openblas*.so lies in {Path(spec.origin).parent / 'lib'}")
    return libraries[0]


def _built(cache_dir: Path) -> Path:
    """The shim for this source, these flags and this architecture; built when it is not in the cache."""
    key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), *map(str.encode, FLAGS)])).hexdigest()[:16]
    library = cache_dir / f"blas_shim-{platform.machine()}-{key}.so"
    if library.exists():
        return library
    cache_dir.mkdir(parents=True, exist_ok=True)
    with (cache_dir / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(library)
    return library


def _build(library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=".build-") as scratch:
        made = Path(scratch) / library.name
        command = [sys.executable, "-m", "ziglang", "cc", *FLAGS, str(SOURCE), "-o", made.name]
        caches = {"ZIG_GLOBAL_CACHE_DIR": scratch, "ZIG_LOCAL_CACHE_DIR": scratch}
        try:
            done = subprocess.run(
                command,
                cwd=scratch,  # LLVM puts random digits in the place of every % of an output's path
                env=os.environ | caches,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=BUILD_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _Unavailable(f"the compiler did not end within {BUILD_TIMEOUT_S} s") from error
        if done.returncode != 0 or not made.exists():
            said = (done.stderr.strip().splitlines() or ["no message"])[0]
            raise _Unavailable(f"the compiler of the ziglang wheel failed: {said}")
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.rename(library)


def _load(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library), mode=os.RTLD_GLOBAL | os.RTLD_NOW)
