"""What a job found, as a person reads it."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from jobs import Result
from jobs.printable import printable

_ENDED = {
    "length": "; cut at the limit, see --max-tokens",
    "repetition": "; ended because it repeated itself",
}


def show_result(console: Console, result: Result) -> None:
    """The answers, each with what it cost."""
    for output in result.outputs:
        if output.question is not None:
            console.print(f"[bold]{escape(printable(output.question))}[/bold]")
        if output.thinking is not None:
            console.print(
                f"[dim]{escape(printable(output.thinking))}[/dim]\n", highlight=False, soft_wrap=True
            )
        console.print(printable(output.text).strip(), markup=False, highlight=False, soft_wrap=True)
        usage, timing = output.usage, output.timing
        rate = f", {usage.output_tokens / timing.decode_s:,.0f} tokens/s" if timing.decode_s > 0 else ""
        ended = _ENDED.get(output.finish_reason, "")
        console.print(
            f"[dim]{usage.prompt_tokens:,} prompt tokens, {usage.cached_tokens:,} of them cached; "
            f"{usage.output_tokens:,} output tokens{rate}; "
            f"first token after {timing.time_to_first_token_s:.2f} s{ended}[/dim]\n",
            highlight=False,
            soft_wrap=True,
        )
