"""Small PDF files, written by hand."""

from __future__ import annotations


def pdf(pages: list[str], encrypt: bool = False) -> bytes:
    """One line of Helvetica on each page; a page of "" has no text at all."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"",
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    kids = []
    for text in pages:
        stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() if text else b"0 0 m 100 100 l S"
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        page = "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R"
        objects.append((page % len(objects) + " /Resources << /Font << /F1 3 0 R >> >> >>").encode())
        kids.append(f"{len(objects)} 0 R")
    objects[1] = f"<< /Type /Pages /Kids [{' '.join(kids)}] /Count {len(kids)} >>".encode()
    trailer = ""
    if encrypt:
        key = "<" + "41" * 32 + ">"
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /O {key} /U {key} /P -44 >>".encode())
        trailer = f"/Encrypt {len(objects)} 0 R /ID [<41> <41>]"
    return assemble(objects, trailer)


def assemble(objects: list[bytes], trailer: str = "") -> bytes:
    """A PDF of these objects, the first of which is its catalog."""
    data, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    data += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    start = data.index(b"xref\n0 ")
    trailer = f"/Root 1 0 R /Size {len(objects) + 1} {trailer}"
    return data + f"trailer << {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()


def stream(content: bytes, entries: str = "") -> bytes:
    return b"<< /Length %d %s >>\nstream\n%s\nendstream" % (len(content), entries.encode(), content)


def drawn(pages: list[bytes], annotations: list[str] | None = None, form: str = "") -> bytes:
    """Pages with these contents. Font F1 is Helvetica, Im1 a grey picture, F2 has no map to characters.

    `annotations` are on the first page; their objects begin at 7.
    """
    widgets = annotations or []
    first = 7
    num_annotations = len(widgets)
    places = [first + num_annotations + 2 * index for index in range(len(pages))]
    kids = " ".join(f"{place} 0 R" for place in places)
    glyph = stream(b"600 0 0 0 600 800 d1 0 0 500 700 re f")
    objects = [
        f"<< /Type /Catalog /Pages 2 0 R {form} >>".encode(),
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        stream(
            bytes([200]) * 100,
            "/Type /XObject /Subtype /Image /Width 10 /Height 10 /ColorSpace /DeviceGray /BitsPerComponent 8",
        ),
        b"<< /Type /Font /Subtype /Type3 /FontBBox [0 0 600 800] /FontMatrix [0.001 0 0 0.001 0 0] "
        b"/FirstChar 33 /LastChar 35 /Widths [600 600 600] "
        b"/Encoding << /Type /Encoding /Differences [33 /g1 /g2 /g3] >> "
        b"/CharProcs << /g1 6 0 R /g2 6 0 R /g3 6 0 R >> /Resources << >> >>",
        glyph,
        *(widget.encode() for widget in widgets),
    ]
    for index, content in enumerate(pages):
        on_page = " ".join(f"{first + n} 0 R" for n in range(num_annotations)) if index == 0 else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {places[index] + 1} 0 R "
            f"/Annots [{on_page}] /Resources << /Font << /F1 3 0 R /F2 5 0 R >> "
            "/XObject << /Im1 4 0 R >> >> >>".encode()
        )
        objects.append(stream(content))
    return assemble(objects)


def lines(*rows: str) -> bytes:
    """The content of a page with these rows under each other."""
    shown = " ".join(f"({row}) Tj T*" for row in rows)
    return f"BT /F1 12 Tf 16 TL 1 0 0 1 72 720 Tm {shown} ET".encode("latin-1")


PICTURE = b"q 500 0 0 700 50 50 cm /Im1 Do Q"
DRAWING = b"0 0 m 100 100 l S"
NOTHING = b"0 0 m"
UNMAPPED = b'BT /F2 24 Tf 72 700 Td (!"#) Tj ET'


def widget(name: str, value: str, kind: str = "/FT /Tx", more: str = "") -> str:
    """A field of a form; its value is a PDF object such as `(text)`."""
    return (
        f"<< /Type /Annot /Subtype /Widget {kind} /T ({name}) /V {value} /DA (/F1 12 Tf 0 g) "
        f"/Rect [220 700 500 718] {more} >>"
    )


def filled_form(fields: list[str], page: bytes) -> bytes:
    """One page with these fields on it."""
    refs = " ".join(f"{7 + number} 0 R" for number in range(len(fields)))
    form = f"/AcroForm << /Fields [{refs}] /DA (/F1 12 Tf 0 g) /DR << /Font << /F1 3 0 R >> >> >>"
    return drawn([page], annotations=fields, form=form)
