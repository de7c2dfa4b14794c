"""What is asked of the engine, one such request on its way through the phases, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jobs import Output, Timing, Usage
from kernels import BLOCK_TOKENS
from prompts import Prompt
from worker.engine.answer import Answer
from worker.engine.kv_cache import TAIL_TOKENS, blocks_end, whole_blocks
from worker.engine.report import Report
from worker.engine.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """One answer that is wanted."""

    instruction: str
    sampling: Sampling
    report: Report


@dataclass
class Work:
    """One request on its way through the phases; times by `time.perf_counter`."""

    prompt: Prompt
    request: Request
    cached_tokens: int = 0
    began: float = 0.0
    restored: float = 0.0
    prefilled: float = 0.0
    output: Output | None = None
    """None until its answer has ended."""

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the longest answer."""
        return len(self.prompt.tokens) + self.request.sampling.max_output_tokens

    @property
    def prefix_end(self) -> int:
        """The token behind the prefix's last block."""
        return blocks_end(whole_blocks(self.prompt.document_end))

    @property
    def num_behind(self) -> int:
        """The most tokens that can lie behind the prefix."""
        return self.num_tokens - self.prefix_end

    @property
    def num_spare(self) -> int:
        """Blocks that the instruction and the answer may fill behind the prefix, beyond the dense tail."""
        return -(-max(0, self.num_behind - TAIL_TOKENS) // BLOCK_TOKENS)

    def completed(self, answer: Answer, prefix: Literal["none", "exact", "continued"]) -> Output:
        assert answer.finish_reason is not None
        num_prompt = len(self.prompt.tokens)
        return Output(
            text=answer.text,
            thinking=answer.thinking,
            finish_reason=answer.finish_reason,
            usage=Usage(
                prompt_tokens=num_prompt,
                cached_tokens=self.cached_tokens,
                prefilled_tokens=num_prompt - self.cached_tokens,
                output_tokens=len(answer.tokens),
                drafted_tokens=answer.num_drafted,
                accepted_tokens=answer.num_accepted,
            ),
            timing=Timing(
                restore_s=self.restored - self.began,
                prefill_s=self.prefilled - self.restored,
                decode_s=answer.decode_s,
                time_to_first_token_s=answer.first_token_at - self.began,
            ),
            prefix=prefix,
        )


@dataclass(frozen=True)
class Warmed:
    """What was read for later."""

    prefix_id: str | None
    """The stored prefix; None where nothing is stored, for want of tokens, room or a store."""
    usage: Usage
    """Of the prefix."""
    timing: Timing
