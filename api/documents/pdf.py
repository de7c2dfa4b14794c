"""A PDF's text through a limited subprocess (extract_pdf.py): what it may cost and what its ends mean."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import api
from api.documents.pages import Page, spans
from api.problems import ApiError


@dataclass(frozen=True, slots=True)
class Limits:
    wall_s: float
    memory_bytes: int
    max_chars: int
    """Of the text; a small file may unpack to a very long one."""


def pdf_text(path: Path, limits: Limits) -> tuple[str, list[Page]]:
    """The text of a PDF, pages separated by a blank line.

    Raises:
        ApiError: 422 with `pdf_encrypted`, `pdf_broken`, `no_text_layer` or `pdf_too_costly`.
    """
    texts = [text.strip("\n") for text in _pages(path, limits)]
    if not any(text.strip() for text in texts):
        raise ApiError(
            422,
            "no_text_layer",
            f"no text layer: the {len(texts)} pages of the PDF are images; run OCR on it and upload again",
            params={"num_pages": len(texts)},
        )
    starts, position = [], 0
    for number, text in enumerate(texts, 1):
        starts.append((number, position))
        position += len(text) + 2
    joined = "\n\n".join(texts)
    return joined, spans([(number, min(start, len(joined))) for number, start in starts], len(joined))


def _pages(path: Path, limits: Limits) -> list[str]:
    arguments = {
        "cpu_s": math.ceil(limits.wall_s),
        "memory_bytes": limits.memory_bytes,
        "max_chars": limits.max_chars,
        "output_bytes": 6 * limits.max_chars + 2**20,
    }
    root = str(Path(api.__file__).parent.parent)
    # The output goes to a file, whose size the kernel caps (RLIMIT_FSIZE in the child).
    with tempfile.TemporaryFile() as output:
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "api.documents.extract_pdf", str(path), json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.DEVNULL,
                timeout=limits.wall_s,
                env={"PYTHONPATH": root, "PATH": os.environ.get("PATH", "")},
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ApiError(
                422,
                "pdf_too_costly",
                f"reading the PDF took longer than {limits.wall_s:g} s; split it or save it anew",
                params={"limit_s": limits.wall_s},
            ) from None
        output.seek(0)
        lines = [json.loads(line) for line in output if line.endswith(b"\n")]
    refusal = lines[-1] if lines and isinstance(lines[-1], dict) else None
    if refusal is not None:
        raise ApiError(422, refusal["code"], refusal["detail"])
    if ended.returncode == -signal.SIGXCPU:
        raise ApiError(
            422,
            "pdf_too_costly",
            f"reading the PDF takes over {limits.wall_s:g} s of processor time; split it or save it anew",
            params={"limit_s": limits.wall_s},
        )
    if ended.returncode != 0:
        raise ApiError(
            422,
            "pdf_broken",
            f"the PDF stopped its reader (exit status {ended.returncode}); open it and save it anew",
            params={"exit_status": ended.returncode},
        )
    return lines
