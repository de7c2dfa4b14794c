"""One model, ready to answer: restore → prefill → snapshot → decode reads like that here.

It knows no queue and no job; `worker.tasks` says what a job type asks of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cache_store import BlockKey, SnapshotStore
from jobs import ModelCard, Output, Timing, Usage
from kernels import BLOCK_TOKENS, disable_native
from kernels.self_test import attention_error
from worker.engine import model as model_loader
from worker.engine import snapshots
from worker.engine.decode import Sampling, decode_text
from worker.engine.errors import EngineError, Stopped
from worker.engine.kv_cache import KVCache, blocks_end
from worker.engine.memory import device_bytes, require_memory
from worker.engine.model import Model
from worker.engine.prefill import prefill_prefix, prefill_suffix
from worker.engine.prompt import Document, Prompt, PromptBuilder
from worker.engine.report import Report
from worker.engine.snapshots import Prefix

log = logging.getLogger("worker.engine")

MAX_KERNEL_ERROR = 0.01
"""Relative, against float32 on the same codes: float16 arithmetic stays ten times below it."""

__all__ = ["Document", "Engine", "EngineError", "Sampling", "Stopped"]


class Engine:
    """Owns the model, the KV of the last prefix and its use. One job at a time, in one thread."""

    def __init__(self, model: Model, store: SnapshotStore | None, memory_bytes: int | None = None) -> None:
        self._model = model
        self._memory_bytes = memory_bytes or device_bytes()
        self._store = store
        self._prompts = PromptBuilder(model.folder, model.tokenizer)
        self._cache: KVCache | None = None
        self._cached_keys: list[BlockKey] = []
        self._cache_is_exact = True

    @classmethod
    def load(
        cls, folder: Path, model_id: str, snapshots: SnapshotStore | None, memory_bytes: int | None = None
    ) -> Engine:
        """Load a model folder.

        Args:
            memory_bytes: what model and requests may take; the device's memory where None.

        Raises:
            EngineError: if the model cannot be served; the problem says why.
        """
        model = model_loader.load(folder, model_id, memory_bytes)
        _check_kernels(model.card)
        return cls(model, snapshots, memory_bytes)

    @property
    def card(self) -> ModelCard:
        return self._model.card

    def generate(
        self,
        documents: Sequence[Document],
        instruction: str,
        sampling: Sampling,
        report: Report,
        reuse: bool = True,
    ) -> Output:
        """Answer an instruction about documents.

        Args:
            reuse: whether known prefixes may be used and new ones kept.

        Raises:
            EngineError: `context_exceeded` if prompt and output together exceed the model's context,
                `memory_exceeded` if they are predicted to exceed the memory.
            Stopped: if the report says so.
        """
        began = time.perf_counter()
        prompt = self._prompts.build(documents, instruction)
        self._check_context(prompt, sampling)
        self._check_memory(prompt, sampling)
        prefix = Prefix(self.card.fingerprint, prompt.tokens[: prompt.document_end])
        num_spare = self._num_spare(prompt, sampling)
        try:
            cache, cached_tokens = self._restore(prefix, num_spare, reuse, report)
            restored = time.perf_counter()
            self._complete_prefix(cache, prefix, num_spare, reuse, report)
            logits = prefill_suffix(
                self._model, cache, prompt.tokens[cache.num_tokens :], cached_tokens, report
            )
            prefilled = time.perf_counter()
            answer = decode_text(self._model, cache, logits, sampling, cached_tokens, report)
        except BaseException:
            # A cache that was stopped half-way through a step is of no use to the next request.
            self._forget()
            raise
        done = time.perf_counter()
        cache.rewind(prefix.num_blocks)
        output = Output(
            text=answer.text.strip(),
            finish_reason=answer.finish_reason,
            usage=Usage(
                prompt_tokens=len(prompt.tokens),
                cached_tokens=cached_tokens,
                prefilled_tokens=len(prompt.tokens) - cached_tokens,
                output_tokens=len(answer.tokens),
            ),
            timing=Timing(
                restore_s=restored - began,
                prefill_s=prefilled - restored,
                decode_s=done - prefilled,
                time_to_first_token_s=answer.first_token_at - began,
            ),
            prefix=self._prefix_kind(prefix),
        )
        if not reuse:
            self._forget()
        return output

    def count_tokens(self, documents: Sequence[Document], instruction: str) -> int:
        """How many tokens the whole prompt has."""
        return len(self._prompts.build(documents, instruction).tokens)

    def _check_context(self, prompt: Prompt, sampling: Sampling) -> None:
        num_prompt, limit = len(prompt.tokens), self.card.context_tokens
        if num_prompt + sampling.max_output_tokens > limit:
            raise EngineError(
                "context_exceeded",
                f"The prompt has {num_prompt:,} tokens and the answer may have "
                f"{sampling.max_output_tokens:,}, but {self.card.id} has a context of {limit:,}; "
                "send a shorter document, ask for a shorter answer, or choose a model with a longer context.",
                prompt_tokens=num_prompt,
                max_output_tokens=sampling.max_output_tokens,
                context_tokens=limit,
            )

    def _check_memory(self, prompt: Prompt, sampling: Sampling) -> None:
        num_prompt = len(prompt.tokens)
        require_memory(
            self.card.id,
            self._model.config,
            num_prompt + sampling.max_output_tokens,
            self._memory_bytes,
            num_prompt - prompt.document_end,
        )

    @staticmethod
    def _num_spare(prompt: Prompt, sampling: Sampling) -> int:
        """Blocks that the instruction and the answer may fill behind the prefix."""
        num_behind = len(prompt.tokens) - prompt.document_end + sampling.max_output_tokens
        return num_behind // BLOCK_TOKENS + 2

    def _restore(self, prefix: Prefix, num_spare: int, reuse: bool, report: Report) -> tuple[KVCache, int]:
        """The cache with as much of the prefix as is known, and how many tokens that is."""
        model = self._model
        if reuse and prefix.num_blocks:
            in_memory = snapshots.num_common(self._cached_keys, prefix.keys)
            on_disk = self._store.match(prefix.keys, prefix.blocks) if self._store else 0
            if self._cache and in_memory and in_memory >= on_disk:
                self._cache.rewind(in_memory)
                self._cached_keys = prefix.keys[:in_memory]
                return self._cache, blocks_end(in_memory)
        else:
            on_disk = 0
        self._forget()
        cache = KVCache(len(model.layers), model.num_kv_heads, model.head_dim, model.dtype)
        num_read = 0
        if self._store and on_disk:
            num_read, exact = snapshots.restore(self._store, prefix, on_disk, cache, num_spare, report)
            self._cache_is_exact = exact
        self._cache, self._cached_keys = cache, prefix.keys[:num_read]
        return cache, blocks_end(num_read)

    def _complete_prefix(
        self, cache: KVCache, prefix: Prefix, num_spare: int, reuse: bool, report: Report
    ) -> None:
        """Prefill what of the prefix is not known yet, and store it."""
        num_known = cache.num_blocks
        if num_known == prefix.num_blocks:
            return
        if num_known:
            # The new blocks attend to decoded older ones.
            self._cache_is_exact = False
        prefill_prefix(self._model, cache, prefix.tokens, num_spare, report)
        self._cached_keys = prefix.keys
        if self._store and reuse:
            exact = self._cache_is_exact
            num_stored = snapshots.save(self._store, prefix, cache, num_known, exact, self.card.id)
            log.info("stored %d of %d new blocks", num_stored, prefix.num_blocks - num_known)

    def _prefix_kind(self, prefix: Prefix) -> Literal["none", "exact", "continued"]:
        if not prefix.num_blocks:
            return "none"
        return "exact" if self._cache_is_exact else "continued"

    def _forget(self) -> None:
        self._cache, self._cached_keys, self._cache_is_exact = None, [], True


def _check_kernels(card: ModelCard) -> None:
    """One small attention against the reference, which also builds what the first job would wait for.

    A device whose own kernels are wrong or don't compile is served by the plain ones, slowly but right.
    """
    error = _kernel_error(card)
    if not error < MAX_KERNEL_ERROR:
        log.warning("this device's own kernels fail their self-test (error %.2g): using plain ones", error)
        disable_native()
        error = _kernel_error(card)
    if not error < MAX_KERNEL_ERROR:
        raise EngineError(
            "kernel_self_test_failed",
            f"Attention on {card.device} differs from the reference by {error:.2g}, more than "
            f"{MAX_KERNEL_ERROR}; answers would be wrong. Please report this machine.",
            error=error,
            limit=MAX_KERNEL_ERROR,
        )


def _kernel_error(card: ModelCard) -> float:
    try:
        return attention_error(card.num_q_heads, card.num_kv_heads, card.head_dim)
    except RuntimeError:  # what MLX raises for a kernel that doesn't compile
        log.exception("the kernel self-test could not run")
        return float("inf")
