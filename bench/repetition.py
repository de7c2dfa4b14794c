"""What the watch for loops does to real text, and how late it sees a loop.

    python -m bench.repetition --tokenizer FOLDER FILE... [--json bench/results/repetition.json]

Each file is taken as one answer: its tokens go through a `RepetitionWatch`, and whatever it would have ended
is a false alarm, after which a new answer begins. Then text of each length from the first file is said over
and over, as it is and with a counter before it, and the tokens until it is noticed are counted. Prints two
tables and one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlx_lm.utils import load_tokenizer

from worker.engine.repetition import NumberTokens, RepetitionWatch

PERIODS = (1, 2, 7, 16, 32, 33, 56, 100, 150, 300, 700, 1500)
CHUNK_CHARS = 100_000
SHOWN_CHARS = 300


def first_alarm(numbers: NumberTokens, tokens: Iterable[int]) -> int | None:
    """How many tokens there were when a loop was seen."""
    watch = RepetitionWatch(numbers)
    return next((i for i, token in enumerate(tokens, 1) if watch.push(token)), None)


def false_alarms(tokenizer: Any, numbers: NumberTokens, path: Path) -> tuple[int, int, list[str]]:
    """(tokens, alarms, the text before each alarm) of a file."""
    text = path.read_text(errors="replace")
    tokens: list[int] = []
    for start in range(0, len(text), CHUNK_CHARS):
        tokens += tokenizer.encode(text[start : start + CHUNK_CHARS], add_special_tokens=False)
    start, seen = 0, []
    while (alarm := first_alarm(numbers, tokens[start:])) is not None:
        start += alarm
        seen.append(tokenizer.decode(tokens[start - 300 : start])[-SHOWN_CHARS:])
    return len(tokens), len(seen), seen


def delays(tokenizer: Any, numbers: NumberTokens, text: str) -> list[dict[str, Any]]:
    """For each period, the tokens until a loop was seen, without and with a counter before each round."""
    lead = tokenizer.encode(text[:4000], add_special_tokens=False)
    words = tokenizer.encode(text[4000:60_000], add_special_tokens=False)
    rows = []
    for period in PERIODS:
        body = words[:period]
        plain = first_alarm(numbers, [*lead, *itertools.islice(itertools.cycle(body), 20_000)])
        rounds = (
            tokenizer.encode(f"\n{n}. ", add_special_tokens=False) + body for n in range(1, 20_000 // period)
        )
        counted = first_alarm(numbers, [*lead, *itertools.islice(itertools.chain(*rounds), 20_000)])
        rows.append(
            {
                "period": period,
                "plain": plain and plain - len(lead),
                "counted": counted and counted - len(lead),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model's folder")
    parser.add_argument("--show", action="store_true", help="print the text before each false alarm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.tokenizer)
    numbers = NumberTokens(tokenizer)
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    seconds = 0.0
    for path in arguments.files:
        began = time.perf_counter()
        num_tokens, num_alarms, seen = false_alarms(tokenizer, numbers, path)
        seconds += time.perf_counter() - began
        for i, number in enumerate((1, num_tokens, num_alarms)):
            kinds[path.suffix][i] += number
        if arguments.show:
            for text in seen:
                print(f"--- {path}\n{text}")
    print("kind         files      tokens  false alarms")
    for kind, (num_files, num_tokens, num_alarms) in sorted(kinds.items()):
        print(f"{kind or '-':10} {num_files:7} {num_tokens:11,} {num_alarms:13}")
    num_tokens = sum(row[1] for row in kinds.values())
    print(f"tokenising and watching took {seconds / num_tokens * 1e6:.1f} µs a token")
    late = delays(tokenizer, numbers, arguments.files[0].read_text(errors="replace"))
    print("\nperiod   seen after   with a counter")
    for row in late:
        print(f"{row['period']:6} {row['plain'] or '-':>12} {row['counted'] or '-':>16}")
    report = {
        "kinds": {
            kind: dict(zip(("files", "tokens", "alarms"), row, strict=True)) for kind, row in kinds.items()
        }
    }
    line = json.dumps(report | {"delays": late})
    print(line)
    if arguments.json:
        arguments.json.write_text(line + "\n")


if __name__ == "__main__":
    main()
