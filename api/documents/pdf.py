"""A PDF's text through a limited subprocess (extract_pdf.py): what it may cost and what its ends mean."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import api
from api.documents.extract_pdf import PdfPage
from api.documents.formats import holds_files
from api.documents.hyphens import settle
from api.documents.pages import Page, spans
from api.documents.pdf_warnings import joined_words, pdf_warnings
from api.documents.warning import UploadWarning
from api.problems import ApiError

_HEADER = re.compile(rb"%PDF-\d")
_REST_OF_HEADER = re.compile(rb"%PDF-\d\.\d+[ \t]*(?:[\r\n]|$)")
_OBJECT = re.compile(rb"\b\d+ \d+ obj\b")
_START = re.compile(rb"startxref\s+(\d{1,15})\s+%%EOF\s*$")
_HEAD_BYTES = 1024
"""Where readers of PDF look for its header."""
_TAIL_BYTES = 2048
_BLANK = b"\xef\xbb\xbf\0 \t\r\n\f"


@dataclass(frozen=True, slots=True)
class Limits:
    wall_s: float
    memory_bytes: int
    max_chars: int
    """Of the text; a small file may unpack to a very long one."""


def is_pdf(path: Path) -> bool:
    """Whether a file is a PDF, perhaps with something before its header, and no text that mentions one."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    header = _HEADER.search(head)
    if header is None or holds_files(head):
        return False
    place = header.start()
    if _REST_OF_HEADER.match(head, place) and not head[:place].strip(_BLANK):
        return True
    data = path.read_bytes()
    if not _OBJECT.search(data, place):
        return False
    starts_line = place == 0 or head[place - 1 : place] in (b"\r", b"\n")
    tail = data[-_TAIL_BYTES:]
    if not is_plain_text(data):
        return starts_line or b"%%EOF" in tail
    # Letters only, as in a page about PDF that shows one: it is a PDF if it ends as one and its end leads to
    # its objects.
    end = _START.search(tail)
    if not starts_line or end is None:
        return False
    return any(
        data.startswith(b"xref", start) or _OBJECT.match(data, start)
        for start in (int(end[1]), place + int(end[1]))
    )


def is_plain_text(data: bytes) -> bool:
    """Whether bytes are UTF-8 without control characters that no text has."""
    try:
        return not re.search(r"[\x00-\x06\x0e-\x1a\x1c-\x1f]", data.decode())
    except UnicodeDecodeError:
        return False


def pdf_text(path: Path, limits: Limits) -> tuple[str, list[Page], list[UploadWarning]]:
    """The text of a PDF, pages separated by a blank line, and what its reader sees and the text has not.

    Raises:
        ApiError: 422 with `pdf_encrypted`, `pdf_broken`, `no_text_layer`, `no_character_map` or
            `pdf_too_costly`.
    """
    pages = _pages(path, limits)
    settled, guessed = settle([page["text"] for page in pages])
    texts = [text.strip("\n") for text in settled]
    warnings = [*pdf_warnings(pages, texts), *joined_words(guessed)]
    starts, position = [], 0
    for number, text in enumerate(texts, 1):
        starts.append((number, position))
        position += len(text) + 2
    joined = "\n\n".join(texts)
    spanned = spans([(number, min(start, len(joined))) for number, start in starts], len(joined))
    return joined, spanned, warnings


def _pages(path: Path, limits: Limits) -> list[PdfPage]:
    arguments = {
        "cpu_s": math.ceil(limits.wall_s),
        "memory_bytes": limits.memory_bytes,
        "max_chars": limits.max_chars,
        "output_bytes": 6 * limits.max_chars + 2**24,
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
    refusal = lines[-1] if lines and "code" in lines[-1] else None
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
