"""Which token is chosen, from logits that a test can read."""

import mlx.core as mx
import pytest

from worker.engine.sampling import Sampler, Sampling

LOGITS = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]]))


def chosen(tokens=(), logits=LOGITS, **options):
    return Sampler(Sampling(8, **options)).choose(logits, list(tokens)).item()


def drawn(num_draws=400, **options):
    """How often each token is drawn."""
    sampler = Sampler(Sampling(8, temperature=1.0, seed=3, **options))
    draws = [sampler.choose(LOGITS, [0] * n).item() for n in range(num_draws)]
    return [draws.count(token) / num_draws for token in range(4)]


def test_temperature_zero_takes_the_likeliest():
    assert chosen() == 0
    assert chosen(seed=5, top_k=2, min_p=0.5) == 0


def test_draws_follow_the_distribution():
    shares = drawn()
    for share, p in zip(shares, (0.5, 0.3, 0.15, 0.05), strict=True):
        assert abs(share - p) < 0.08, shares


@pytest.mark.parametrize(
    ("filters", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 4}, {0, 1, 2, 3}),
        ({"top_k": 1000}, {0, 1, 2, 3}),
        ({"min_p": 0.25}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.9, "top_k": 2}, {0, 1}),
    ],
)
def test_filters_leave_only_the_likely(filters, possible):
    shares = drawn(**filters)
    assert {token for token, share in enumerate(shares) if share} == possible


def test_a_draw_depends_on_seed_and_place_alone():
    sampling = Sampling(8, temperature=1.0, seed=7)
    alone = [Sampler(sampling).choose(LOGITS, [0] * n).item() for n in range(20)]
    mx.random.seed(99)
    sampler = Sampler(sampling)
    backwards = [sampler.choose(LOGITS, [0] * n).item() for n in reversed(range(20))]
    assert alone == backwards[::-1]
    assert len(set(alone)) > 1
    other = Sampler(Sampling(8, temperature=1.0, seed=8))
    assert alone != [other.choose(LOGITS, [0] * n).item() for n in range(20)]


def test_without_a_seed_two_answers_differ():
    def draws():
        sampler = Sampler(Sampling(8, temperature=1.0))
        return [sampler.choose(mx.zeros((1, 1000)), [0] * n).item() for n in range(8)]

    assert draws() != draws()


def test_penalties_move_the_choice_away_from_what_was_said():
    assert chosen([0, 3], repetition_penalty=2.0) == 1
    assert chosen([0], presence_penalty=0.6) == 1
    assert chosen([0, 0, 0], presence_penalty=0.4) == 0
    assert chosen([0, 0, 0], frequency_penalty=0.4) == 1
    assert chosen([0], frequency_penalty=0.4) == 0
    assert chosen([1], presence_penalty=-1.0) == 1


def test_the_repetition_penalty_forgets_and_the_others_do_not():
    long_ago = [0] + [3] * 64
    assert chosen(long_ago, repetition_penalty=2.0) == 0
    assert chosen(long_ago, presence_penalty=0.6) == 1
