"""How many threads a step runs on, on made-up machines."""

from collections.abc import Callable

from workers.engine.model.pace import Pace

Machine = Callable[[int, int], float]  # seconds of a step, by its number and its threads


def steps(pace: Pace, machine: Machine, count: int, rows: int = 8) -> list[int]:
    """Runs steps; the thread counts that were chosen."""
    chosen = []
    for number in range(count):
        threads = pace.choose(rows)
        pace.record(rows, 1000, threads, machine(number, threads))
        chosen.append(threads)
    return chosen


def test_every_count_is_tried_then_the_fastest_kept() -> None:
    """Two threads help: all first, one once, then two but for a few tries."""
    chosen = steps(Pace((1, 2)), lambda number, threads: 0.04 / threads, 1000)
    assert chosen[:3] == [2, 1, 2]
    assert chosen.count(1) <= 1 + 6


def test_one_thread_is_kept_where_two_hold_each_other_up() -> None:
    """A busy neighbour from the beginning."""
    chosen = steps(Pace((1, 2)), lambda number, threads: (0.04, 0.4)[threads - 1], 1000)
    assert chosen.count(2) <= 1 + 6


def test_a_neighbour_that_comes_is_noticed_within_two_steps() -> None:
    """Steps 100 to 500 are ten times as long on two threads; later two are taken up again."""

    def machine(number: int, threads: int) -> float:
        return 0.4 if threads == 2 and 100 <= number < 500 else 0.04 / threads

    chosen = steps(Pace((1, 2)), machine, 1500)
    assert chosen[99] == 2
    assert chosen[102:500].count(1) > 380
    assert chosen[-400:].count(2) > 390


def test_sizes_of_steps_are_measured_apart() -> None:
    """Threads pay for a long prefill and not for one row."""
    pace = Pace((1, 4, 8))
    steps(pace, lambda number, threads: 0.02 * threads, 50, rows=1)
    steps(pace, lambda number, threads: 0.8 / threads, 50, rows=512)
    assert (pace.choose(2), pace.choose(300)) == (1, 8)


def test_a_fixed_number_is_kept() -> None:
    """Somebody asked for three."""
    assert set(steps(Pace((3,)), lambda number, threads: 0.1, 600)) == {3}
