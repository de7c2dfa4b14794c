"""The tags that part a model's thinking from its answer: one pair for each way that templates write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Stage = Literal["before", "thinking", "answer"]
"""Where a text stands: before its first word, within the tags, or in the answer, where tags are text."""


@dataclass(frozen=True)
class ThinkingTags:
    open: str
    close: str
    answer: str = ""
    """What a model without anything to think about opens its answer with, if it has a sign for that."""


TAGS = (
    ThinkingTags("<think>", "</think>"),
    # Gemma 4
    ThinkingTags("<|channel>thought", "<channel|>"),
    # gpt-oss: channels of one message each. Whatever comes before the final one is not the answer.
    ThinkingTags(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        answer="<|channel|>final<|message|>",
    ),
    # Apriel, whose template writes the first of these itself
    ThinkingTags("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    # Magistral, Ministral 3
    ThinkingTags("[THINK]", "[/THINK]"),
    # Seed-OSS
    ThinkingTags("<seed:think>", "</seed:think>"),
    # MiniMax M3
    ThinkingTags("<mm:think>", "</mm:think>"),
    # Apertus
    ThinkingTags("<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkingTags("<longcat_think>", "</longcat_think>"),
    ThinkingTags("<|think:start|>", "<|think:end|>"),
)


def tags_of(template: str) -> ThinkingTags | None:
    """The pair that a template writes or looks for; None if it knows of no thinking."""
    return next((tags for tags in TAGS if tags.open in template and tags.close in template), None) or next(
        (tags for tags in TAGS if tags.open in template or tags.close in template), None
    )
