"""`longleaf webhooks`: what is asked of the API and what is printed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.fake_api import Request, fake_api
from tests.cli.test_command import longleaf


def test_rotate_prints_the_secret_alone_and_says_until_when_both_sign(tmp_path: Path) -> None:
    asked: list[tuple[str, str, dict[str, int]]] = []

    def answer(request: Request) -> None:
        asked.append((request.command, request.path, json.loads(request.body)))
        request.reply(200, {"secret": "whsec_b", "old_until": "2026-11-30T10:00:00Z"})

    with fake_api(answer) as url:
        done = longleaf(tmp_path, "webhooks", "rotate", "--overlap", "60", api=url)
    assert (done.returncode, done.stdout) == (0, "whsec_b\n")
    assert "until 2026-11-30T10:00:00Z" in done.stderr
    assert asked == [("POST", "/v1/webhooks/secret/rotate", {"overlap_s": 60})]


def test_secret_prints_it(tmp_path: Path) -> None:
    with fake_api(lambda request: request.reply(200, {"secret": "whsec_a", "old_until": None})) as url:
        done = longleaf(tmp_path, "webhooks", "secret", api=url)
    assert (done.stdout, done.stderr) == ("whsec_a\n", "")
