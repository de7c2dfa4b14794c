"""Every example in docs/api.md, run against the real processes: its status and its names must be right."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from string import Template

import httpx
import pytest

from cli import Client
from jobs import Ask, Summarize, Warm
from tests.e2e.stack import ROOT, end, environment, free_port, start, wait_ready

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

BLOCK = re.compile(r"```console\n(.*?)```", re.S)
NAME = re.compile(r'"(\w+)": ?')
DOCUMENTED_STATUS = re.compile(r'HTTP/1\.1 (\d{3})|"status":(\d{3})|^(304)$', re.M)


def examples() -> list[tuple[str, str]]:
    """(command, documented answer) for each `$` line of the page, in order."""
    found = []
    for block in BLOCK.findall((ROOT / "docs" / "api.md").read_text()):
        for part in re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.M)[1:]:
            command, _, answer = part.partition("\n")
            found.append((command, answer))
    return found


def send(command: str, variables: dict[str, str]) -> httpx.Response:
    """Do what the curl command would do."""
    words = iter([Template(word).substitute(variables) for word in shlex.split(command)[1:]])
    method, url, headers, options = "", "", {}, {}
    for word in words:
        if word in ("-o", "-w"):
            next(words)
        elif word == "-X":
            method = next(words)
        elif word == "-I":
            method = "HEAD"
        elif word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            options["content"] = next(words)
        elif word == "-F":
            path = ROOT / next(words).removeprefix("file=@")
            options["files"] = {"file": (path.name, path.read_bytes())}
        elif word not in ("-i", "-N"):
            url = word
    method = method or ("POST" if options else "GET")
    return httpx.request(method, url, headers=headers, timeout=60, **options)


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The page's variables, on a service where one job is done, one at work and one cancelled."""
    folder: Path = tmp_path_factory.mktemp("docs")
    port = free_port()
    log = folder / "log"
    up = start(log, environment(folder / "data", port), "cli", "up")
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            wait_ready(client, up, log)
            book = folder / "book.txt"
            book.write_text("It was a dark and stormy night. " * 1500)
            note = folder / "note.txt"
            note.write_text("The mill was built in 1821 by Anna Teal.")
            report, note_id, book_id = (
                client.upload(path).id for path in (ROOT / "examples" / "report.md", note, book)
            )
            job = client.submit(Ask(documents=[note_id], questions=["Who?"], max_output_tokens=8))
            client.wait(job.id)
            warm = client.submit(Warm(documents=[note_id]))
            client.wait(warm.id)
            running = client.submit(Summarize(documents=[report], max_output_tokens=4000))
            cancelled = client.submit(Ask(documents=[note_id], questions=["Who?"], max_output_tokens=8))
            client.cancel(cancelled.id)
            yield {
                "B": client.url,
                "REPORT": report,
                "NOTE": note_id,
                "BOOK": book_id,
                "JOB": job.id,
                "WARM": warm.id,
                "ETAG": httpx.get(f"{client.url}/v1/jobs/{job.id}").headers["ETag"],
                "RUNNING": running.id,
                "CANCELLED": cancelled.id,
            }
    finally:
        end(up)


@pytest.mark.parametrize(("command", "documented"), examples())
def test_the_example_answers_as_documented(variables: dict[str, str], command: str, documented: str) -> None:
    answer = send(command, variables)
    status = DOCUMENTED_STATUS.search(documented)
    if status:
        assert answer.status_code == int(next(filter(None, status.groups()))), answer.text
    else:
        assert answer.is_success, answer.text
    assert set(NAME.findall(documented)) <= set(NAME.findall(answer.text))
    for event in re.findall(r"^event: (\S+)", documented, re.M):
        assert f"event: {event}" in answer.text


def test_the_page_has_examples() -> None:
    assert len(examples()) > 15
