"""An engine child without an engine: does the steps that the job's instruction spells out as JSON.

["progress", phase, num_done, num_total] · ["delta", text] · ["done", text] · ["say", raw line] ·
["die", signal] · ["exit", code] · ["gate", fifo]: goes on when the test opens it · ["until_stop"]: ends as
it is told · ["deaf"]: never ends by itself · ["grow", num_bytes]: takes memory and keeps it ·
["end"]: succeeds.
FAKE_CHILD_LOAD = "refuse" | "die" fails the loading.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading

from jobs import EventType, ModelCard, Output, Problem, Result, Timing, Usage
from worker.protocol import ChildEvent, End, FromChild, Ready, Refused, Run, Stop, decode_to_child, encode

read_fd, write_fd = (int(part) for part in os.environ["LONGLEAF_CHILD_FDS"].split(","))
known: set[str] = set()
"""Texts that were read: as many tokens as characters are prefilled the first time, and cached after that."""
taken: list[bytes] = []
runs: queue.Queue[Run] = queue.Queue()
stops: queue.Queue[Stop] = queue.Queue()


def say(message: FromChild) -> None:
    os.write(write_fd, encode(message))


def listen() -> None:
    with open(read_fd, "rb") as pipe:
        for line in pipe:
            message = decode_to_child(line)
            if isinstance(message, Run):
                runs.put(message)
            else:
                stops.put(message)
    os._exit(0)


def result(run: Run) -> Result:
    text = run.documents[0].text if run.documents else ""
    num_cached = len(text) if text in known else 0
    known.add(text)
    usage = Usage(prompt_tokens=len(text), cached_tokens=num_cached, prefilled_tokens=len(text) - num_cached)
    timing = Timing(prefill_s=usage.prefilled_tokens / 1000)
    return Result.of("prompt", "fake", [output(text, usage, timing)], 1)


def output(text: str, usage: Usage, timing: Timing) -> Output:
    return Output(text=text, finish_reason="stop", usage=usage, timing=timing, prefix="none")


def progress(phase: str, num_done: int, num_total: int) -> ChildEvent:
    data = {"phase": phase, "num_done": num_done, "num_total": num_total, "tokens_per_s": 1.0}
    return ChildEvent(type=EventType.PROGRESS, data={**data, "eta_s": None, "cached_tokens": 0})


def do(run: Run) -> None:
    instruction = getattr(run.request.spec, "instruction", '[["end"]]')
    for name, *args in json.loads(instruction):
        if name == "progress":
            say(progress(*args))
        elif name == "delta":
            say(ChildEvent(type=EventType.DELTA, data={"output_index": 0, "text": args[0]}))
        elif name == "done":
            say(
                ChildEvent(
                    type=EventType.OUTPUT, data=output(args[0], Usage(), Timing()).model_dump(mode="json")
                )
            )
        elif name == "say":
            os.write(write_fd, args[0].encode() + b"\n")
        elif name == "die":
            os.kill(os.getpid(), args[0])
        elif name == "exit":
            os._exit(args[0])
        elif name == "gate":
            with open(args[0]) as gate:
                gate.read()
        elif name == "until_stop":
            stop = stops.get()
            say(End(outcome="cancelled" if stop.why == "cancel" else "released"))
        elif name == "grow":
            taken.append(b"\1" * args[0])
        elif name == "deaf":
            threading.Event().wait()
        elif name == "end":
            say(End(outcome="succeeded", result=result(run)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    load = os.environ.get("FAKE_CHILD_LOAD")
    if load == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if load == "refuse":
        say(Refused(problem=Problem(code="model_unknown", detail="there is no such model")))
        sys.exit(3)
    threading.Thread(target=listen, daemon=True).start()
    card = ModelCard(
        id="fake",
        architecture="fake",
        context_tokens=8192,
        num_layers=1,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=64,
        kv_format="int4c",
        kv_bytes_per_token=1.0,
        weights_bytes=1,
        fingerprint="fake",
        device=f"pid {os.getpid()}",
    )
    say(Ready(card=card))
    while True:
        do(runs.get())


if __name__ == "__main__":
    main()
