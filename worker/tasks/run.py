"""A job as a list of instructions over its documents, one output each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jobs import Ask, JobSpec, Output, Prompt, Result, Summarize, Timing, Usage, Warm
from prompts import instructions
from worker.engine.engine import Document, Engine, Request, Sampling
from worker.engine.report import Report

SUMMARY_PENALTY = 1.1
"""Long free text is where small models fall into loops."""


class JobReport(Protocol):
    def output(self, index: int, num_outputs: int) -> Report:
        """Where output `index`, from 0, is reported; all of a job may be in hand at once."""


def run(
    engine: Engine, spec: JobSpec, documents: Sequence[Document], report: JobReport, salt: bytes = b""
) -> Result:
    """Do a job.

    Args:
        salt: whose prefixes it may use, and which ones it leaves.

    Raises:
        EngineError: if the engine refuses it.
        Stopped: if the report says so.
    """
    if isinstance(spec, Warm):
        warmed = engine.warm(documents, report.output(0, 1), spec.thinking, salt)
        return Result(
            type=spec.type,
            model=engine.card.id,
            outputs=[],
            usage=warmed.usage,
            timing=warmed.timing,
            prefix_id=warmed.prefix_id,
        )
    wanted = instructions(spec)
    requests = [
        Request(instruction, _sampling(spec, index), report.output(index, len(wanted)))
        for index, (_, instruction) in enumerate(wanted)
    ]
    answers = engine.answer(documents, requests, spec.reuse, salt)
    outputs = [
        answer.model_copy(update={"question": question})
        for answer, (question, _) in zip(answers, wanted, strict=True)
    ]
    return Result(
        type=spec.type,
        model=engine.card.id,
        outputs=outputs,
        usage=_total_usage(outputs),
        timing=_total_timing(outputs),
    )


def _sampling(spec: Summarize | Ask | Prompt, index: int) -> Sampling:
    """For output `index`: each has a seed of its own."""
    return Sampling(
        max_output_tokens=spec.max_output_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        top_k=spec.top_k,
        min_p=spec.min_p,
        seed=None if spec.seed is None else (spec.seed + index) % 2**32,
        repetition_penalty=_penalty(spec),
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        stop=tuple(spec.stop),
        thinking=spec.thinking,
    )


def _penalty(spec: Summarize | Ask | Prompt) -> float:
    if spec.repetition_penalty is not None:
        return spec.repetition_penalty
    return SUMMARY_PENALTY if isinstance(spec, Summarize) else 1.0


def _total_usage(outputs: Sequence[Output]) -> Usage:
    return Usage(
        prompt_tokens=sum(o.usage.prompt_tokens for o in outputs),
        cached_tokens=sum(o.usage.cached_tokens for o in outputs),
        prefilled_tokens=sum(o.usage.prefilled_tokens for o in outputs),
        output_tokens=sum(o.usage.output_tokens for o in outputs),
        drafted_tokens=sum(o.usage.drafted_tokens for o in outputs),
        accepted_tokens=sum(o.usage.accepted_tokens for o in outputs),
    )


def _total_timing(outputs: Sequence[Output]) -> Timing:
    """Times add up; the first token of the job is that of its first output."""
    return Timing(
        restore_s=sum(o.timing.restore_s for o in outputs),
        prefill_s=sum(o.timing.prefill_s for o in outputs),
        decode_s=sum(o.timing.decode_s for o in outputs),
        time_to_first_token_s=outputs[0].timing.time_to_first_token_s,
    )
