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
    trailer = f"/Root 1 0 R /Size {len(objects) + 1 + encrypt}"
    if encrypt:
        key = "<" + "41" * 32 + ">"
        objects.append(f"<< /Filter /Standard /V 1 /R 2 /O {key} /U {key} /P -44 >>".encode())
        trailer += f" /Encrypt {len(objects)} 0 R /ID [<41> <41>]"
    data, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    data += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    start = data.index(b"xref\n0 ")
    return data + f"trailer << {trailer} >>\nstartxref\n{start}\n%%EOF\n".encode()
