"""One model, ready to answer: restore → prefill → snapshot → decode reads like that here.

It knows no queue and no job; `worker.tasks` says what a job type asks of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import mlx.core as mx
import platformdirs

from cache_store import SnapshotStore
from jobs import ModelCard, Output, Timing, Usage
from kernels.tuning import Shape, tune
from prompts import Document
from worker.engine import model as model_loader
from worker.engine.answer import Answer
from worker.engine.batch import MAX_ROWS, decode_batch, row_bytes, supports_batches
from worker.engine.checkpoints import DEFAULT_POLICY, CheckpointPolicy
from worker.engine.decode import decode_answer
from worker.engine.errors import EngineError, Stopped
from worker.engine.held_prefix import HeldPrefix
from worker.engine.kernel_check import check_kernels
from worker.engine.kv_cache import TAIL_TOKENS, KVCache
from worker.engine.limits import Limits
from worker.engine.memory import is_out_of_memory
from worker.engine.model import Model
from worker.engine.prefill import prefill_suffix
from worker.engine.repetition import NumberTokens
from worker.engine.report import Report
from worker.engine.sampling import Sampling
from worker.engine.self_check import Verify
from worker.engine.snapshots import Prefix
from worker.engine.speculate import Drafter, DraftPolicy, device_policy
from worker.engine.thinking import ThinkingSplitter
from worker.engine.work import Request, Warmed, Work

__all__ = ["Document", "Engine", "EngineError", "Request", "Sampling", "Stopped", "Warmed"]


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
        self._limits = Limits(model, memory_bytes)
        self._store = store
        self._held = HeldPrefix(model, store, checkpoints, verify)
        self._prompts = model.prompts
        self._numbers = NumberTokens(model.tokenizer)

    @classmethod
    def load(
        cls,
        folder: Path,
        model_id: str,
        snapshots: SnapshotStore | None,
        memory_bytes: int | None = None,
        verify: Verify = "sample",
        unverified: bool = False,
    ) -> Engine:
        """Load a model folder.

        Args:
            memory_bytes: what model and requests may take; what the device may use where None.
            verify: as for the engine.
            unverified: take an architecture that nobody has verified, if it computes what mlx_lm's does.

        Raises:
            EngineError: if the model cannot be served; the problem says why.
        """
        model = model_loader.load(folder, model_id, memory_bytes, unverified)
        check_kernels(model)
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
        works = [Work(prompt, request) for prompt, request in zip(prompts, requests, strict=True)]
        for work in works:
            self._limits.require_context(work)
            self._limits.require_memory(work)
        outputs: list[Output] = []
        with self._whole_or_forgotten(works):
            for group in self._groups(works):
                outputs += self._answer_group(group, reuse, salt)
        if not reuse:
            self._held.forget()
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
        work = Work(prompt, Request("", Sampling(max_output_tokens=0, thinking=thinking), report))
        self._limits.require_context(work)
        self._limits.require_memory(work)
        prefix = Prefix(self.card.fingerprint, prompt.head, salt, self._store)
        with self._whole_or_forgotten([work]):
            began = time.perf_counter()
            cache, num_cached = self._held.restore(prefix, work.num_spare, True, report)
            restored = time.perf_counter()
            self._held.complete(cache, prefix, work.num_spare, True, report)
        is_kept = prefix.num_blocks and self._held.is_stored
        num_tokens = len(prefix.tokens)
        return Warmed(
            prefix_id=prefix.keys[-1].hex if is_kept else None,
            usage=Usage(
                prompt_tokens=num_tokens, cached_tokens=num_cached, prefilled_tokens=num_tokens - num_cached
            ),
            timing=Timing(restore_s=restored - began, prefill_s=time.perf_counter() - restored),
        )

    @contextmanager
    def _whole_or_forgotten(self, works: Sequence[Work]) -> Iterator[None]:
        """A cache that was stopped half-way through a step is of no use to the next request."""
        try:
            yield
        except BaseException as error:
            self._held.forget()
            mx.clear_cache()
            if is_out_of_memory(error):
                raise self._limits.out_of_memory(works, error) from error
            raise

    def _groups(self, works: Sequence[Work]) -> list[list[Work]]:
        """Neighbours that share a prefix and fit into dense tails, together; any other by itself."""
        groups: list[list[Work]] = []
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

    def _answer_group(self, group: Sequence[Work], reuse: bool, salt: bytes) -> list[Output]:
        """Restore → prefill the prefix → for each: prefill what follows, decode."""
        model, first = self._model, group[0]
        prefix = Prefix(self.card.fingerprint, first.prompt.head, salt, self._store)
        num_spare = max(work.num_spare for work in group)
        first.began = time.perf_counter()
        cache, first.cached_tokens = self._held.restore(prefix, num_spare, reuse, first.request.report)
        first.restored = time.perf_counter()
        self._held.complete(cache, prefix, num_spare, reuse, first.request.report)
        rest = first.prompt.head[cache.num_tokens :]
        if len(group) > 1 and len(rest):
            # The end of the document that fills no block is the same for all too.
            prefill_suffix(model, cache, rest, first.cached_tokens, first.request.report)
        for work in group[1:]:
            work.cached_tokens = cache.num_tokens

        def begin(work: Work) -> Answer:
            work.began = work.began or time.perf_counter()
            work.restored = work.restored or work.began
            report, num_cached = work.request.report, work.cached_tokens
            tokens = work.prompt.tokens[cache.num_tokens :]
            logits = prefill_suffix(model, cache, tokens, num_cached, report)
            work.prefilled = time.perf_counter()
            answer = Answer(
                work.request.sampling,
                model.tokenizer.detokenizer,
                self._numbers,
                model.eos_token_ids,
                ThinkingSplitter(work.prompt.stage, model.prompts.tags),
                num_cached,
                report,
            )
            answer.begin(logits)
            begun[id(answer)] = work
            return answer

        def end(answer: Answer) -> None:
            work = begun[id(answer)]
            work.output = work.completed(answer, kind)
            work.request.report.done(work.output)

        kind = self._held.kind(prefix)
        begun: dict[int, Work] = {}
        if len(group) == 1:
            answer = begin(first)
            policy = self._drafts
            drafter = Drafter(first.prompt.tokens, policy) if policy.longest else None
            decode_answer(model, cache, answer, drafter, self._runs_ahead)
            end(answer)
        else:
            steps: list[Callable[[], Answer]] = [partial(begin, work) for work in group]
            decode_batch(model, cache, steps, self._max_rows(group, cache), end)
        cache.rewind(prefix.num_blocks)
        return [work.output for work in group if work.output is not None]

    def _max_rows(self, group: Sequence[Work], cache: KVCache) -> int:
        """How many answers fit into the memory at a time, beside what one needs."""
        longest = max(group, key=lambda work: work.num_behind)
        free = self._limits.require_memory(longest)
        per_row = row_bytes(cache, longest.num_behind)
        return max(1, min(MAX_ROWS, free // per_row))
