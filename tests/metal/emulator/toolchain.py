"""clang from the ziglang wheel: how Metal text is checked, compiled, linked, and where results are cached."""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import mlx
import ziglang

HERE = Path(__file__).parent
CACHE = Path(
    os.environ.get("LONGLEAF_METAL_CACHE", Path(tempfile.gettempdir()) / f"longleaf-metal-{os.getuid()}")
)
MLX_INCLUDE = str(Path(next(iter(mlx.__path__))) / "include")
MLX_PRELUDE = "mlx/backend/metal/kernels/utils.h"
"""What MLX puts before every custom kernel."""

_ZIG = str(Path(ziglang.__file__).parent / "zig")
_EXTENSIONS = (
    "-cl_khr_fp64,-__opencl_c_fp64,-__opencl_c_program_scope_global_variables,-__opencl_c_device_enqueue,"
    "-__opencl_c_pipes,+__cl_clang_function_pointers"
)
_LANGUAGE = [
    *shlex.split(
        "-x clcpp -Xclang -cl-std=clc++2021 -cl-no-stdinc -nostdinc --target=x86_64-linux-gnu "
        "-march=x86-64-v3 -ffp-contract=off -fno-math-errno -Xclang -ffloat16-excess-precision=none "
        "-Xclang -fbfloat16-excess-precision=none -Wno-static-float-init -Wno-unknown-pragmas "
        "-Wno-duplicate-decl-specifier -Wno-unused-command-line-argument"
    ),
    *("-Xclang", f"-cl-ext={_EXTENSIONS}", "-I", str(HERE)),
]
_CHECK = shlex.split(
    "-fsyntax-only -Wimplicit-float-conversion -Wreturn-type -Wuninitialized -Wsometimes-uninitialized "
    "-Wconditional-uninitialized -Warray-bounds -Wshift-count-overflow -Wdivision-by-zero -Wunsequenced "
    "-Winfinite-recursion -Wextra-tokens -ferror-limit=50 -fno-caret-diagnostics -fno-color-diagnostics"
)
# -fsanitize=thread without its runtime: runtime.cpp defines the hooks. Vectorisation and the removal of reads
# before writes would drop accesses.
_EMULATE = shlex.split(
    "-O1 -fPIC -DMTL_EMULATE -fsanitize=thread -mllvm -tsan-instrument-read-before-write=1 "
    "-mllvm -tsan-instrument-func-entry-exit=0 -fno-vectorize -fno-slp-vectorize -gdwarf-4 "
    "-gline-tables-only -fsanitize=array-bounds,signed-integer-overflow,integer-divide-by-zero,"
    "float-cast-overflow,alignment,local-bounds -fsanitize-trap=local-bounds "
    "-ftrivial-auto-var-init=pattern -w"
)
# For counting: no memory checks, every basic block announces itself.
_COUNT = shlex.split(
    "-O2 -fPIC -DMTL_EMULATE -fno-vectorize -fno-slp-vectorize -gdwarf-4 -gline-tables-only "
    "-fsanitize-coverage=trace-pc-guard,no-prune -w"
)


def digest(*parts: str) -> str:
    h = hashlib.sha256()
    for part in parts:
        h.update(part.encode() + b"\0")
    return h.hexdigest()[:24]


@cache
def own_digest() -> str:
    """Changes whenever a cached result would: with the emulator's sources and flags."""
    files = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp"), *HERE.glob("*.py")])
    return digest(*(f.read_text() for f in files))


def cached(name: str) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE / name


def check(source: Path) -> tuple[int, str]:
    """Compile under real address spaces, syntax only: exit status, diagnostics."""
    r = _run([_ZIG, "clang", *_LANGUAGE, *_CHECK, str(source)])
    return r.returncode, r.stderr


def build(source: Path, library: Path) -> str | None:
    """Compile for the emulated grid and link with the runtime. Returns what went wrong, if anything."""
    partial = library.with_suffix(f".{os.getpid()}.o")
    r = _run([_ZIG, "clang", *_LANGUAGE, *_EMULATE, "-c", "-o", str(partial), str(source)])
    return r.stderr[:3000] if r.returncode else _link(partial, library)


def compile_to_llvm(source: Path, text: Path) -> str | None:
    """Compile for the emulated grid, unchecked, to LLVM text in which every basic block calls a hook."""
    r = _run([_ZIG, "clang", *_LANGUAGE, *_COUNT, "-S", "-emit-llvm", "-o", str(text), str(source)])
    return r.stderr[:3000] if r.returncode else None


def build_llvm(text: Path, library: Path) -> str | None:
    partial = library.with_suffix(f".{os.getpid()}.o")
    flags = shlex.split("-x ir -O1 -fPIC -fno-vectorize -fno-slp-vectorize -w")
    target = ["--target=x86_64-linux-gnu", "-march=x86-64-v3"]
    r = _run([_ZIG, "clang", *flags, *target, "-c", "-o", str(partial), str(text)])
    return r.stderr[:3000] if r.returncode else _link(partial, library)


def _link(partial: Path, library: Path) -> str | None:
    unfinished = library.with_suffix(f".{os.getpid()}")
    command = [_ZIG, "ld.lld", "-shared", "-Bsymbolic", "-o", str(unfinished), str(partial), str(_runtime())]
    r = _run(command)
    partial.unlink()
    if r.returncode:
        return r.stderr[:3000]
    unfinished.replace(library)
    return None


@cache
def _runtime() -> Path:
    compiled = cached(f"runtime-{own_digest()}.o")
    if not compiled.exists():
        unfinished = compiled.with_suffix(f".{os.getpid()}.o")
        flags = ["-c", "-O2", "-g0", "-fPIC", "-fno-sanitize=all", "-march=x86_64_v3"]
        r = _run([_ZIG, "c++", *flags, "-o", str(unfinished), str(HERE / "runtime.cpp")])
        if r.returncode:
            raise RuntimeError("the emulator's runtime does not compile:\n" + r.stderr)
        unfinished.replace(compiled)
    return compiled


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
