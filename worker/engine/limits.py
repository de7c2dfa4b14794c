"""What a request may take of a model's context and of the memory, and the refusals of what exceeds it."""

from __future__ import annotations

from collections.abc import Sequence

from worker.engine.errors import EngineError
from worker.engine.memory import device_bytes, require_memory
from worker.engine.model import Model
from worker.engine.work import Work


class Limits:
    """Those of one model on this device."""

    def __init__(self, model: Model, memory_bytes: int | None) -> None:
        """
        Args:
            memory_bytes: what model and requests may take; what the device may use where None.
        """
        self._model = model
        self._memory_bytes = memory_bytes or device_bytes()

    def require_context(self, work: Work) -> None:
        """
        Raises:
            EngineError: `context_exceeded` if prompt and answer together exceed the model's context.
        """
        num_prompt, sampling, limit = (
            len(work.prompt.tokens),
            work.request.sampling,
            self._model.card.context_tokens,
        )
        if work.num_tokens > limit:
            raise EngineError(
                "context_exceeded",
                f"The prompt has {num_prompt:,} tokens and the answer may have "
                f"{sampling.max_output_tokens:,}, but {self._model.card.id} has a context of {limit:,}; "
                "send a shorter document, ask for a shorter answer, or choose a model with a longer context.",
                prompt_tokens=num_prompt,
                max_output_tokens=sampling.max_output_tokens,
                context_tokens=limit,
            )

    def require_memory(self, work: Work) -> int:
        """The bytes that stay free beside this request.

        Raises:
            EngineError: `memory_exceeded` if it is predicted not to fit.
        """
        return require_memory(
            self._model.card.id,
            self._model.config,
            work.num_tokens,
            self._memory_bytes,
            len(work.prompt.tokens) - work.prefix_end,
            work.request.sampling.max_output_tokens,
        )

    def out_of_memory(self, works: Sequence[Work], error: BaseException) -> EngineError:
        """What to say where the device ran out although all was predicted to fit."""
        num_tokens = max(work.num_tokens for work in works)
        return EngineError(
            "out_of_memory",
            f"The device ran out of memory at {num_tokens:,} tokens of prompt and answer ({error}), although "
            f"they were predicted to fit into {self._memory_bytes / 1e9:.2f} GB. Free memory that other "
            "programs hold, set LONGLEAF_MEMORY_BYTES to what is left, or send a shorter document.",
            num_tokens=num_tokens,
            limit_bytes=self._memory_bytes,
        )
