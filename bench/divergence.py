"""How far one model's next-token distributions are from another's, over the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROWS = 32
"""Distributions taken together: a whole vocabulary in float64 is large."""


@dataclass(frozen=True)
class Divergence:
    """Per scored token, (n,) each."""

    kl: np.ndarray
    """KL(exact || other) over the whole vocabulary, in nats."""
    flips: np.ndarray
    """Whether the most likely token is another one."""
    nll: np.ndarray
    """Of the text's own next token under the other distribution, in nats."""
    exact_nll: np.ndarray

    @classmethod
    def join(cls, parts: list[Divergence]) -> Divergence:
        names = ("kl", "flips", "nll", "exact_nll")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def summary(self) -> dict[str, float]:
        perplexity, exact = np.exp(self.nll.mean()), np.exp(self.exact_nll.mean())
        return {
            "kl_mean": float(self.kl.mean()),
            "kl_p99": float(np.quantile(self.kl, 0.99)),
            "flip_rate": float(self.flips.mean()),
            "perplexity": float(perplexity),
            "perplexity_delta": float(perplexity - exact),
            "num_tokens": len(self.kl),
        }


def divergence(exact: np.ndarray, other: np.ndarray, targets: np.ndarray) -> Divergence:
    """
    Args:
        exact, other: (n, vocab) logits, float32; computed in float64.
        targets: (n,) the token that the text has next.
    """
    parts = []
    for start in range(0, len(targets), _ROWS):
        some = slice(start, start + _ROWS)
        log_p, log_q = (_log_softmax(x[some]) for x in (exact, other))
        own = np.arange(len(log_p)), targets[some]
        parts.append(
            Divergence(
                kl=(np.exp(log_p) * (log_p - log_q)).sum(axis=1),
                flips=log_p.argmax(axis=1) != log_q.argmax(axis=1),
                nll=-log_q[own],
                exact_nll=-log_p[own],
            )
        )
    return Divergence.join(parts)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x
