"""A job as a list of instructions over its documents, one output each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jobs import Ask, JobSpec, Prompt, Result, Summarize, Warm
from prompts import instructions
from worker.engine.engine import Document, Engine, Request, Sampling
from worker.engine.report import Report

SUMMARY_PENALTY = 1.1
"""Long free text is where small models fall into loops."""


class JobReport(Protocol):
    def output(self, index: int, num_outputs: int, question: str | None) -> Report:
        """Where output `index`, from 0, is reported; all of a job may be in hand at once."""


def run(
    engine: Engine,
    spec: JobSpec,
    documents: Sequence[Document],
    report: JobReport,
    salt: bytes = b"",
    owed: Sequence[int] | None = None,
) -> Result:
    """Do a job.

    Args:
        salt: whose prefixes it may use, and which ones it leaves.
        owed: which outputs are wanted, by index; all where None. Each is what it would be among all.

    Raises:
        EngineError: if the engine refuses it.
        Stopped: if the report says so.
    """
    if isinstance(spec, Warm):
        warmed = engine.warm(documents, report.output(0, 1, None), spec.thinking, salt)
        return Result(
            type=spec.type,
            model=engine.card.id,
            outputs=[],
            usage=warmed.usage,
            timing=warmed.timing,
            prefix_id=warmed.prefix_id,
        )
    wanted = instructions(spec)
    indices = range(len(wanted)) if owed is None else owed
    requests = []
    for index in indices:
        question, instruction = wanted[index]
        where = report.output(index, len(wanted), question)
        requests.append(Request(instruction, _sampling(spec, index), where))
    answers = engine.answer(documents, requests, spec.reuse, salt) if requests else []
    outputs = [
        answer.model_copy(update={"index": index, "question": wanted[index][0]})
        for answer, index in zip(answers, indices, strict=True)
    ]
    return Result.of(spec.type, engine.card.id, outputs, len(wanted))


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
