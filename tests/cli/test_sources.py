"""What the words for documents on a command line lead to."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cli import Client
from cli.sources import document_ids
from tests.cli.fake_api import Request, fake_api

uploads: list[bytes] = []


@pytest.fixture
def client() -> Iterator[Client]:
    uploads.clear()

    def keep(request: Request) -> None:
        uploads.append(request.body)
        document = {"id": f"doc_{len(uploads)}", "name": "n", "media_type": "text/plain", "num_bytes": 1}
        request.reply(201, document | {"num_chars": 1})

    with fake_api(keep) as url, Client(url) as made:
        yield made


def test_files_are_uploaded_and_ids_taken_as_they_are(client: Client, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Alpha.")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    words = [str(tmp_path / "a.txt"), "doc_9", str(tmp_path / "link.txt")]
    assert document_ids(client, words) == ["doc_1", "doc_9", "doc_2"]
    assert b'filename="a.txt"' in uploads[0]
    assert b"Alpha." in uploads[1]


def test_what_a_text_has_not_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def warn(request: Request) -> None:
        document = {
            "id": "doc_1",
            "name": "n",
            "media_type": "application/pdf",
            "num_bytes": 1,
            "num_chars": 1,
        }
        lacks = [{"code": "pages_without_text", "detail": "2 of 3 pages have\x1b no text", "params": {}}]
        request.reply(201, document | {"warnings": lacks})

    (tmp_path / "a.pdf").write_text("Alpha.")
    with fake_api(warn) as url, Client(url) as client:
        assert document_ids(client, [str(tmp_path / "a.pdf")]) == ["doc_1"]
    told = capsys.readouterr()
    assert told.out == ""
    assert "a.pdf: 2 of 3 pages have" in told.err
    assert "\x1b" not in told.err


def test_a_named_pipe_is_read_to_its_end(client: Client, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("From a pipe.",))
    writer.start()
    assert document_ids(client, [str(pipe)]) == ["doc_1"]
    writer.join()
    assert b'filename="pipe"' in uploads[0]
    assert b"From a pipe." in uploads[0]


def test_a_descriptor_that_a_shell_substitutes_is_read(client: Client) -> None:
    read, write = os.pipe()
    os.write(write, b"Substituted.")
    os.close(write)
    assert document_ids(client, [f"/dev/fd/{read}"], name="list.txt") == ["doc_1"]
    os.close(read)
    assert b'filename="list.txt"' in uploads[0]
    assert b"Substituted." in uploads[0]


def test_a_file_that_says_it_is_empty_and_is_not_is_sent_whole(client: Client) -> None:
    assert document_ids(client, ["/proc/self/status"]) == ["doc_1"]
    assert b"Name:" in uploads[0]


def test_a_name_in_no_encoding_is_sent_in_one(client: Client, tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    Path(os.fsdecode(path)).write_text("Alpha.")
    assert document_ids(client, [os.fsdecode(path)]) == ["doc_1"]
    assert b'filename="caf?.txt"' in uploads[0]


def refused(client: Client, capsys: pytest.CaptureFixture[str], *words: str, name: str | None = None) -> str:
    """What is said of words that are refused; nothing was sent."""
    with pytest.raises(typer.Exit) as ended:
        document_ids(client, words, name)
    assert ended.value.exit_code == 2
    assert uploads == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("missing.txt", "there is no file"),
        ("doc_1/../x", "there is no file"),
        ("What does it say? " * 30, "there is no file 'What does"),
        (".", "is a folder"),
        ("/dev/null", "is a device"),
        ("/proc/self/mem", "its disk reports an error"),
    ],
)
def test_what_is_no_document_is_told_in_one_sentence(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, told: str
) -> None:
    (tmp_path / "a.txt").write_text("Alpha.")
    assert told in refused(client, capsys, str(tmp_path / "a.txt"), word)


def test_a_socket_and_a_link_to_nowhere_are_told(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("s.sock")
        assert "is a socket" in refused(client, capsys, "s.sock")
    Path("link").symlink_to("nowhere")
    assert "is a link to a file that is not there" in refused(client, capsys, "link")


def test_a_file_that_may_not_be_read_is_told(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = tmp_path / "locked.txt"
    locked.write_text("Alpha.")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Whoever runs the tests as root may read every file.
    monkeypatch.setattr("builtins.open", denied)
    assert "may not be read by this user" in refused(client, capsys, str(locked))


def test_standard_input_is_named_once_and_a_name_names_one_file(
    client: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "read once" in refused(client, capsys, "-", "/dev/stdin")
    for file in (tmp_path / "a.txt", tmp_path / "b.txt"):
        file.write_text(file.name)
    words = (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))
    assert "names one file or pipe" in refused(client, capsys, *words, name="x")
    assert "names one file or pipe" in refused(client, capsys, "doc_1", name="x")
