"""The text of one PDF, page by page: `python -m api.documents.extract_pdf FILE LIMITS`.

It runs alone in a process that limits itself before it opens the file: PDFium is C++ that reads what
strangers wrote. It prints one JSON line per page, or one `{"code", "detail"}` and nothing more.
"""

from __future__ import annotations

import json
import re
import resource
import sys

SAVE_AGAIN = "it is damaged or cut off; open it in a viewer, save it as a PDF again and upload that"
_DROP = re.compile("[\x00\x01\x02-\x08\x0e-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
_PASSWORD_ERROR = 4


def limit(cpu_s: int, memory_bytes: int, output_bytes: int) -> None:
    """Cap processor seconds, address space and the size of any file that is written, the output's too."""
    for kind, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        try:
            resource.setrlimit(kind, (value, hard))
        except (ValueError, OSError):
            # macOS accepts no cap on address space; time and output are capped there all the same.
            if kind != resource.RLIMIT_AS:
                raise


def extract(path: str, max_chars: int) -> int:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if error.err_code == _PASSWORD_ERROR:
            return refuse("pdf_encrypted", "the PDF needs a password; remove it and upload again")
        return refuse("pdf_broken", f"the PDF cannot be read: {SAVE_AGAIN}")
    num_chars = 0
    try:
        for index in range(len(document)):
            try:
                page = document[index]
                text = page.get_textpage().get_text_range()
                page.close()
            except pypdfium2.PdfiumError:
                return refuse("pdf_broken", f"page {index + 1} of the PDF cannot be read: {SAVE_AGAIN}")
            text = _DROP.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
            num_chars += len(text)
            if num_chars > max_chars:
                return refuse("pdf_too_costly", f"the PDF has more than {max_chars} characters of text")
            print(json.dumps(text))
    except MemoryError:
        return refuse("pdf_too_costly", "reading the PDF needs more memory than is allowed")
    return 0


def refuse(code: str, detail: str) -> int:
    print(json.dumps({"code": code, "detail": detail}))
    return 0


def main() -> int:
    path, limits = sys.argv[1], json.loads(sys.argv[2])
    limit(limits["cpu_s"], limits["memory_bytes"], limits["output_bytes"])
    return extract(path, limits["max_chars"])


if __name__ == "__main__":
    sys.exit(main())
