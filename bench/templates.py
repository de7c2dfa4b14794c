"""Published chat templates: which ones can carry a document, what is found around it, and why others can't.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    pip download --no-deps axolotl==0.19.0
    python -m bench.templates llama_cpp_python-0.3.36.tar.gz axolotl-0.19.0-py3-none-any.whl

Each argument is a `.jinja` file, a folder that is searched for them, or a package whose `.jinja` files are
read in place; `--json FILE` keeps the result. Every template is given the same conversation; its text is
compared with what transformers makes of it on the same day. Prints a row a template and one JSON line. Exit
status 1 where a template is refused or the texts differ.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.machine import command, commit, cpu_name
from prompts import SYSTEM, ChatTemplate, PromptError, find_frame
from prompts.template import THE_DAY, RenderError
from prompts.thinking import tags_of

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": 'Is «é» <b>"so"</b>?\n'}]


def templates(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """(name, source) of each template."""
    for path in paths:
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                for name in sorted(wheel.namelist()):
                    if name.endswith(".jinja"):
                        yield Path(name).stem, wheel.read(name).decode()
        elif path.suffix == ".gz":
            with tarfile.open(path) as archive:
                for member in sorted(archive, key=lambda each: each.name):
                    file = archive.extractfile(member) if member.name.endswith(".jinja") else None
                    if file is not None:
                        yield Path(member.name).stem, file.read().decode()
        else:
            for found in sorted(path.rglob("*.jinja")) if path.is_dir() else [path]:
                yield found.stem, found.read_text(encoding="utf-8")


def by_transformers(source: str, thinking: bool) -> str | None:
    """None where the template refuses the conversation."""
    import transformers.utils.chat_template_utils as theirs

    class ThatDay(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> ThatDay:
            return cls(*THE_DAY.timetuple()[:6])

    vars(theirs)["datetime"] = ThatDay
    variables = {
        "enable_thinking": thinking,
        "thinking": thinking,
        "date_string": f"{THE_DAY:%d %b %Y}",
        "datetime": f"{THE_DAY:%Y-%m-%d}",
        "tools": None,
        "documents": None,
    }
    try:
        text = theirs._compile_jinja_template(source).render(
            messages=MESSAGES, add_generation_prompt=True, **variables, **TOKENS
        )
    except Exception:
        return None
    return str(text)


def by_us(source: str, thinking: bool) -> str | None:
    try:
        return ChatTemplate(source, TOKENS).render(MESSAGES, thinking, tools=None, documents=None)
    except RenderError:
        return None


def row(name: str, source: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "template": name,
        "as_transformers": all(
            by_us(source, each) == by_transformers(source, each) for each in (False, True)
        ),
    }
    try:
        plain, asked = (find_frame(ChatTemplate(source, TOKENS), thinking) for thinking in (False, True))
    except PromptError as error:
        return found | {"served": False, "why": str(error)}
    tags = tags_of(source)
    in_user = plain.before.rstrip().endswith(SYSTEM)
    return found | {
        "served": True,
        "system": "in the user's message" if in_user else "of its own",
        "thinking": "switched" if plain != asked else tags.open if tags else "none",
        "after": plain.after,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = [row(*each) for each in templates(arguments.paths)]
    table = Table("template", "served", "as transformers", "system", "thinking", "after the user's message")
    for each in rows:
        why = each.get("why")
        table.add_row(
            each["template"],
            "yes" if each["served"] else "no",
            "yes" if each["as_transformers"] else "no",
            *(("", "", why) if why else (each["system"], each["thinking"], repr(each["after"])[-44:])),
        )
    Console(width=200, markup=False).print(table)
    num_served = sum(each["served"] for each in rows)
    num_alike = sum(each["as_transformers"] for each in rows)
    print(f"{num_served} of {len(rows)} served; {num_alike} rendered as by transformers")
    result = {
        "bench": "templates",
        "sources": [path.name for path in arguments.paths],
        "num_templates": len(rows),
        "num_served": num_served,
        "num_as_transformers": num_alike,
        "rows": rows,
        "versions": {name: version(name) for name in ("jinja2", "transformers")},
        "machine": cpu_name(),
        "commit": commit(),
        "command": command("templates"),
    }
    line = json.dumps(result, ensure_ascii=False)
    print(line)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return 0 if num_served == num_alike == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
