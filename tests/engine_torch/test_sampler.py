"""One token from one row: greedy, top_k, top_p and a uniform number keyed by seed and position."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import limits
from schemas.envelope import Sampling
from workers.engine.sampler import LOGPROB_MIN, draw, logprobs, uniform

Row = npt.NDArray[np.float32]


def row(*values: float) -> Row:
    return np.array(values, dtype=np.float32)


def sampling(**fields: object) -> Sampling:
    return Sampling.model_validate({"seed": 1, **fields})


def draws(logits: Row, settings: Sampling, count: int) -> list[int]:
    found = [draw(logits, settings, position) for position in range(count)]
    assert None not in found
    return [token for token in found if token is not None]


def random_row(seed: int, size: int = 300) -> Row:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    """Ties are broken by id, so that a replay takes the same."""
    assert draw(row(1, 5, 5, 2), sampling(temperature=0), 9) == 1


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_draws_nothing(broken: float, temperature: float) -> None:
    """Garbage is reported, not sampled."""
    assert draw(row(1, broken, 3), sampling(temperature=temperature), 0) is None


def test_a_row_without_any_chance_draws_nothing() -> None:
    """All minus infinity."""
    assert draw(row(*[-np.inf] * 3), sampling(), 0) is None


def test_the_uniform_number_is_fixed_for_good() -> None:
    """Literal values: another hash would change every stored answer's replay."""
    assert uniform(0, 0) == 0.6524484863740322
    assert uniform(2**63 - 1, 8191) == 0.1938790607630959


def test_the_uniform_number_is_uniform() -> None:
    """Mean and spread over positions of a seed and over seeds at a position, and neighbours unrelated."""
    for numbers in ([uniform(3, p) for p in range(4000)], [uniform(s, 3) for s in range(4000)]):
        values = np.array(numbers)
        assert abs(values.mean() - 0.5) < 0.02
        assert abs(values.std() - 12**-0.5) < 0.01
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.05


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31))
def test_the_uniform_number_is_below_one(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


def test_draws_follow_the_probabilities() -> None:
    """4000 draws from three tokens, at two temperatures."""
    for temperature, expected in ((1.0, (0.5, 0.3, 0.2)), (0.5, (0.658, 0.237, 0.105))):
        logits = np.log(row(0.5, 0.3, 0.2))
        counts = np.bincount(draws(logits, sampling(temperature=temperature), 4000), minlength=3)
        assert np.allclose(counts / 4000, expected, atol=0.03)


def test_top_k_and_top_p_draw_in_proportion() -> None:
    """What is kept keeps its odds: 0.4 to 0.3 of a nucleus of two."""
    logits = np.log(row(0.1, 0.4, 0.2, 0.3))
    for settings in (sampling(top_p=0.65), sampling(top_k=2)):
        counts = np.bincount(draws(logits, settings, 4000), minlength=4)
        assert np.allclose(counts / 4000, (0, 4 / 7, 0, 3 / 7), atol=0.03)


@given(st.integers(0, 10**6), st.integers(1, 400), st.integers(0, 10**6))
def test_top_k_keeps_the_k_largest(seed: int, count: int, position: int) -> None:
    """The drawn token is among the k largest; of one, it is the greedy one."""
    logits = random_row(seed)
    token = draw(logits, sampling(top_k=count, temperature=2.0), position)
    assert token in np.argsort(-logits, kind="stable")[:count]


@given(st.integers(0, 10**6), st.floats(0.01, 1.0), st.integers(0, 10**6), st.sampled_from([None, 5, 50]))
def test_top_p_keeps_the_fewest_that_reach_p(seed: int, share: float, position: int, count: int | None) -> None:
    """Against the definition, written out with a sort of everything."""
    logits = random_row(seed)
    order = np.argsort(-logits, kind="stable")[:count]
    chances = np.exp(logits[order].astype(np.float64))
    chances /= chances.sum()
    kept = int(np.searchsorted(np.cumsum(chances), share - 1e-5)) + 2  # rounding may keep one more
    assert draw(logits, sampling(top_p=share, top_k=count), position) in order[:kept]


def test_equal_logits_at_the_edge_of_top_k_keep_the_lowest_ids() -> None:
    """Four equals, two kept."""
    assert set(draws(row(1, 1, 1, 1), sampling(top_k=2), 200)) == {0, 1}


def test_a_tiny_top_p_is_greedy() -> None:
    """The most likely token alone reaches it."""
    logits = random_row(4)
    assert set(draws(logits, sampling(top_p=1e-6), 50)) == {int(logits.argmax())}


@given(st.integers(0, 10**6), st.sampled_from([{}, {"top_k": 7}, {"top_p": 0.8}, {"temperature": 0.0}]))
def test_a_row_draws_the_same_wherever_it_lies(seed: int, fields: dict[str, object]) -> None:
    """In an array of its own, and as row 3 of a batch at an odd address."""
    logits = random_row(seed, 333)
    batch = np.empty((5, 333), np.float32)
    batch[:] = 7.0
    batch[3] = logits
    settings = sampling(**fields)
    assert draw(batch[3], settings, seed) == draw(logits, settings, seed)


def test_impossible_tokens_are_never_drawn() -> None:
    """Minus infinity has no chance, at the ends neither."""
    logits = row(-np.inf, 0, -np.inf, 0, -np.inf)
    for settings in (sampling(), sampling(top_k=5), sampling(top_p=0.999)):
        assert set(draws(logits, settings, 300)) == {1, 3}


GREEDY = {"temperature": 0}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 0),
        ({"presence_penalty": 1.5}, 1),  # 0: 3 - 1.5
        ({"presence_penalty": 0.5}, 0),
        ({"frequency_penalty": 0.6}, 1),  # 0 was said twice: 3 - 1.2
        ({"frequency_penalty": 0.4}, 0),
        ({"repetition_penalty": 2.0}, 2),  # 0: 3 / 2; 1, in the prompt: 2 / 2; 2: 1.75
        ({"repetition_penalty": 2.0, "presence_penalty": -1.0}, 0),  # 3 / 2 + 1
        ({"logit_bias": ((3, 4.5),)}, 3),
        ({"logit_bias": ((0, -100.0), (1, -100.0))}, 2),
        ({"logit_bias": ((0, -100.0),), "presence_penalty": 2.0}, 1),
    ],
)
def test_penalties_and_biases_change_the_greedy_choice(fields: dict[str, object], expected: int) -> None:
    """By hand: presence and frequency count the answer alone, repetition the prompt too, a bias is added first."""
    logits = row(3, 2, 1.75, -1)
    assert draw(logits, sampling(**GREEDY, **fields), 5, (1, 1, 1), (0, 0)) == expected
    assert logits.tolist() == [3, 2, 1.75, -1]


def test_a_repetition_penalty_makes_negative_logits_smaller() -> None:
    """Division would favour them: -1 becomes -2, below -1.5."""
    assert draw(row(-1, -1.5), sampling(**GREEDY, repetition_penalty=2.0), 1, (0,), ()) == 1


@given(st.integers(0, 10**6), st.floats(0.01, 1.0), st.integers(0, 10**6), st.sampled_from([1.0, 0.7]))
def test_min_p_keeps_what_is_likely_enough(seed: int, share: float, position: int, top_p: float) -> None:
    """Against the definition: at least that share of the likeliest token's probability."""
    logits = random_row(seed)
    token = draw(logits, sampling(min_p=share, top_p=top_p), position)
    assert token is not None
    assert np.exp(logits[token] - logits.max()) >= share * (1 - 1e-5)


def test_min_p_of_one_is_greedy() -> None:
    """Only the likeliest is as likely as itself."""
    logits = random_row(4)
    assert set(draws(logits, sampling(min_p=1.0), 50)) == {int(logits.argmax())}


@pytest.mark.parametrize("penalty", [limits.REPETITION_PENALTY_MIN, limits.REPETITION_PENALTY_MAX])
def test_no_setting_that_a_client_may_send_breaks_a_draw(penalty: float) -> None:
    """Everything at its bounds, over large logits."""
    fields = {
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "logit_bias": tuple((i, 100.0) for i in range(300)),
        "min_p": 1e-6,
    }
    settings = sampling(repetition_penalty=penalty, temperature=1e-3, **fields)
    assert draw(random_row(3) * np.float32(1e4), settings, 3, range(300), [7] * 10_000) in range(300)


def test_logprobs_are_the_log_softmax_of_the_raw_row() -> None:
    """The drawn token first, then the likeliest; the lowest ids first among equals."""
    found = logprobs(np.log(row(0.25, 0.125, 0.5, 0.125)), 0, 4)
    assert [number for number, _ in found] == [0, 2, 0, 1, 3]
    assert np.allclose([value for _, value in found], np.log([0.25, 0.5, 0.25, 0.125, 0.125]), atol=1e-6)
    assert logprobs(row(-np.inf, 0), 0, 0) == ((0, LOGPROB_MIN),)
