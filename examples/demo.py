"""`make demo`: start Longleaf on a fresh folder, summarise a document, ask two questions, stop.

DOC=path names a text, Markdown or PDF file of your own; else examples/report.md is read.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cli import ApiError, Client
from cli.watch import watch
from cli.words import cell
from jobs import Ask, JobSpec, Output, Result, State, Summarize
from jobs.printable import printable

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path(".longleaf-demo")
LOG = FOLDER / "up.log"
READY_S = 900
"""A first start fetches the model."""
STOP_S = 45
OWN_QUESTIONS = ["What is this document about?", "Which people or organisations are named?"]
REPORT_QUESTIONS = ROOT / "examples" / "questions.txt"
MAX_OUTPUT_TOKENS = 160

console = Console()


class Failed(Exception):
    """A step of the demo failed; the message says which."""


def main() -> int:
    own = os.environ.get("DOC")
    path = Path(own) if own else ROOT / "examples" / "report.md"
    if not path.is_file():
        console.print(f"there is no file {path}", style="red", markup=False)
        return 2
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(mode=0o700)  # its log says what was asked
    port = free_port()
    with LOG.open("w") as log:
        command = [sys.executable, "-m", "cli", "up", "--data", str(FOLDER)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        # A Redis or a database that the environment names is no demo's.
        env = {k: v for k, v in os.environ.items() if k not in ("REDIS_URL", "LONGLEAF_DATABASE_URL")}
        # Its own session: a Ctrl-C reaches us alone, and we pass it on once.
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=env
        )
    try:
        with Client(f"http://127.0.0.1:{port}") as client:
            wait_ready(client, server)
            show(client, path, OWN_QUESTIONS if own else REPORT_QUESTIONS.read_text().splitlines())
    except (Failed, ApiError) as error:
        console.print(f"\n{error}", style="red", markup=False, soft_wrap=True)
        if not isinstance(error, Refusal):
            show_log()
        return 1
    except KeyboardInterrupt:
        console.print("\nstopping")
        return 130
    finally:
        stop(server)
    console.print("\nGo on with [bold]longleaf up[/bold] and [bold]longleaf ask FILE 'A question?'[/bold]")
    return 0


class Refusal(Failed):
    """The API will not take the document: its own words are enough."""


def wait_ready(client: Client, server: subprocess.Popen[bytes]) -> None:
    """Wait until jobs are worked on, showing what is waited for."""
    give_up_at = time.monotonic() + READY_S
    shown = ""
    with console.status("starting") as status:
        while (reason := client.not_ready()) is not None:
            if server.poll() is not None:
                raise Failed(f"`longleaf up` ended with exit status {server.returncode}")
            if time.monotonic() > give_up_at:
                raise Failed(f"not ready after {READY_S} s: {reason}")
            waiting_for = last_log_line() if "cannot reach" in reason else reason
            status.update(f"starting: {waiting_for}")
            if not console.is_terminal and waiting_for != shown:
                console.print(f"starting: {waiting_for}", markup=False, highlight=False, soft_wrap=True)
                shown = waiting_for
            time.sleep(0.3)
    console.print(f"ready: {client.url}")


def show(client: Client, path: Path, questions: list[str]) -> None:
    document = client.upload(path)
    counts = [f"{count:,} tokens" for count in document.num_tokens.values() if count is not None]
    console.print(
        f"uploaded {cell(document.name)}: {document.num_chars:,} characters {' '.join(counts)}".rstrip()
    )
    documents = [document.id]
    table = Table("", "prompt", "cached", "prefilled", "output", "first token", "tokens/s", title="Tokens")

    console.rule("Summary")
    summary = Summarize(documents=documents, max_output_tokens=MAX_OUTPUT_TOKENS)
    output = run(client, summary).outputs[0]
    console.print(printable(output.text).strip(), markup=False, highlight=False, soft_wrap=True)
    add_row(table, "summary", output)
    for number, question in enumerate(questions, 1):
        console.rule(question)
        ask = Ask(documents=documents, questions=[question], max_output_tokens=MAX_OUTPUT_TOKENS)
        output = run(client, ask).outputs[0]
        console.print(printable(output.text).strip(), markup=False, highlight=False, soft_wrap=True)
        add_row(table, f"question {number}", output)
    console.print()
    console.print(table)


def run(client: Client, spec: JobSpec) -> Result:
    try:
        job = client.submit(spec)
    except ApiError as error:
        raise Refusal(f"refused: {error}") from error
    job = watch(client, job.id, console)
    if job.state is State.SUCCEEDED:
        return client.result(job.id)
    reason = job.error.detail if job.error else "no reason given"
    if job.error is not None and job.error.code == "context_exceeded":
        raise Refusal(f"refused: {reason}")
    raise Failed(f"the job {job.id} {job.state.value}: {reason}")


def add_row(table: Table, name: str, output: Output) -> None:
    usage, timing = output.usage, output.timing
    counts = (usage.prompt_tokens, usage.cached_tokens, usage.prefilled_tokens, usage.output_tokens)
    rate = usage.output_tokens / timing.decode_s if timing.decode_s > 0 else 0.0
    table.add_row(
        name, *(f"{count:,}" for count in counts), f"{timing.time_to_first_token_s:.2f} s", f"{rate:.1f}"
    )


def stop(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def last_log_line() -> str:
    lines = LOG.read_text(errors="replace").splitlines()
    return lines[-1][-100:] if lines else "starting"


def show_log() -> None:
    console.print(f"\nthe last lines of {LOG}:")
    for line in LOG.read_text(errors="replace").splitlines()[-30:]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
