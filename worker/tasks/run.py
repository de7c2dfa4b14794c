"""A job as a list of instructions over its documents, one output each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jobs import Ask, JobSpec, Output, Result, Summarize, Timing, Usage
from worker.engine.engine import Document, Engine, Sampling
from worker.engine.report import Report

SUMMARIZE = "Summarize the document above in one paragraph."
SUMMARY_PENALTY = 1.1
"""Long free text is where small models fall into loops."""
FOCUS = "Pay attention above all to: {focus}"
ASK = "Question: {question}\nAnswer in one sentence, from the document above."


class OutputReport(Report, Protocol):
    def begin_output(self, index: int, num_outputs: int) -> None:
        """All that is reported from now on belongs to output `index`."""


def instructions(spec: JobSpec) -> list[tuple[str | None, str]]:
    """(question, instruction) for each output of a job."""
    if isinstance(spec, Summarize):
        return [(None, SUMMARIZE if spec.focus is None else f"{SUMMARIZE}\n{FOCUS.format(focus=spec.focus)}")]
    if isinstance(spec, Ask):
        return [(q, ASK.format(question=q)) for q in spec.questions]
    return [(None, spec.instruction)]


def run(engine: Engine, spec: JobSpec, documents: Sequence[Document], report: OutputReport) -> Result:
    """Do a job.

    Raises:
        EngineError: if the engine refuses it.
        Stopped: if the report says so.
    """
    outputs: list[Output] = []
    wanted = instructions(spec)
    for index, (question, instruction) in enumerate(wanted):
        report.begin_output(index, len(wanted))
        seed = None if spec.seed is None else (spec.seed + index) % 2**32
        sampling = Sampling(spec.max_output_tokens, spec.temperature, spec.top_p, seed, _penalty(spec))
        output = engine.generate(documents, instruction, sampling, report, spec.reuse)
        outputs.append(output.model_copy(update={"question": question}))
    return Result(
        type=spec.type,
        model=engine.card.id,
        outputs=outputs,
        usage=_total_usage(outputs),
        timing=_total_timing(outputs),
    )


def _penalty(spec: JobSpec) -> float:
    if spec.repetition_penalty is not None:
        return spec.repetition_penalty
    return SUMMARY_PENALTY if isinstance(spec, Summarize) else 1.0


def _total_usage(outputs: Sequence[Output]) -> Usage:
    return Usage(
        prompt_tokens=sum(o.usage.prompt_tokens for o in outputs),
        cached_tokens=sum(o.usage.cached_tokens for o in outputs),
        prefilled_tokens=sum(o.usage.prefilled_tokens for o in outputs),
        output_tokens=sum(o.usage.output_tokens for o in outputs),
    )


def _total_timing(outputs: Sequence[Output]) -> Timing:
    """Times add up; the first token of the job is that of its first output."""
    return Timing(
        restore_s=sum(o.timing.restore_s for o in outputs),
        prefill_s=sum(o.timing.prefill_s for o in outputs),
        decode_s=sum(o.timing.decode_s for o in outputs),
        time_to_first_token_s=outputs[0].timing.time_to_first_token_s,
    )
