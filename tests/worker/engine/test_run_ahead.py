"""Asking for steps before their tokens are read changes no answer and leaves nothing behind."""

import numpy as np
import pytest

from tests.worker.engine.conftest import BOOK
from worker.engine.answer import Answer
from worker.engine.decode import decode_answer
from worker.engine.engine import Document, Engine, Sampling
from worker.engine.prefill import prefill_suffix
from worker.engine.repetition import NumberTokens
from worker.engine.report import Silent
from worker.engine.speculate import DraftPolicy
from worker.engine.thinking import ThinkingSplitter

NO_DRAFTS = DraftPolicy(0)


@pytest.fixture(scope="module")
def answers(model):
    """For drafts or none, run ahead or not: an engine that answers so."""
    return {
        (drafts.longest, ahead): Engine(model, None, drafts=drafts, run_ahead=ahead)
        for drafts in (NO_DRAFTS, DraftPolicy(4))
        for ahead in (False, True)
    }


@pytest.mark.parametrize("longest", [0, 4])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(24),
        Sampling(24, temperature=1.0, seed=3),
        Sampling(24, repetition_penalty=1.2),
        Sampling(1),
        Sampling(2),
        Sampling(60, stop=("the",)),
    ],
    ids=["greedy", "sampled", "penalised", "one token", "two tokens", "stopped"],
)
def test_the_answer_is_the_same(answers, longest, sampling):
    document = [Document("book", BOOK[:1500])]
    texts = []
    for ahead in (False, True):
        output = answers[longest, ahead].generate(document, "Quote the first lines.", sampling, Silent())
        texts.append((output.text, output.usage.output_tokens, output.finish_reason))
    assert texts[0] == texts[1]
    assert texts[0][1] > 0


def test_a_step_too_many_is_forgotten(model):
    tokens = np.arange(300, 400, dtype=np.uint32)
    lengths = []
    for ahead in (False, True):
        # With and without the end that the model chooses, of which nothing may know when it is asked for.
        for eos in (frozenset(), frozenset(range(0, 49152, 2))):
            cache = model.new_cache()
            logits = prefill_suffix(model, cache, tokens, 0, Silent())
            numbers = NumberTokens(model.tokenizer)
            thinking = ThinkingSplitter("answer", None)
            answer = Answer(Sampling(12), model.tokenizer.detokenizer, numbers, eos, thinking, 0, Silent())
            answer.begin(logits)
            decode_answer(model, cache, answer, None, ahead)
            lengths.append((cache.num_tokens, answer.tokens))
    assert lengths[:2] == lengths[2:]
    assert lengths[0][0] == 100 + 12 - 1
