"""Retry-After: the work ahead at the measured rate, between one second and sixty."""

import pytest

from gateway.retry_after import SAMPLES_MAX, WINDOW_S, DrainRate, retry_after_s


def test_the_rate_is_of_ends_within_the_window() -> None:
    rate = DrainRate()
    for second in range(5):
        rate.note(float(second))
        assert rate.per_second(float(second)) == (1.0 if second else None)
    assert rate.per_second(8.0) == 0.5
    assert rate.per_second(4.0 + WINDOW_S) is None


def test_a_flood_of_ends_is_bounded_and_the_rate_stays_true() -> None:
    rate = DrainRate()
    for tick in range(10 * SAMPLES_MAX):
        rate.note(tick / 100)
    assert rate.per_second((10 * SAMPLES_MAX - 1) / 100) == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("code", "per_second", "waiting", "seconds"),
    [
        ("overloaded", None, 50, 1),
        ("overloaded", 100.0, 0, 1),
        ("overloaded", 2.0, 9, 5),
        ("queue_timeout", 0.5, 3, 8),
        ("overloaded", 0.01, 0, 60),
        ("overloaded", 1e-9, 10**9, 60),
        ("stage_unavailable", 100.0, 0, 2),
        ("shutting_down", 0.01, 9, 2),
        ("slow_reader", None, 0, 1),
    ],
)
def test_retry_after(code: str, per_second: float | None, waiting: int, seconds: int) -> None:
    assert retry_after_s(code, per_second, waiting) == seconds
