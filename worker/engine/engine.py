"""One model, ready to answer: restore → prefill → snapshot → decode reads like that here.

It knows no queue and no job; `worker.tasks` says what a job type asks of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import mlx.core as mx
import platformdirs

from cache_store import BlockKey, SnapshotStore
from jobs import ModelCard, Output, Timing, Usage
from kernels import BLOCK_TOKENS, disable_native
from kernels.self_test import attention_error
from kernels.tuning import Shape, tune
from worker.engine import model as model_loader
from worker.engine import snapshots
from worker.engine.answer import Answer
from worker.engine.batch import MAX_ROWS, decode_batch, row_bytes, supports_batches
from worker.engine.checkpoints import DEFAULT_POLICY, Checkpoint, CheckpointPolicy, Pace, best_start
from worker.engine.decode import decode_answer
from worker.engine.errors import EngineError, Stopped
from worker.engine.kv_cache import TAIL_TOKENS, KVCache, blocks_end, whole_blocks
from worker.engine.memory import device_bytes, is_out_of_memory, require_memory
from worker.engine.model import Model
from worker.engine.prefill import num_prefix_layers, prefill_prefix, prefill_suffix
from worker.engine.prompt import Document, Prompt, PromptBuilder
from worker.engine.report import Report
from worker.engine.sampling import Sampling
from worker.engine.self_check import SelfCheck, Verify
from worker.engine.snapshots import Prefix
from worker.engine.speculate import Drafter, DraftPolicy, device_policy

log = logging.getLogger("worker.engine")

MAX_KERNEL_ERROR = 0.01
"""Relative, against float32 on the same codes: float16 arithmetic stays ten times below it."""

__all__ = ["Document", "Engine", "EngineError", "Request", "Sampling", "Stopped", "Warmed"]


@dataclass(frozen=True)
class Request:
    """One answer that is wanted."""

    instruction: str
    sampling: Sampling
    report: Report


@dataclass
class _Work:
    """One request on its way through the phases; times by `time.perf_counter`."""

    prompt: Prompt
    request: Request
    cached_tokens: int = 0
    began: float = 0.0
    restored: float = 0.0
    prefilled: float = 0.0

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

    def output(self, answer: Answer, prefix: Literal["none", "exact", "continued"]) -> Output:
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


class Engine:
    """Owns the model, the KV of the last prefix and its use. One job at a time, in one thread."""

    def __init__(
        self,
        model: Model,
        store: SnapshotStore | None,
        memory_bytes: int | None = None,
        drafts: DraftPolicy | None = None,
        run_ahead: bool | None = None,
        checkpoints: CheckpointPolicy = DEFAULT_POLICY,
        verify: Verify = "sample",
    ) -> None:
        """
        Args:
            drafts: how far to guess ahead; the device's policy where None.
            run_ahead: whether steps are asked for before their tokens are read; on a GPU where None.
            checkpoints: when a long prefill notes where it is.
            verify: which restored prefixes are checked against the logits that are kept with them.
        """
        self._model = model
        self._drafts = drafts or device_policy()
        self._runs_ahead = mx.default_device() != mx.Device(mx.cpu) if run_ahead is None else run_ahead
        self._memory_bytes = memory_bytes or device_bytes()
        self._store, self._checkpoints = store, checkpoints
        self._check = SelfCheck(model, store, verify) if store else None
        self._prompts = PromptBuilder(model.folder, model.tokenizer)
        self._cache: KVCache | None = None
        self._cached_keys: list[BlockKey] = []
        self._cache_is_exact = True
        self._is_stored = False
        """Whether all that the cache holds of a prefix was put on disk, or came from there."""

    @classmethod
    def load(
        cls,
        folder: Path,
        model_id: str,
        snapshots: SnapshotStore | None,
        memory_bytes: int | None = None,
        verify: Verify = "sample",
    ) -> Engine:
        """Load a model folder.

        Args:
            memory_bytes: what model and requests may take; the device's memory where None.
            verify: as for the engine.

        Raises:
            EngineError: if the model cannot be served; the problem says why.
        """
        model = model_loader.load(folder, model_id, memory_bytes)
        _check_kernels(model.card)
        card = model.card
        shape = Shape(card.num_q_heads, card.num_kv_heads, card.head_dim)
        tune(shape, platformdirs.user_cache_path("longleaf") / "tuning")
        return cls(model, snapshots, memory_bytes, verify=verify)

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
        salt: bytes = b"",
    ) -> Output:
        """Answer an instruction about documents.

        Args:
            reuse: whether known prefixes may be used and new ones kept.
            salt: whose prefixes; those of another salt are neither found nor timed.

        Raises:
            EngineError: `context_exceeded` if prompt and output together exceed the model's context,
                `memory_exceeded` if they are predicted to exceed the memory.
            Stopped: if the report says so.
        """
        return self.answer(documents, [Request(instruction, sampling, report)], reuse, salt)[0]

    def answer(
        self,
        documents: Sequence[Document],
        requests: Sequence[Request],
        reuse: bool = True,
        salt: bytes = b"",
    ) -> list[Output]:
        """Answer many instructions about the same documents, as many at a time as the memory allows.

        Args:
            reuse: whether known prefixes may be used and new ones kept.
            salt: whose prefixes; those of another salt are neither found nor timed.

        Raises:
            EngineError: as `generate`, for any of them before work on the first begins.
            Stopped: if a report says so; all answers are given up.
        """
        prompts = [self._prompts.build(documents, r.instruction, r.sampling.thinking) for r in requests]
        works = [_Work(prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
        for work in works:
            self._check_context(work)
            self._check_memory(work)
        outputs: list[Output] = []
        with self._whole_or_forgotten(works):
            for group in self._groups(works):
                outputs += self._answer_group(group, reuse, salt)
        if not reuse:
            self._forget()
        return outputs

    def warm(
        self, documents: Sequence[Document], report: Report, thinking: bool = False, salt: bytes = b""
    ) -> Warmed:
        """Read documents as `answer` does, and store their prefix for whatever is asked about them.

        Args:
            thinking: as what is asked will have it, where the template says it before the documents.
            salt: whose prefix.

        Raises:
            EngineError, Stopped: as `generate`.
        """
        prompt = self._prompts.build(documents, "", thinking)
        work = _Work(prompt, Request("", Sampling(max_output_tokens=0, thinking=thinking), report))
        self._check_context(work)
        self._check_memory(work)
        prefix = Prefix(self.card.fingerprint, prompt.head, salt, self._store)
        with self._whole_or_forgotten([work]):
            began = time.perf_counter()
            cache, num_cached = self._restore(prefix, work.num_spare, True, report)
            restored = time.perf_counter()
            self._complete_prefix(cache, prefix, work.num_spare, True, report)
        is_kept = prefix.num_blocks and self._is_stored
        num_tokens = len(prefix.tokens)
        return Warmed(
            prefix_id=prefix.keys[-1].hex if is_kept else None,
            usage=Usage(
                prompt_tokens=num_tokens, cached_tokens=num_cached, prefilled_tokens=num_tokens - num_cached
            ),
            timing=Timing(restore_s=restored - began, prefill_s=time.perf_counter() - restored),
        )

    @contextmanager
    def _whole_or_forgotten(self, works: Sequence[_Work]) -> Iterator[None]:
        """A cache that was stopped half-way through a step is of no use to the next request."""
        try:
            yield
        except BaseException as error:
            self._forget()
            mx.clear_cache()
            if is_out_of_memory(error):
                raise self._out_of_memory(works, error) from error
            raise

    def _groups(self, works: Sequence[_Work]) -> list[list[_Work]]:
        """Neighbours that share a prefix and fit into dense tails, together; any other by itself."""
        groups: list[list[_Work]] = []
        able = supports_batches(self._model.config)
        kind_before = None
        for work in works:
            # The same documents are the same prefix, but for what a template says of thinking before them.
            kind = work.request.sampling.thinking if able and work.num_behind <= TAIL_TOKENS else None
            if kind is not None and kind == kind_before:
                groups[-1].append(work)
            else:
                groups.append([work])
            kind_before = kind
        return groups

    def _answer_group(self, group: Sequence[_Work], reuse: bool, salt: bytes) -> list[Output]:
        """Restore → prefill the prefix → for each: prefill what follows, decode."""
        model, first = self._model, group[0]
        prefix = Prefix(self.card.fingerprint, first.prompt.head, salt, self._store)
        num_spare = max(work.num_spare for work in group)
        first.began = time.perf_counter()
        cache, first.cached_tokens = self._restore(prefix, num_spare, reuse, first.request.report)
        first.restored = time.perf_counter()
        self._complete_prefix(cache, prefix, num_spare, reuse, first.request.report)
        rest = first.prompt.head[cache.num_tokens :]
        if len(group) > 1 and len(rest):
            # The end of the document that fills no block is the same for all too.
            prefill_suffix(model, cache, rest, first.cached_tokens, first.request.report)
        for work in group[1:]:
            work.cached_tokens = cache.num_tokens

        def begin(work: _Work) -> Answer:
            work.began = work.began or time.perf_counter()
            work.restored = work.restored or work.began
            report, num_cached = work.request.report, work.cached_tokens
            tokens = work.prompt.tokens[cache.num_tokens :]
            logits = prefill_suffix(model, cache, tokens, num_cached, report)
            work.prefilled = time.perf_counter()
            answer = Answer(
                work.request.sampling,
                model.tokenizer.detokenizer,
                model.eos_token_ids,
                work.prompt.stage,
                num_cached,
                report,
            )
            answer.begin(logits)
            return answer

        if len(group) == 1:
            answers = [begin(first)]
            policy = self._drafts
            drafter = Drafter(first.prompt.tokens, policy) if policy.longest else None
            decode_answer(model, cache, answers[0], drafter, self._runs_ahead)
        else:
            steps: list[Callable[[], Answer]] = [partial(begin, work) for work in group]
            answers = decode_batch(model, cache, steps, self._max_rows(group, cache))
        cache.rewind(prefix.num_blocks)
        kind = self._prefix_kind(prefix)
        return [work.output(answer, kind) for work, answer in zip(group, answers, strict=True)]

    def _max_rows(self, group: Sequence[_Work], cache: KVCache) -> int:
        """How many answers fit into the memory at a time, beside what one needs."""
        longest = max(group, key=lambda work: work.num_behind)
        free = self._check_memory(longest)
        per_row = row_bytes(cache, longest.num_behind)
        return max(1, min(MAX_ROWS, free // per_row))

    def count_tokens(self, documents: Sequence[Document], instruction: str) -> int:
        """How many tokens the whole prompt has."""
        return len(self._prompts.build(documents, instruction).tokens)

    def _check_context(self, work: _Work) -> None:
        num_prompt, sampling, limit = len(work.prompt.tokens), work.request.sampling, self.card.context_tokens
        if work.num_tokens > limit:
            raise EngineError(
                "context_exceeded",
                f"The prompt has {num_prompt:,} tokens and the answer may have "
                f"{sampling.max_output_tokens:,}, but {self.card.id} has a context of {limit:,}; "
                "send a shorter document, ask for a shorter answer, or choose a model with a longer context.",
                prompt_tokens=num_prompt,
                max_output_tokens=sampling.max_output_tokens,
                context_tokens=limit,
            )

    def _out_of_memory(self, works: Sequence[_Work], error: BaseException) -> EngineError:
        num_tokens = max(work.num_tokens for work in works)
        return EngineError(
            "out_of_memory",
            f"The device ran out of memory at {num_tokens:,} tokens of prompt and answer ({error}), although "
            f"they were predicted to fit into {self._memory_bytes / 1e9:.2f} GB. Free memory that other "
            "programs hold, set LONGLEAF_MEMORY_BYTES to what is left, or send a shorter document.",
            num_tokens=num_tokens,
            limit_bytes=self._memory_bytes,
        )

    def _check_memory(self, work: _Work) -> int:
        """Bytes that stay free beside this request."""
        return require_memory(
            self.card.id,
            self._model.config,
            work.num_tokens,
            self._memory_bytes,
            len(work.prompt.tokens) - work.prefix_end,
            work.request.sampling.max_output_tokens,
        )

    def _restore(self, prefix: Prefix, num_spare: int, reuse: bool, report: Report) -> tuple[KVCache, int]:
        """The cache with as much of the prefix as is known, and how many tokens that is."""
        model = self._model
        if self._is_deleted():
            self._forget()
        if reuse and prefix.num_blocks:
            in_memory = snapshots.num_common(self._cached_keys, prefix.keys)
            windows = any(shape.window for shape in model.shapes)
            on_disk = snapshots.num_restorable(self._store, prefix, windows) if self._store else 0
            if self._store and max(in_memory, on_disk) < prefix.num_blocks:
                num_layers = num_prefix_layers(model.new_cache())
                start = best_start(self._store, prefix, max(in_memory, on_disk), num_layers)
                in_memory, on_disk = min(in_memory, start), min(on_disk, start)
            if self._cache and in_memory and in_memory >= on_disk and self._cache.can_rewind(in_memory):
                self._cache.rewind(in_memory)
                self._cached_keys = prefix.keys[:in_memory]
                return self._cache, blocks_end(in_memory)
        else:
            on_disk = 0
        self._forget()
        cache = model.new_cache()
        num_read = 0
        if self._store and on_disk:
            num_read, exact = snapshots.restore(self._store, prefix, on_disk, cache, num_spare, report)
            self._cache_is_exact = exact
            if num_read and self._check and not self._check.passes(prefix, cache, num_read):
                self._cache_is_exact, num_read, cache = True, 0, model.new_cache()
        self._cache, self._cached_keys = cache, prefix.keys[:num_read]
        self._is_stored = num_read > 0
        return cache, blocks_end(num_read)

    def _complete_prefix(
        self, cache: KVCache, prefix: Prefix, num_spare: int, reuse: bool, report: Report
    ) -> None:
        """Prefill what of the prefix is not known yet, and store it."""
        num_known = cache.num_blocks
        if num_known == prefix.num_blocks:
            return
        checkpoint = None
        if self._store and reuse:
            # The device's own rounding must not change half-way, nor what the new blocks attend to.
            about = {
                "model": self.card.id,
                "device": self.card.device,
                "known_exact": self._cache_is_exact,
            }
            checkpoint = Checkpoint(self._store, prefix, num_known, about, Pace(self._checkpoints))
        if num_known:
            # The new blocks attend to decoded older ones.
            self._cache_is_exact = False
        prefill_prefix(self._model, cache, prefix.tokens, num_spare, report, checkpoint)
        self._cached_keys = prefix.keys
        if self._store and checkpoint:
            exact, spent_s = self._cache_is_exact, checkpoint.spent_s
            num_stored = snapshots.save(self._store, prefix, cache, num_known, exact, self.card.id, spent_s)
            checkpoint.remove()
            self._is_stored = num_known + num_stored == prefix.num_blocks
            if self._check and self._is_stored:
                self._check.keep(prefix, cache, exact)
            log.info("stored %d of %d new blocks", num_stored, prefix.num_blocks - num_known)

    def _prefix_kind(self, prefix: Prefix) -> Literal["none", "exact", "continued"]:
        if not prefix.num_blocks:
            return "none"
        return "exact" if self._cache_is_exact else "continued"

    def _is_deleted(self) -> bool:
        """Whether the prefix in memory lay on disk and is gone: who deletes one means this copy too."""
        return bool(self._store and self._is_stored and self._store.info(self._cached_keys[-1]) is None)

    def _forget(self) -> None:
        self._cache, self._cached_keys, self._cache_is_exact, self._is_stored = None, [], True, False


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
