"""Which format a file is that cannot be read here, by its structure: magic numbers, members, directories.

It names what is no text; whether a file is text is decided before, so a text may mention any of these.
"""

from __future__ import annotations

import re
import struct
import zipfile
from pathlib import Path

HEAD_BYTES = 64 * 1024
_MAX_DIRECTORY_BYTES = 2**20
"""Of a ZIP file's list of members: a longer one is not read for the sake of a name."""

OFFICE = "save it as PDF or as text and upload that"
IMAGE = "run OCR on it, save it as a PDF with a text layer and upload that"
ARCHIVE = "unpack it and upload the documents in it one by one"
SOUND = "write down what is said in it and upload the text"
OTHER = "export what is to be read as PDF or as text and upload that"

_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "a PNG image", IMAGE),
    (0, b"\xff\xd8\xff", "a JPEG image", IMAGE),
    (0, b"GIF87a", "a GIF image", IMAGE),
    (0, b"GIF89a", "a GIF image", IMAGE),
    (0, b"II*\0", "a TIFF image", IMAGE),
    (0, b"MM\0*", "a TIFF image", IMAGE),
    (0, b"II+\0", "a TIFF image", IMAGE),
    (0, b"MM\0+", "a TIFF image", IMAGE),
    (0, b"BM", "a BMP image", IMAGE),
    (0, b"8BPS\0", "a Photoshop image", IMAGE),
    (0, b"\0\0\0\x0cjP  \r\n", "a JPEG 2000 image", IMAGE),
    (0, b"\0\0\1\0", "an icon", IMAGE),
    (0, b"AT&TFORM", "a DjVu document", OTHER),
    (0, b"\x1f\x8b\x08", "a gzip file", ARCHIVE),
    (0, b"BZh", "a bzip2 file", ARCHIVE),
    (0, b"\xfd7zXZ\0", "an xz file", ARCHIVE),
    (0, b"\x28\xb5\x2f\xfd", "a zstd file", ARCHIVE),
    (0, b"\x04\x22\x4d\x18", "an LZ4 file", ARCHIVE),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", ARCHIVE),
    (0, b"Rar!\x1a\x07", "a RAR archive", ARCHIVE),
    (0, b"MSCF\0\0\0\0", "a CAB archive", ARCHIVE),
    (257, b"ustar", "a tar archive", ARCHIVE),
    (0, b"ID3", "a sound file (MP3)", SOUND),
    (0, b"\xff\xfb", "a sound file (MP3)", SOUND),
    (0, b"OggS\0", "a sound file (Ogg)", SOUND),
    (0, b"fLaC", "a sound file (FLAC)", SOUND),
    (0, b"\x1a\x45\xdf\xa3", "a film (Matroska)", SOUND),
    (60, b"BOOKMOBI", "an e-book (MOBI)", OTHER),
    (0, b"ITSF", "a help file (CHM)", OTHER),
    (0, b"\x78\x9f\x3e\x22", "mail in Outlook's own form (winmail.dat)", OTHER),
    (0, b"!BDN", "an Outlook mailbox (PST)", OTHER),
    (0, b"bplist00", "an Apple property list or web archive", OTHER),
    (0, b"SQLite format 3\0", "an SQLite database", OTHER),
    (0, b"PAR1", "a Parquet table", OTHER),
    (0, b"\x7fELF", "a program", OTHER),
    (0, b"MZ", "a program", OTHER),
    (0, b"\xcf\xfa\xed\xfe", "a program", OTHER),
    (0, b"\xca\xfe\xba\xbe", "a program", OTHER),
    (0, b"\0\1\0\0\0", "a font", OTHER),
    (0, b"OTTO\0", "a font", OTHER),
    (0, b"wOF", "a font", OTHER),
)
_RIFF = {
    b"WEBP": ("a WebP image", IMAGE),
    b"WAVE": ("a sound file (WAV)", SOUND),
    b"AVI ": ("a film (AVI)", SOUND),
}
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1", b"avif", b"avis")
_ZIP = (b"PK\3\4", b"PK\5\6", b"PK\7\x08")
_OLE2 = bytes.fromhex("d0cf11e0a1b11ae1")
_OLE2_ENTRIES = (
    ("EncryptedPackage", "an Office document with a password", "remove the password, " + OFFICE),
    ("WordDocument", "an old Word document (.doc)", OFFICE),
    ("Workbook", "an old Excel workbook (.xls)", OFFICE),
    ("Book", "an old Excel workbook (.xls)", OFFICE),
    ("PowerPoint Document", "an old PowerPoint presentation (.ppt)", OFFICE),
    ("VisioDocument", "a Visio drawing", OFFICE),
    ("__", "a message of Outlook (.msg)", OFFICE),
)
_ZIP_MIMETYPES = {
    "application/epub+zip": "an EPUB book",
    "application/vnd.oasis.opendocument.text": "an OpenDocument text (.odt)",
    "application/vnd.oasis.opendocument.spreadsheet": "an OpenDocument spreadsheet (.ods)",
    "application/vnd.oasis.opendocument.presentation": "an OpenDocument presentation (.odp)",
}
_ZIP_MEMBERS = (
    (r"word/document\d*\.xml", "a Word document (.docx)"),
    (r"xl/workbook\.(xml|bin)", "an Excel workbook (.xlsx)"),
    (r"ppt/presentation\.xml", "a PowerPoint presentation (.pptx)"),
    (r"visio/document\.xml", "a Visio drawing"),
    (r"META-INF/container\.xml", "an EPUB book"),
    (r"content\.xml", "an OpenDocument file"),
    (r"Index/Document\.iwa|index\.apxl|Index\.zip", "a document of Pages, Numbers or Keynote"),
    (r"FixedDocSeq\.fdseq|FixedDocumentSequence\.fdseq", "an XPS document"),
)


def named(path: Path) -> tuple[str, str] | None:
    """What a file is that is no text, and what its owner can do; None where nothing tells."""
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
    if head.startswith(_ZIP):
        return _zip(path)
    if head.startswith(_OLE2):
        return _ole2(path, head)
    if head[:4] == b"RIFF" and head[8:12] in _RIFF:
        return _RIFF[head[8:12]]
    if head[4:8] == b"ftyp":
        return (
            ("a HEIF image", IMAGE) if head[8:12] in _HEIF_BRANDS else ("a film or sound file (MP4)", SOUND)
        )
    for offset, magic, name, what_to_do in _MAGIC:
        if head.startswith(magic, offset):
            return name, what_to_do
    return None


def holds_files(head: bytes) -> bool:
    """Whether a file is one that holds others as they are, so that it has their bytes near its beginning."""
    return head.startswith((*_ZIP, _OLE2)) or head.startswith(b"ustar", 257)


def _zip(path: Path) -> tuple[str, str]:
    names = _zip_names(path)
    if names is None:
        return "a ZIP archive, or an Office file made as one, that is damaged or very large", OFFICE
    if "mimetype" in names:
        try:
            with zipfile.ZipFile(path) as archive, archive.open("mimetype") as member:
                kind = member.read(100).decode("ascii", "replace").strip()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError):
            kind = ""
        if kind in _ZIP_MIMETYPES:
            return _ZIP_MIMETYPES[kind], OFFICE
    for pattern, name in _ZIP_MEMBERS:
        if any(re.fullmatch(pattern, member) for member in names):
            return name, OFFICE
    return "a ZIP archive", ARCHIVE


def _zip_names(path: Path) -> list[str] | None:
    """The members of a ZIP file; None where it is damaged, or lists more than is read for a name."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 66_000))  # the end's record and its longest comment
        tail = file.read()
    place = tail.rfind(b"PK\5\6")
    if place == -1 or len(tail) < place + 22 or b"PK\6\7" in tail:  # a ZIP64 says its size elsewhere
        return None
    (directory_bytes,) = struct.unpack_from("<I", tail, place + 12)
    if directory_bytes > _MAX_DIRECTORY_BYTES:
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None


def _ole2(path: Path, head: bytes) -> tuple[str, str]:
    """An OLE2 file by the first entries of its directory, whose sector its header names."""
    unknown = ("an old Office file (Word, Excel or PowerPoint)", OFFICE)
    if len(head) < 512:
        return unknown
    (shift,), (sector,) = struct.unpack_from("<H", head, 30), struct.unpack_from("<I", head, 48)
    if shift not in (9, 12):
        return unknown
    with path.open("rb") as file:
        file.seek((sector + 1) << shift)
        directory = file.read(4096)
    names = {
        directory[start : start + 64].decode("utf-16-le", "replace").partition("\0")[0]
        for start in range(0, len(directory) - 127, 128)
    }
    for entry, name, what_to_do in _OLE2_ENTRIES:
        if any(found.startswith(entry) for found in names):
            return name, what_to_do
    return unknown
