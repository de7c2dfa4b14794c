"""The C++ of this folder made into one shared library, once per source, flags and compiler.

Knows compilers and files, not what the library does. The library runs on any processor of the
machine's family: each instruction set is a translation unit of its own, chosen when it is called.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import platformdirs

SOURCES = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden")
# The library may contract a * b + c and set no errno, but NaN and infinity keep their meaning.
_MATH = ("-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi", "-Wno-unknown-pragmas")
_X86 = {
    "avx2": ("-DLANES=8", "-mavx2", "-mfma"),
    "avx512": ("-DLANES=16", "-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}


class BuildError(Exception):
    """No library could be made. The message says why."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how it is called, what identifies it, what it needs to link."""

    command: tuple[str, ...]
    version: str
    link: tuple[str, ...] = ()


def compilers() -> list[Compiler]:
    """The compilers there are, in the order they are tried: the `ziglang` wheel's clang, the system's."""
    found = []
    try:
        version = importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        # zig compiles for the machine at hand unless told not to. Without -nostdlib it would first build
        # its own runtime, half a minute; libc and pthreads are in the process already.
        zig = (sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline")
        found.append(Compiler(zig, f"ziglang {version}", ("-nostdlib",)))
    names = filter(None, (os.environ.get("CXX"), "c++", "clang++", "g++"))
    path = next(filter(None, map(shutil.which, names)), None)
    if path:
        shown = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        found.append(Compiler((path,), shown.stdout, ("-pthread",)))
    return found


def library(folder: Path | None = None, extra: Sequence[str] = ()) -> Path:
    """The path of the library, built with the first compiler that can if it isn't there yet.

    Safe to call from many processes at once.

    Args:
        folder: where libraries are kept; default: `build` in the user's cache folder.
        extra: more flags.

    Raises:
        BuildError: if there is no compiler, none can build it, or it can't be stored.
    """
    failures = []
    for compiler in compilers():
        try:
            return build(compiler, folder or platformdirs.user_cache_path("longleaf") / "build", extra)
        except BuildError as error:
            failures.append(str(error))
    raise BuildError(
        "; ".join(failures) or "there is no C++ compiler: neither the ziglang package nor c++, clang++ or g++"
    )


def build(compiler: Compiler, folder: Path, extra: Sequence[str] = ()) -> Path:
    """The path of the library that this compiler makes, in `folder`, building it if it isn't there yet."""
    units = _units(extra)
    path = folder / f"kernels-cpu-{_key(compiler, units)}.so"
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                with tempfile.TemporaryDirectory(dir=folder) as work:
                    os.replace(_compile(compiler, units, Path(work)), path)
    except OSError as error:
        raise BuildError(f"cannot build in {folder}: {error}") from error
    return path


def _units(extra: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Object name → source and flags."""
    flags = (*_FLAGS, *_MATH, *extra)
    sets: dict[str, tuple[str, ...]] = {"baseline": ("-DLANES=4",)}
    if platform.machine().lower() in ("x86_64", "amd64"):
        sets |= _X86
    units = {name: ("instruction_set.cpp", f"-DNAME={name}", *of, *flags) for name, of in sets.items()}
    return {"longleaf": ("longleaf.cpp", *flags), **units}


def _key(compiler: Compiler, units: dict[str, tuple[str, ...]]) -> str:
    # Not the compiler's path: every environment's ziglang of one version makes the same library.
    made_by = (compiler.version, compiler.command[1:], compiler.link, platform.machine(), sys.platform)
    digest = hashlib.sha256(repr((made_by, sorted(units.items()))).encode())
    for source in sorted((*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp"))):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: Compiler, units: dict[str, tuple[str, ...]], work: Path) -> Path:
    """The library in `work`, the units compiled side by side."""
    # Relative names: LLVM puts random digits in the place of every % of an output's path.
    objects = [f"{name}.o" for name in units]
    commands = [
        [*compiler.command, "-c", str(SOURCES / source), *flags, "-o", out]
        for out, (source, *flags) in zip(objects, units.values(), strict=True)
    ]
    _run(commands, work)
    _run([[*compiler.command, "-shared", *objects, *compiler.link, "-o", "library.so"]], work)
    return work / "library.so"


def _run(commands: list[list[str]], work: Path) -> None:
    """All of them side by side; every one has ended when this returns or raises."""
    # What zig keeps between runs would otherwise go to the user's home, which may not be writable.
    kept = {"ZIG_GLOBAL_CACHE_DIR": str(work / "zig"), "ZIG_LOCAL_CACHE_DIR": str(work / "zig")}
    env = os.environ | kept
    running = [
        subprocess.Popen(
            command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
        )
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode:
            said = output[-2000:].strip()
            raise BuildError(f"{' '.join(command)} exited with {process.returncode}: {said}")
