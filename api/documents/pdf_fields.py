"""What was written into a PDF's page after it was made: fields of a form, free text, comments."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from typing import Any

_DROP = re.compile("[\x00\x01\x02-\x08\x0e-\x1f\x7f\uffff\ud800-\udfff]")
_HIDDEN = 2 | 32  # an annotation's flags Hidden and NoView
_PASSWORD_FIELD = 1 << 13


def written_on(document: Any, page: Any) -> tuple[list[str], int]:
    """What was written into a page: filled fields and free text as lines, and how many comments there are."""
    from pypdfium2 import raw

    lines: list[str] = []
    num_comments = 0
    for place in range(raw.FPDFPage_GetAnnotCount(page)):
        item = raw.FPDFPage_GetAnnot(page, place)
        if not item:
            continue
        kind = raw.FPDFAnnot_GetSubtype(item)
        if raw.FPDFAnnot_GetFlags(item) & _HIDDEN:
            pass
        elif kind == raw.FPDF_ANNOT_WIDGET and document.formenv is not None:
            line = filled_field(document.formenv, item)
            if line and line not in lines:
                lines.append(line)
        elif kind not in (raw.FPDF_ANNOT_LINK, raw.FPDF_ANNOT_POPUP, raw.FPDF_ANNOT_WIDGET):
            contents = plain(string(raw.FPDFAnnot_GetStringValue, item, b"Contents")).strip()
            if contents and kind == raw.FPDF_ANNOT_FREETEXT:
                lines.append(contents)
            elif contents:
                num_comments += 1
        raw.FPDFPage_CloseAnnot(item)
    return lines, num_comments


def filled_field(form: Any, item: Any) -> str:
    """`name: value`, or nothing where a field is empty, not ticked, or not to be seen."""
    from pypdfium2 import raw

    kind = raw.FPDFAnnot_GetFormFieldType(form, item)
    if raw.FPDFAnnot_GetFormFieldFlags(form, item) & _PASSWORD_FIELD and kind == raw.FPDF_FORMFIELD_TEXTFIELD:
        return ""
    if kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON):
        if not raw.FPDFAnnot_IsChecked(form, item):
            return ""
        value = string(raw.FPDFAnnot_GetFormFieldExportValue, form, item) or "yes"
    elif kind in (
        raw.FPDF_FORMFIELD_TEXTFIELD,
        raw.FPDF_FORMFIELD_COMBOBOX,
        raw.FPDF_FORMFIELD_LISTBOX,
    ):
        chosen = list(chosen_options(form, item)) if kind != raw.FPDF_FORMFIELD_TEXTFIELD else []
        value = ", ".join(chosen) or string(raw.FPDFAnnot_GetFormFieldValue, form, item)
    else:
        return ""
    # The alternate name is what a reader is shown; the other may be a program's.
    name = string(raw.FPDFAnnot_GetFormFieldAlternateName, form, item)
    name = name or string(raw.FPDFAnnot_GetFormFieldName, form, item)
    name, value = " ".join(plain(name).split()), plain(value).strip()
    return f"{name}: {value}" if name and value else value


def chosen_options(form: Any, item: Any) -> Iterator[str]:
    from pypdfium2 import raw

    for index in range(raw.FPDFAnnot_GetOptionCount(form, item)):
        if raw.FPDFAnnot_IsOptionSelected(form, item, index):
            yield string(raw.FPDFAnnot_GetOptionLabel, form, item, index)


def string(ask: Callable[..., int], *arguments: Any) -> str:
    """What a function of PDFium writes as UTF-16 into a buffer whose size it tells first."""
    num_bytes = ask(*arguments, None, 0)
    if num_bytes <= 2:
        return ""
    buffer = (ctypes.c_ushort * (num_bytes // 2 + 1))()
    ask(*arguments, buffer, num_bytes)
    return bytes(buffer)[: num_bytes - 2].decode("utf-16-le", "replace")


def plain(text: str) -> str:
    return _DROP.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
