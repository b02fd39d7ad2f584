"""On how many threads the next kernel runs. A kernel's result does not depend on it."""

import numba

_MOST = int(numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]


def use(count: int) -> None:
    """The kernels that this thread calls from now on run on so many threads, or as many as there are."""
    numba.set_num_threads(min(count, _MOST))
